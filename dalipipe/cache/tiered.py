"""The cache: the tiers of the node, then the pool, then the lake."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from itertools import accumulate, takewhile

from dalipipe.cache.lake import BlockMap, Fetched
from dalipipe.cache.locks import lock_another, unlock_block
from dalipipe.cache.passing import PassingBlocks
from dalipipe.cache.pool import PooledReader
from dalipipe.cache.runs import run_of
from dalipipe.cache.streamed import StreamedBlocks
from dalipipe.cache.tier import Tier
from dalipipe.cache.view import HeldView
from dalipipe.errors import CacheError, CacheTimeoutError, ClosedError, DalipipeError, StorageError
from dalipipe.filelocks import FileLock
from dalipipe.storage.ranges import PART_BYTES
from dalipipe.telemetry import Recorder

_log = logging.getLogger(__name__)

# Times that a block may come and vanish again (a `cache clear` in a loop) before it is read past the tiers.
_MAX_VANISHED = 16


class TieredCache:
    """Blocks from the nearest tier that has them, else from farther away; see `Cache`.

    Args:
        source: the pool and the lake.
        tiers: of this node, the nearest first; exclusive by their policies.
        request_bytes: neighbours that are wanted together are read by one request of at most so many bytes; 0: each
            alone.
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
        request_bytes: int = PART_BYTES,
        passing: PassingBlocks | None = None,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self._manifest = manifest
        self._source = source
        self._tiers = tuple(tiers)
        self._wait_s = wait_s
        self._recorder = recorder
        self._about = about
        self._request_bytes = request_bytes
        self._on_close = on_close
        self._streamed = StreamedBlocks(
            passing,
            wait_s=wait_s,
            recorder=recorder,
            block_bytes=manifest.block_bytes,
            belongs=lambda block: self._home(block) is not None or self.is_kept(block),
        )
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
        got: list[HeldView] = []
        self.get_run([block], lambda _block, view: got.append(view))
        return got[0]

    def get_run(self, blocks: Sequence[int], deliver: Callable[[int, HeldView], None]) -> None:
        """Delivers the first of `blocks`, and those that come with it; see `Cache.get_run`. Raises as `get`."""
        first = blocks[0]
        if self._closed:
            raise ClosedError(f"block {first} was asked of a closed cache")
        if not 0 <= first < self._manifest.num_blocks:
            raise IndexError(f"block {first} is not in [0, {self._manifest.num_blocks})")
        try:
            view = self._from_tiers(first)
            if view is not None:
                deliver(first, view)
                return
            home = self._home(first)
            if home is not None and self._bring(blocks, home, deliver):
                return
        except (CacheTimeoutError, StorageError):
            raise  # both are builtins too: a refusal by the lake is a PermissionError
        except PermissionError as error:
            raise CacheError(
                f"block {first} cannot be read in {self._tiers[0].blocks.folder}: {error}; let this user read and "
                "write the folder, or choose another cache.dir"
            ) from error
        # One that has a home and came to no tier is passing by: whoever holds it has it already.
        run = self._run_of(blocks) if home is None else [first]
        self._source.fill(self._streamed.get_run(run, self._read, deliver))

    @property
    def request_bytes(self) -> int:
        """See `Cache.request_bytes`."""
        return self._request_bytes

    def together(self, blocks: Sequence[int]) -> list[int]:
        """See `Cache.together`."""
        run = [blocks[0]]
        if len(blocks) > 1 and self._request_bytes and not self.contains(blocks[0]):
            run = run_of(self._manifest, blocks, self._request_bytes)
        return run[:1] + list(takewhile(lambda block: not self.contains(block), run[1:]))

    def request(self, blocks: Sequence[int], need_by: Sequence[int]) -> None:
        """Takes no action: a tier answers a `get` at once, and the lake is what the prefetcher's threads wait for."""

    def contains(self, block: int) -> bool:
        """Whether `get` would be answered without the lake or the pool just now."""
        return self.is_kept(block) or self._streamed.contains(block)

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

    def bring(self, blocks: Sequence[int]) -> dict[int, bool]:
        """See `Cache.bring`: into their tier."""
        first = blocks[0]
        dealt = {first: False}

        def deliver(block: int, view: HeldView) -> None:
            view.release()
            dealt[block] = False

        home = self._home(first)
        if home is not None and not self.is_kept(first):
            sizes = accumulate(self._manifest.block_bytes(block) for block in self.together(blocks))
            roomy = [block for block, num_bytes in zip(blocks, sizes, strict=False) if home.has_room(block, num_bytes)]
            if roomy[:1] == [first]:
                self._bring(roomy, home, deliver, may_evict=False)
        return {block: self.is_kept(block) for block in dealt}

    def close(self) -> None:
        """Ends this process's use; held views stay valid and other processes are untouched. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._streamed.close()
        for tier in self._tiers:
            tier.close()
        self._source.close()
        self._on_close()

    def _home(self, block: int, beside_bytes: int = 0) -> Tier | None:
        """The tier that keeps the block, `beside_bytes` having come first."""
        num_bytes = beside_bytes + self._manifest.block_bytes(block)
        return next((tier for tier in self._tiers if tier.admits(block, num_bytes)), None)

    def _from_tiers(self, block: int) -> HeldView | None:
        # All are asked, not only the block's home: another job of the node may share the set out differently.
        num_bytes = self._manifest.block_bytes(block) if self._tiers else 0
        for tier in self._tiers:
            memory = tier.open(block, num_bytes)
            if memory is not None:
                return _mapped(memory, tier, tier.name)
        return None

    def _bring(
        self,
        blocks: Sequence[int],
        home: Tier,
        deliver: Callable[[int, HeldView], None],
        *,
        may_evict: bool = True,
    ) -> bool:
        """Delivers the first of `blocks` from its tier, read into it if need be with others; False where that did not
        come about."""
        first = blocks[0]
        for _ in range(_MAX_VANISHED):
            started_s = time.perf_counter()
            lock = home.blocks.lock(first, self._wait_s)
            self._recorder.add(f"lock_wait_s.{home.name}", time.perf_counter() - started_s)
            try:
                view = self._from_tiers(first)
                if view is None and lock is not None:
                    if self._streamed.contains(first):
                        return False
                    found = self._read(self._lock_run(blocks, home, lock))
                    self._keep(found, home, lock, deliver, may_evict=may_evict)
            finally:
                if lock is not None:
                    lock.release()
            if view is not None:
                deliver(first, view)
                return True
            if lock is not None:
                self._source.fill(found)
                return True
        return False

    def _lock_run(self, blocks: Sequence[int], home: Tier, lock: FileLock) -> list[int]:
        """The first of `blocks`, whose lock is held, and those to be read with it, locked as well: up to the first that
        somebody else brings, that is here, or that does not belong here. Nothing is waited for, so nobody can wait for
        each other."""
        run = self._run_of(blocks)
        num_bytes = self._manifest.block_bytes(run[0])
        for place, block in enumerate(run[1:], 1):
            if self._home(block, num_bytes) is not home or not lock_another(lock, block):
                return run[:place]
            if self.contains(block):
                unlock_block(lock, block)
                return run[:place]
            num_bytes += self._manifest.block_bytes(block)
        return run

    def _keep(
        self,
        found: dict[int, Fetched],
        home: Tier,
        lock: FileLock,
        deliver: Callable[[int, HeldView], None],
        *,
        may_evict: bool,
    ) -> None:
        """Keeps what was read in its tier, and delivers each block as soon as it is there. Raises for the first; of
        another that fails its own `get` will tell."""
        first = next(iter(found))
        for block, fetched in found.items():
            try:
                home.used(block)
                kept = home.keep(block, fetched.data, may_evict=may_evict)
                unlock_block(lock, block)
                # The page cache holds the bytes now, so the buffer of the fetch is freed instead of held twice.
                mapped = home.blocks.open(block, len(fetched.data)) if kept else None
                view = self._streamed.offer(block, fetched) if mapped is None else _mapped(mapped, home, fetched.tier)
            except (DalipipeError, OSError) as error:
                if block == first:
                    raise
                _log.debug("block %d, which came with block %d, was not kept: %s", block, first, error)
                continue
            deliver(block, view)

    def _run_of(self, blocks: Sequence[int]) -> list[int]:
        return run_of(self._manifest, blocks if self._request_bytes else blocks[:1], self._request_bytes)

    def _read(self, run: Sequence[int]) -> dict[int, Fetched]:
        self._recorder.add("blocks_missed")
        found = self._source.read(run)
        if len(found) > 1:
            self._recorder.add("blocks_missed", len(found) - 1)
            self._recorder.add("blocks_joined", max(1, sum(one.is_cut for one in found.values())) - 1)
        return found


def _mapped(memory: memoryview, tier: Tier, came_from: str) -> HeldView:
    # Where blocks are evicted, a view may be all that keeps a dropped file's space from being free.
    return HeldView(memory, came_from, held_bytes=len(memory) if tier.evicts else 0)
