"""Whole blocks from the lake, checked against the manifest."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from dalipipe.cache.firstread import FirstReads
from dalipipe.errors import (
    AccessDeniedError,
    IntegrityError,
    ObjectNotFoundError,
    StorageError,
    StorageTimeoutError,
)
from dalipipe.shards.digest import NO_DIGEST, digest64
from dalipipe.storage.buffers import BufferPool
from dalipipe.storage.ranges import PART_BYTES
from dalipipe.storage.url import OBJECT_SCHEMES, scheme_of
from dalipipe.telemetry import Recorder, Stage

if TYPE_CHECKING:
    from dalipipe.storage.store import Store

_log = logging.getLogger(__name__)


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
    """A block's bytes, read-only, and where they came from: lake or pool.

    is_cut: they are a part of the answer to a request for several blocks, and keep all of it from being freed.
    """

    data: memoryview
    tier: str
    is_cut: bool = False

    def apart(self) -> Fetched:
        """The same in memory of its own, for a block that may be held longer than its neighbours."""
        return Fetched(memoryview(bytes(self.data)), self.tier) if self.is_cut else self


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
        self._buffers = BufferPool()

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
        buffer = self._buffers.take(sum(extent.stop - extent.start for extent in extents))
        at = 0
        with self._recorder.span(Stage.LAKE):
            for extent in extents:
                num_bytes = extent.stop - extent.start
                self._read_checked(extent, buffer[at : at + num_bytes])
                at += num_bytes
        return buffer.toreadonly()

    def read_run(self, run: Sequence[int]) -> dict[int, memoryview]:
        """Reads blocks that lie one behind the other in one shard by one request.

        Args:
            run: see `runs.run_of`; at least two.

        Returns: the bytes of the first and of the others, read-only, cut from one buffer. Others that came damaged, or
            did not come as the request failed, are missing: each is then to be read alone, and tells its own error.

        Raises:
            IntegrityError, StorageError: the first could not be had, also not alone.
        """
        extents = {block: self._manifest.extents(block)[0] for block in run}
        begin = extents[run[0]].start
        found: dict[int, memoryview] = {}
        try:
            with self._recorder.span(Stage.LAKE):
                data = self._read_joined(extents[run[0]].shard, begin, extents[run[-1]].stop)
                for block, extent in extents.items():
                    piece = data[extent.start - begin : extent.stop - begin]
                    digest = digest64(piece)
                    if self._stated(extent, digest) in (digest, NO_DIGEST):
                        found[block] = piece
        except StorageTimeoutError:
            raise  # it took all the time that there was
        except StorageError as error:
            _log.debug("blocks %d to %d did not come together: %s", run[0], run[-1], error)
        if run[0] not in found:
            self._recorder.add("retries")
            found = {run[0]: self.read(run[0]), **found}
        return found

    def _read_joined(self, key: str, start: int, stop: int) -> memoryview:
        into = None if self._hands_over else self._buffers.take(stop - start)
        data = self._store.read(key, start, stop, into=into)
        self._recorder.add("bytes_read.lake", len(data))
        return data.toreadonly()

    def _stated(self, extent: Extent, found: int) -> int:
        """The digest that the part must have: the manifest's, else that of the first read, which this may be."""
        if extent.digest != NO_DIGEST or self._first is None:
            return extent.digest
        return self._first.keep(extent.part, found)

    def _read_checked(self, extent: Extent, into: memoryview | None = None) -> memoryview:
        key, stated, found = extent.shard, extent.digest, 0
        for attempt in range(2):
            if attempt:
                self._recorder.add("retries")
            data = self._read_extent(key, extent, into)
            self._recorder.add("bytes_read.lake", len(data))
            found = digest64(data)
            stated = self._stated(extent, found)
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
