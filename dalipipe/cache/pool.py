"""The pool tier: blocks in a store near the cluster, filled on first read, for all nodes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from dalipipe.cache.blockstore import SET_BLOCKS, TRAILER_BYTES, is_whole, trailer
from dalipipe.cache.contract import EvictionPolicy
from dalipipe.cache.firstread import FirstReads
from dalipipe.cache.lake import BlockMap, Fetched, LakeReader
from dalipipe.errors import ObjectNotFoundError, StorageError
from dalipipe.storage.buffers import BufferPool
from dalipipe.telemetry import Recorder

if TYPE_CHECKING:
    from dalipipe.storage.store import Store

# How long a pool that failed is left alone, so that its timeouts are not paid for every block.
_REST_S = 30.0

_log = logging.getLogger(__name__)


class Pool:
    """Blocks as objects `<identity>/<set>/<block>`, each with the trailer of a block file, so that a torn or foreign
    object is never taken for data. Trouble with the pool costs reads of the lake, never the run.

    Args:
        policy: which blocks it holds.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        store: Store,
        identity: str,
        policy: EvictionPolicy,
        recorder: Recorder,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.policy = policy
        self._store = store
        self._identity = identity
        self._recorder = recorder
        self._buffers = BufferPool()
        self._clock = clock
        self._lock = threading.Lock()
        self._rests_until_s = float("-inf")

    def read(
        self, block: int, num_bytes: int, agrees: Callable[[memoryview], bool] = lambda _data: True
    ) -> memoryview | None:
        """The block's bytes, or None where the pool has none that are sound and that `agrees` takes, or cannot be
        reached."""
        if not self.policy.admits(block) or self._clock() < self._rests_until_s:
            return None
        buffer = self._buffers.take(num_bytes + TRAILER_BYTES)
        try:
            self._store.read(self._key(block), 0, len(buffer), into=buffer)
        except ObjectNotFoundError:
            return None
        except StorageError as error:
            if self._is_short(block, num_bytes):
                self._recorder.add("pool_corrupt")
            else:
                self._rest("read", error)
            return None
        if not is_whole(buffer) or not agrees(buffer[:num_bytes]):
            self._recorder.add("pool_corrupt")
            return None
        self._recorder.add("blocks_hit.pool")
        self._recorder.add("bytes_read.pool", num_bytes)
        return buffer[:num_bytes].toreadonly()

    def put(self, block: int, data: memoryview) -> None:
        """Gives the block to the cluster."""
        if not self.policy.admits(block) or self._clock() < self._rests_until_s:
            return
        try:
            self._store.put(self._key(block), b"".join((data, trailer(data))))
        except StorageError as error:
            self._rest("write", error)
            return
        self._recorder.add("bytes_written.pool", len(data))

    def close(self) -> None:
        """Frees the connections. Idempotent."""
        self._store.close()

    def _key(self, block: int) -> str:
        return f"{self._identity}/{block // SET_BLOCKS}/{block}"

    def _is_short(self, block: int, num_bytes: int) -> bool:
        try:
            return self._store.head(self._key(block)).num_bytes != num_bytes + TRAILER_BYTES
        except StorageError:
            return False

    def _rest(self, what: str, error: StorageError) -> None:
        self._recorder.add("pool_failures")
        with self._lock:
            resting = self._clock() < self._rests_until_s
            self._rests_until_s = self._clock() + _REST_S
        if not resting:
            _log.warning(
                "the pool failed a %s and is left alone for %g s, blocks come from the lake meanwhile: %s",
                what,
                _REST_S,
                error,
            )


class PooledReader:
    """Blocks from the pool where it has them, else from the lake and then into the pool.

    Args:
        first: what the node read first, which the pool is held to as well; None where nothing is kept.
    """

    def __init__(
        self, manifest: BlockMap, lake: LakeReader, pool: Pool | None, first: FirstReads | None = None
    ) -> None:
        self._manifest = manifest
        self._lake = lake
        self._pool = pool
        self._first = first

    def read(self, run: Sequence[int]) -> dict[int, Fetched]:
        """The bytes of blocks and where they came from: of the first in any case, of the others up to the first that
        the pool has, and of those before that one what comes whole with one request; see `LakeReader.read_run`. Raises
        as `LakeReader.read`.

        What came from the lake is to be given to `fill` once whoever waits for it has it.
        """
        lacking, pooled = run, dict[int, Fetched]()
        if self._pool is not None:
            for place, block in enumerate(run):
                data = self._from_pool(self._pool, block)
                if data is not None:
                    lacking, pooled = run[:place], {block: Fetched(data, "pool")}
                    break
        if not lacking:
            return pooled
        if len(lacking) == 1:
            return {lacking[0]: Fetched(self._lake.read(lacking[0]), "lake"), **pooled}
        found = {block: Fetched(data, "lake", is_cut=True) for block, data in self._lake.read_run(lacking).items()}
        return {**found, **pooled}

    def fill(self, found: Mapping[int, Fetched]) -> None:
        """Gives what came from the lake to the pool."""
        if self._pool is not None:
            for block, fetched in found.items():
                if fetched.tier == "lake":
                    self._pool.put(block, fetched.data)

    def close(self) -> None:
        """Idempotent."""
        if self._pool is not None:
            self._pool.close()
        if self._first is not None:
            self._first.close()

    def _from_pool(self, pool: Pool, block: int) -> memoryview | None:
        return pool.read(block, self._manifest.block_bytes(block), lambda data: self._agrees(block, data))

    def _agrees(self, block: int, data: memoryview) -> bool:
        return self._first is None or self._first.agrees(self._manifest.extents(block), data)
