"""Bytes behind a URL: the only room that knows object-store clients, fsspec and plain files."""

from dalipipe.storage.open import open_store
from dalipipe.storage.store import ObjectInfo, StorageConfig, Store
from dalipipe.storage.url import join_url

__all__ = ["ObjectInfo", "StorageConfig", "Store", "join_url", "open_store"]
