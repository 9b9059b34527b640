"""Whole blocks from the lake, checked against the manifest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from dalipipe.cache.firstread import FirstReads
from dalipipe.errors import (
    AccessDeniedError,
    IntegrityError,
    ObjectNotFoundError,
    StorageError,
    StorageTimeoutError,
)
from dalipipe.shards.digest import NO_DIGEST, digest64
from dalipipe.storage.ranges import PART_BYTES
from dalipipe.storage.url import OBJECT_SCHEMES, scheme_of
from dalipipe.telemetry import Recorder, Stage

if TYPE_CHECKING:
    from dalipipe.storage.store import Store


class Extent(Protocol):
    """Bytes [start, stop) of the shard named `shard`, their xxh3-64, and the number of this part of a block, which no
    other part of the data set has."""

    @property
    def shard(self) -> str: ...
    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...
    @property
    def digest(self) -> int: ...
    @property
    def part(self) -> int: ...


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

    Where the manifest knows no digest, that of what the node read first holds from then on.

    Args:
        first: what the node read first; None where nothing is kept.
    """

    def __init__(self, manifest: BlockMap, store: Store, recorder: Recorder, first: FirstReads | None = None) -> None:
        self._manifest = manifest
        self._store = store
        self._recorder = recorder
        self._first = first
        # The answer to one request of these stores is memory of its own; plain files are read into a buffer, and fsspec
        # copies in any case.
        self._hands_over = scheme_of(store.url) in OBJECT_SCHEMES

    def read(self, block: int) -> memoryview:
        """Returns the block's bytes, uint8 [block_bytes], read-only, its extents joined.

        Raises:
            IntegrityError: an extent has the wrong digest twice in a row, or its shard is too short.
            StorageError: the store failed for good.
        """
        extents = self._manifest.extents(block)
        if self._hands_over and len(extents) == 1 and extents[0].stop - extents[0].start <= PART_BYTES:
            with self._recorder.span(Stage.LAKE):
                return self._read_checked(extents[0]).toreadonly()
        buffer = np.empty(sum(extent.stop - extent.start for extent in extents), np.uint8).data
        at = 0
        with self._recorder.span(Stage.LAKE):
            for extent in extents:
                num_bytes = extent.stop - extent.start
                self._read_checked(extent, buffer[at : at + num_bytes])
                at += num_bytes
        return buffer.toreadonly()

    def _read_checked(self, extent: Extent, into: memoryview | None = None) -> memoryview:
        key, stated, found = extent.shard, extent.digest, 0
        if stated == NO_DIGEST and self._first is not None:
            stated = self._first.get(extent.part)
        for attempt in range(2):
            if attempt:
                self._recorder.add("retries")
            data = self._read_extent(key, extent, into)
            self._recorder.add("bytes_read.lake", len(data))
            found = digest64(data)
            if stated == NO_DIGEST and self._first is not None:
                stated = self._first.keep(extent.part, found)
            if stated in (found, NO_DIGEST):
                return data
        where = f"bytes [{extent.start}, {extent.stop}) of {self._store.url}/{key} have xxh3-64 {found:016x}"
        if extent.digest == NO_DIGEST and self._first is not None:
            raise IntegrityError(
                f"{where}, also when read again; when this node read them first they had {stated:016x} (kept in "
                f"{self._first.path}): the shard was changed or is corrupt. Restore it; if it was replaced on purpose, "
                "run `dalipipe index` again and `dalipipe cache clear first_reads=true` on every node"
            )
        raise IntegrityError(
            f"{where}, the manifest says {stated:016x}, also when read again; the shard was changed or is corrupt: "
            "copy it again from where it came, or pack again; `dalipipe verify` lists all that is damaged"
        )

    def _read_extent(self, key: str, extent: Extent, into: memoryview | None) -> memoryview:
        try:
            return self._store.read(key, extent.start, extent.stop, into=into)
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
