"""The cache: the tiers of the node, then the pool, then the lake."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from dalipipe.cache.flights import Flights
from dalipipe.cache.lake import BlockMap, Fetched
from dalipipe.cache.passing import PassingBlocks
from dalipipe.cache.pool import PooledReader
from dalipipe.cache.tier import Tier
from dalipipe.cache.view import HeldView
from dalipipe.errors import CacheError, CacheTimeoutError, ClosedError, StorageError
from dalipipe.telemetry import Recorder

# Times that a block may come and vanish again (a `cache clear` in a loop) before it is read past the tiers.
_MAX_VANISHED = 16


class TieredCache:
    """Blocks from the nearest tier that has them, else from farther away; see `Cache`.

    Args:
        source: the pool and the lake.
        tiers: of this node, the nearest first; exclusive by their policies.
        passing: shares blocks that no tier keeps with the other processes of the node; None keeps them to this one.
        on_close: called once by `close`.
    """

    def __init__(
        self,
        manifest: BlockMap,
        source: PooledReader,
        tiers: Sequence[Tier],
        *,
        wait_s: float,
        recorder: Recorder,
        about: str,
        passing: PassingBlocks | None = None,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self._manifest = manifest
        self._source = source
        self._tiers = tuple(tiers)
        self._wait_s = wait_s
        self._recorder = recorder
        self._about = about
        self._passing = passing
        self._on_close = on_close
        self._flights = Flights(wait_s, self._landed)
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
            CacheError: a folder of the node cannot be read.
            ClosedError: `close` was called.
        """
        if self._closed:
            raise ClosedError(f"block {block} was asked of a closed cache")
        if not 0 <= block < self._manifest.num_blocks:
            raise IndexError(f"block {block} is not in [0, {self._manifest.num_blocks})")
        try:
            view = self._from_tiers(block)
            if view is not None:
                return view
            home = self._home(block)
            if home is not None:
                view = self._bring(block, home)
        except (CacheTimeoutError, StorageError):
            raise  # both are builtins too: a refusal by the lake is a PermissionError
        except PermissionError as error:
            raise CacheError(
                f"block {block} cannot be read in {self._tiers[0].blocks.folder}: {error}; let this user read and "
                "write the folder, or choose another cache.dir"
            ) from error
        return view or self._stream(block)

    def request(self, blocks: Sequence[int], need_by: Sequence[int]) -> None:
        """Takes no action: a tier answers a `get` at once, and the lake is what the prefetcher's threads wait for."""

    def contains(self, block: int) -> bool:
        """Whether `get` would be answered without the lake or the pool just now."""
        return (
            self._flights.contains(block)
            or self.is_kept(block)
            or (self._passing is not None and self._passing.contains(block))
        )

    @property
    def has_tiers(self) -> bool:
        """Whether this node keeps any blocks."""
        return bool(self._tiers)

    def keeps(self, block: int) -> bool:
        """Whether a tier of this node keeps the block as long as there is room."""
        return any(tier.policy.admits(block) for tier in self._tiers)

    def is_kept(self, block: int) -> bool:
        """Whether a tier of this node has the block."""
        return any(tier.blocks.contains(block) for tier in self._tiers)

    def bring(self, block: int) -> bool:
        """Brings the block into its tier if there is room without dropping another; whether it is there now.

        Raises as `get`.
        """
        num_bytes = self._manifest.block_bytes(block)
        home = self._home(block)
        if not self.is_kept(block) and home is not None and home.has_room(block, num_bytes):
            view = self._bring(block, home, may_evict=False)
            if view is not None:
                view.release()
        return self.is_kept(block)

    def close(self) -> None:
        """Ends this process's use; held views stay valid and other processes are untouched. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._passing is not None:
            self._passing.close()
        for tier in self._tiers:
            tier.close()
        self._source.close()
        self._on_close()

    def _home(self, block: int) -> Tier | None:
        num_bytes = self._manifest.block_bytes(block)
        return next((tier for tier in self._tiers if tier.admits(block, num_bytes)), None)

    def _from_tiers(self, block: int) -> HeldView | None:
        # All are asked, not only the block's home: another job of the node may share the set out differently.
        num_bytes = self._manifest.block_bytes(block) if self._tiers else 0
        for tier in self._tiers:
            memory = tier.open(block, num_bytes)
            if memory is not None:
                return self._mapped(memory, tier, tier.name)
        return None

    def _bring(self, block: int, home: Tier, *, may_evict: bool = True) -> HeldView | None:
        for _ in range(_MAX_VANISHED):
            started_s = time.perf_counter()
            lock = home.blocks.lock(block, self._wait_s)
            self._recorder.add(f"lock_wait_s.{home.name}", time.perf_counter() - started_s)
            try:
                view = self._from_tiers(block)
                if view is not None:
                    return view
                if lock is None:
                    continue
                if self._is_passing(block):
                    return None
                fetched = self._read(block)
                home.used(block)
                kept = home.keep(block, fetched.data, may_evict=may_evict)
            finally:
                if lock is not None:
                    lock.release()
            if not kept:
                return self._stream(block, fetched)
            # The page cache holds the bytes now, so the buffer of the fetch is freed instead of held twice.
            mapped = home.blocks.open(block, len(fetched.data))
            return self._stream(block, fetched) if mapped is None else self._mapped(mapped, home, fetched.tier)
        return None

    @staticmethod
    def _mapped(memory: memoryview, tier: Tier, came_from: str) -> HeldView:
        # Where blocks are evicted, a view may be all that keeps a dropped file's space from being free.
        return HeldView(memory, came_from, held_bytes=len(memory) if tier.evicts else 0)

    def _stream(self, block: int, read_already: Fetched | None = None) -> HeldView:
        fetched, shared = self._flights.get(block, lambda _block: self._pass(block, read_already))
        num_bytes = len(fetched.data)
        tier = "memory" if shared else fetched.tier
        if tier == "memory":
            self._recorder.add("blocks_hit.memory")
            self._recorder.add("bytes_read.memory", num_bytes)
        return HeldView(fetched.data, tier, held_bytes=num_bytes, on_release=lambda: self._flights.release(block))

    def _pass(self, block: int, read_already: Fetched | None) -> Fetched:
        if self._passing is None:
            return read_already or self._read(block)
        if read_already is not None:
            return self._passing.offer(block, read_already)
        return self._passing.get(block, self._manifest.block_bytes(block), self._read)

    def _landed(self, block: int) -> None:
        if self._passing is not None:
            self._passing.release(block)

    def _is_passing(self, block: int) -> bool:
        return self._flights.contains(block) or (self._passing is not None and self._passing.contains(block))

    def _read(self, block: int) -> Fetched:
        self._recorder.add("blocks_missed")
        return self._source.read(block)
