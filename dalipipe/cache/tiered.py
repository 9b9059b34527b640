"""The cache: node tier, then the lake."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from dalipipe.cache.blockstore import BlockStore
from dalipipe.cache.contract import EvictionPolicy
from dalipipe.cache.flights import Flights
from dalipipe.cache.lake import BlockMap, LakeReader
from dalipipe.cache.view import HeldView
from dalipipe.errors import CacheError, CacheTimeoutError, ClosedError
from dalipipe.telemetry import Recorder, Stage
from dalipipe.units import format_bytes

# Times that a block may come and vanish again (a `cache clear` in a loop) before it is read past the node tier.
_MAX_VANISHED = 16

_log = logging.getLogger(__name__)


class NodeTier:
    """The block store of one data set with the policy and budget that decide what is added to it.

    Args:
        budget_bytes: blocks are kept as long as they fit; what other processes add at the same time is not seen.
        used_bytes: what the store holds already.
    """

    def __init__(
        self, blocks: BlockStore, policy: EvictionPolicy, *, budget_bytes: int, used_bytes: int, recorder: Recorder
    ) -> None:
        self.blocks = blocks
        self.policy = policy
        self.budget_bytes = budget_bytes
        self._used_bytes = used_bytes
        self._recorder = recorder
        self._lock = threading.Lock()
        self._warned = False

    def admits(self, block: int, num_bytes: int) -> bool:
        """Whether the block is to be kept: the policy wants it and it fits."""
        return self.policy.admits(block) and self._used_bytes + num_bytes <= self.budget_bytes

    def keep(self, block: int, data: memoryview) -> bool:
        """Writes the block. A disk that is full or fails costs the block its place, never the run."""
        try:
            self.blocks.write(block, data)
        except OSError as error:
            self._recorder.add("node_write_failures")
            with self._lock:
                warn, self._warned = not self._warned, True
            if warn:
                _log.warning(
                    "block %d (%s) was not kept in %s: %s; blocks are read from the lake without being kept until "
                    "there is room: free space there, or lower cache.tiers.node.capacity",
                    block,
                    format_bytes(len(data)),
                    self.blocks.path(block).parent,
                    error,
                )
            return False
        self._recorder.add("bytes_written.node", len(data))
        with self._lock:
            self._used_bytes += len(data)
        return True


class TieredCache:
    """Blocks from the node tier where it has them, else from the lake; see `Cache`."""

    def __init__(
        self,
        manifest: BlockMap,
        lake: LakeReader,
        node: NodeTier | None,
        *,
        wait_s: float,
        recorder: Recorder,
        about: str,
    ) -> None:
        self._manifest = manifest
        self._lake = lake
        self._node = node
        self._wait_s = wait_s
        self._recorder = recorder
        self._about = about
        self._flights = Flights(self._read_lake, wait_s)
        self._closed = False

    def describe(self) -> str:
        """One sentence: the policy, what it keeps and why."""
        return self._about

    def get(self, block: int) -> HeldView:
        """Returns the block from the nearest tier; see `Cache.get`.

        Raises:
            IndexError: there is no such block.
            IntegrityError, StorageError: the lake's bytes are wrong, or cannot be read.
            CacheTimeoutError: another process or thread has been bringing the block for longer than the deadline.
            CacheError: the node folder cannot be read.
            ClosedError: `close` was called.
        """
        if self._closed:
            raise ClosedError(f"block {block} was asked of a closed cache")
        if not 0 <= block < self._manifest.num_blocks:
            raise IndexError(f"block {block} is not in [0, {self._manifest.num_blocks})")
        if self._node is None:
            return self._stream(block)
        try:
            view = self._from_node(block)
            if view is not None:
                return view
            if self._node.admits(block, self._manifest.block_bytes(block)):
                view = self._bring(block, self._node)
        except CacheTimeoutError:
            raise
        except PermissionError as error:
            raise CacheError(
                f"block {block} cannot be read at {self._node.blocks.path(block)}: {error}; let this user read and "
                "write the folder, or choose another cache.dir"
            ) from error
        return view or self._stream(block)

    def request(self, blocks: Sequence[int], need_by: Sequence[int]) -> None:
        """Takes no action: both tiers answer a `get` at once or as fast as the lake, so there is nothing to prepare."""

    def contains(self, block: int) -> bool:
        """Whether `get` would be answered without the lake just now."""
        return self._flights.contains(block) or (self._node is not None and self._node.blocks.contains(block))

    def close(self) -> None:
        """Ends this process's use; held views stay valid and other processes are untouched. Idempotent."""
        self._closed = True

    def _from_node(self, block: int) -> HeldView | None:
        assert self._node is not None
        num_bytes = self._manifest.block_bytes(block)
        with self._recorder.span(Stage.NODE):
            memory = self._node.blocks.open(block, num_bytes)
        if memory is None:
            return None
        self._recorder.add("blocks_hit.node")
        self._recorder.add("bytes_read.node", num_bytes)
        return HeldView(memory, "node")

    def _bring(self, block: int, node: NodeTier) -> HeldView | None:
        for _ in range(_MAX_VANISHED):
            started_s = time.perf_counter()
            lock = node.blocks.lock(block, self._wait_s)
            self._recorder.add("lock_wait_s.node", time.perf_counter() - started_s)
            try:
                view = self._from_node(block)
                if view is not None:
                    return view
                if lock is None:
                    continue
                data = self._read_lake(block)
                kept = node.keep(block, data)
            finally:
                if lock is not None:
                    lock.release()
            # The page cache holds the bytes now, so the buffer of the fetch is freed instead of held twice.
            mapped = node.blocks.open(block, len(data)) if kept else None
            if mapped is not None:
                return HeldView(mapped, "lake")
            return HeldView(data, "lake", held_bytes=len(data))
        return None

    def _stream(self, block: int) -> HeldView:
        data, shared = self._flights.get(block)
        if shared:
            self._recorder.add("blocks_hit.memory")
            self._recorder.add("bytes_read.memory", len(data))
        return HeldView(
            data,
            "memory" if shared else "lake",
            held_bytes=len(data),
            on_release=lambda: self._flights.release(block),
        )

    def _read_lake(self, block: int) -> memoryview:
        self._recorder.add("blocks_missed")
        return self._lake.read(block)
