"""Several stores read as one: the first part of a key names the store."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from dalipipe.errors import ObjectNotFoundError
from dalipipe.storage.coalesce import read_each
from dalipipe.storage.store import ObjectInfo, Store


class UnionStore:
    """`NAME/key` is `key` in the store called NAME; see `Store`.

    Args:
        stores: by name; a name may hold `/`. They are closed with the union.
    """

    def __init__(self, stores: Mapping[str, Store]) -> None:
        self._stores = dict(sorted(stores.items(), key=lambda item: -len(item[0])))

    @property
    def url(self) -> str:
        """All stores by name, for messages."""
        return f"mix[{', '.join(f'{name}={store.url}' for name, store in self._stores.items())}]"

    def head(self, key: str) -> ObjectInfo:
        """As `Store.head`."""
        _, store, own_key = self._route(key)
        return replace(store.head(own_key), key=key)

    def read(self, key: str, start: int = 0, stop: int | None = None, *, into: memoryview | None = None) -> memoryview:
        """As `Store.read`."""
        _, store, own_key = self._route(key)
        return store.read(own_key, start, stop, into=into)

    def read_many(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """As `ReadsMany.read_many`."""
        _, store, own_key = self._route(key)
        return read_each(store, own_key, ranges)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """As `Store.list`; without a prefix, one store after the other."""
        if prefix.strip("/"):
            name, store, own_prefix = self._route(f"{prefix.rstrip('/')}/")
            yield from (replace(info, key=f"{name}/{info.key}") for info in store.list(own_prefix))
            return
        for name, store in self._stores.items():
            yield from (replace(info, key=f"{name}/{info.key}") for info in store.list())

    def put(self, key: str, data: bytes | memoryview | Path, *, if_absent: bool = False) -> None:
        """As `Store.put`."""
        _, store, own_key = self._route(key)
        store.put(own_key, data, if_absent=if_absent)

    def delete(self, key: str) -> None:
        """As `Store.delete`."""
        _, store, own_key = self._route(key)
        store.delete(own_key)

    def close(self) -> None:
        """Closes all stores. Idempotent."""
        for store in self._stores.values():
            store.close()

    def _route(self, key: str) -> tuple[str, Store, str]:
        for name, store in self._stores.items():
            if key.startswith(f"{name}/"):
                return name, store, key[len(name) + 1 :]
        raise ObjectNotFoundError(f"{key} is in none of {self.url}")
