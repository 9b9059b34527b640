"""A data set whose shards may lie elsewhere: under other folders, buckets or schemes than its manifest."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from dalipipe.storage.coalesce import read_each
from dalipipe.storage.open import open_store
from dalipipe.storage.store import ObjectInfo, Store
from dalipipe.storage.url import is_link, link_target, strip_slash


class LinkedStore:
    """The store at a URL that also answers for keys which are links (`is_link`): whole URLs, or `../` paths.

    Links are read only. Stores behind them are opened when first used, by the same `open_at` as the store itself.
    """

    def __init__(self, url: str, open_at: Callable[[str], Store] = open_store) -> None:
        self._open_at = open_at
        self._own = open_at(url)
        # `Store.url` is for messages; what lies beside is reached with the same password.
        self._base = strip_slash(url) if "://" in self._own.url else self._own.url
        self._others: dict[str, Store] = {}
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        """The URL of the store itself."""
        return self._own.url

    def head(self, key: str) -> ObjectInfo:
        """Size and version of one object; see `Store.head`."""
        store, name = self._behind(key)
        info = store.head(name)
        return ObjectInfo(key=key, num_bytes=info.num_bytes, etag=info.etag)

    def read(self, key: str, start: int = 0, stop: int | None = None, *, into: memoryview | None = None) -> memoryview:
        """Reads bytes [start, stop); see `Store.read`."""
        store, name = self._behind(key)
        return store.read(name, start, stop, into=into)

    def read_many(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """As `ReadsMany.read_many`."""
        store, name = self._behind(key)
        return read_each(store, name, ranges)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """The objects of the store itself."""
        return self._own.list(prefix)

    def put(self, key: str, data: bytes | memoryview | Path, *, if_absent: bool = False) -> None:
        """Writes to the store itself; a link is refused as any key with `..` or `://` is."""
        self._own.put(key, data, if_absent=if_absent)

    def delete(self, key: str) -> None:
        """Deletes from the store itself."""
        self._own.delete(key)

    def close(self) -> None:
        """Closes all stores. Idempotent."""
        with self._lock:
            others, self._others = list(self._others.values()), {}
        for store in (self._own, *others):
            store.close()

    def _behind(self, key: str) -> tuple[Store, str]:
        if not is_link(key):
            return self._own, key
        url, name = link_target(self._base, key)
        with self._lock:
            store = self._others.get(url)
            if store is None:
                store = self._others[url] = self._open_at(url)
        return store, name
