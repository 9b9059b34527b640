"""Whole blocks from the lake, checked against the manifest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from dalipipe.errors import (
    AccessDeniedError,
    IntegrityError,
    ObjectNotFoundError,
    StorageError,
    StorageTimeoutError,
)
from dalipipe.shards.digest import NO_DIGEST, digest64
from dalipipe.telemetry import Recorder, Stage

if TYPE_CHECKING:
    from dalipipe.storage.store import Store


class Extent(Protocol):
    """Bytes [start, stop) of the shard named `shard` and their xxh3-64."""

    @property
    def shard(self) -> str: ...
    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...
    @property
    def digest(self) -> int: ...


class BlockMap(Protocol):
    """What the cache asks of a manifest: where the bytes of each block lie."""

    @property
    def identity(self) -> str: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    def block_bytes(self, block: int) -> int: ...
    def extents(self, block: int) -> Sequence[Extent]: ...


@dataclass(frozen=True, slots=True)
class Fetched:
    """A block's bytes, read-only, and where they came from: lake or pool."""

    data: memoryview
    tier: str


class LakeReader:
    """Reads blocks from the store into memory and lets only bytes pass that match the manifest.

    Where the manifest knows no digest, the cache's own over what was read first holds from then on.
    """

    def __init__(self, manifest: BlockMap, store: Store, recorder: Recorder) -> None:
        self._manifest = manifest
        self._store = store
        self._recorder = recorder

    def read(self, block: int) -> memoryview:
        """Returns the block's bytes, uint8 [block_bytes], read-only, its extents joined.

        Raises:
            IntegrityError: an extent has the wrong digest twice in a row, or its shard is too short.
            StorageError: the store failed for good.
        """
        extents = self._manifest.extents(block)
        buffer = np.empty(sum(extent.stop - extent.start for extent in extents), np.uint8).data
        at = 0
        with self._recorder.span(Stage.LAKE):
            for extent in extents:
                num_bytes = extent.stop - extent.start
                self._read_checked(extent, buffer[at : at + num_bytes])
                at += num_bytes
        return buffer.toreadonly()

    def _read_checked(self, extent: Extent, into: memoryview) -> None:
        key = extent.shard
        found = 0
        for attempt in range(2):
            if attempt:
                self._recorder.add("retries")
            self._read_extent(key, extent, into)
            self._recorder.add("bytes_read.lake", len(into))
            found = digest64(into)
            if extent.digest in (found, NO_DIGEST):
                return
        raise IntegrityError(
            f"bytes [{extent.start}, {extent.stop}) of {self._store.url}/{key} have xxh3-64 {found:016x}, the manifest "
            f"says {extent.digest:016x}, also when read again; the shard was changed or is corrupt: copy "
            "it again from where it came, or pack again; `dalipipe verify` lists all that is damaged"
        )

    def _read_extent(self, key: str, extent: Extent, into: memoryview) -> None:
        try:
            self._store.read(key, extent.start, extent.stop, into=into)
        except (ObjectNotFoundError, AccessDeniedError, StorageTimeoutError):
            raise
        except StorageError as error:
            num_bytes = self._size_or_none(key)
            if num_bytes is None or num_bytes >= extent.stop:
                raise
            raise IntegrityError(
                f"{self._store.url}/{key} has {num_bytes} bytes, the manifest needs bytes [{extent.start}, "
                f"{extent.stop}) of it; the shard is cut short: restore it, or pack the data set again"
            ) from error

    def _size_or_none(self, key: str) -> int | None:
        try:
            return self._store.head(key).num_bytes
        except StorageError:
            return None
