"""A store whose requests are counted and timed."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dalipipe.storage.coalesce import read_each
from dalipipe.telemetry import Recorder

if TYPE_CHECKING:
    from dalipipe.storage.store import ObjectInfo, Store


class MeasuredStore:
    """Passes every call on and records `lake_requests.<read|head|list>` and `lake_<read|head|list>_s`; see `Store`.

    A request here is one call, whatever the client below makes of it.
    """

    def __init__(self, store: Store, recorder: Recorder) -> None:
        self._store = store
        self._recorder = recorder

    @property
    def url(self) -> str:
        """As `Store.url`."""
        return self._store.url

    def head(self, key: str) -> ObjectInfo:
        """As `Store.head`."""
        began_s = time.perf_counter()
        try:
            return self._store.head(key)
        finally:
            self._done("head", began_s)

    def read(self, key: str, start: int = 0, stop: int | None = None, *, into: memoryview | None = None) -> memoryview:
        """As `Store.read`."""
        began_s = time.perf_counter()
        try:
            return self._store.read(key, start, stop, into=into)
        finally:
            self._done("read", began_s)

    def read_many(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """As `ReadsMany.read_many`; one request."""
        began_s = time.perf_counter()
        try:
            return read_each(self._store, key, ranges)
        finally:
            self._done("read", began_s)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """As `Store.list`; timed to the end of the listing."""
        began_s = time.perf_counter()
        try:
            yield from self._store.list(prefix)
        finally:
            self._done("list", began_s)

    def put(self, key: str, data: bytes | memoryview | Path, *, if_absent: bool = False) -> None:
        """As `Store.put`."""
        self._store.put(key, data, if_absent=if_absent)

    def delete(self, key: str) -> None:
        """As `Store.delete`."""
        self._store.delete(key)

    def close(self) -> None:
        """As `Store.close`."""
        self._store.close()

    def _done(self, kind: str, began_s: float) -> None:
        self._recorder.add(f"lake_requests.{kind}")
        self._recorder.observe(f"lake_{kind}_s", time.perf_counter() - began_s)
