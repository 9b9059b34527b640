"""Bringing all blocks that the node keeps to the node, before a job asks for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from dalipipe.cache.tiered import TieredCache
from dalipipe.errors import ConfigError
from dalipipe.shards.manifest import Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmReport:
    """What `warm` did. blocks, bytes: that the node's tiers hold of this data set now. fetched_blocks, fetched_bytes:
    of those, brought by this call. left_blocks: that the tiers do not keep, and that every epoch reads from farther
    away."""

    blocks: int
    bytes: int
    fetched_blocks: int
    fetched_bytes: int
    left_blocks: int
    wall_s: float


class _Warming:
    """Work that threads take from one list. The first error ends all."""

    def __init__(self, cache: TieredCache, manifest: Manifest, progress: Callable[[int, int], None]) -> None:
        self._cache = cache
        self._manifest = manifest
        self._progress = progress
        self._wanted = [block for block in range(manifest.num_blocks) if cache.keeps(block)]
        self._next = 0
        self._most = max(1, cache.request_bytes * manifest.num_blocks // max(1, manifest.num_bytes))
        self._lock = threading.Lock()
        self._stop = False
        self._near = [0, 0]
        self._fetched = [0, 0]
        self._num_done = 0
        self.failure: Exception | None = None

    def run(self) -> None:
        while True:
            with self._lock:
                left = [] if self._stop else self._take()
            if not left:
                return
            try:
                while left and not self._stop:
                    dealt = self._bring(left)
                    left = [block for block in left if block not in dealt]
            except Exception as error:  # noqa: BLE001 - raised in the caller's thread
                with self._lock:
                    self.failure, self._stop = self.failure or error, True
                return

    def stop(self) -> None:
        with self._lock:
            self._stop = True

    def report(self, wall_s: float) -> WarmReport:
        num_kept = self._near[0] + self._fetched[0]
        return WarmReport(
            blocks=num_kept,
            bytes=self._near[1] + self._fetched[1],
            fetched_blocks=self._fetched[0],
            fetched_bytes=self._fetched[1],
            left_blocks=self._manifest.num_blocks - num_kept,
            wall_s=wall_s,
        )

    def _take(self) -> list[int]:
        """The next block and those that follow it, about as many as one request brings; none when all are taken."""
        first = self._next
        while self._next < min(len(self._wanted), first + self._most):
            if self._next > first and self._wanted[self._next] != self._wanted[self._next - 1] + 1:
                break
            self._next += 1
        return self._wanted[first : self._next]

    def _bring(self, blocks: list[int]) -> Iterable[int]:
        """Brings the first of `blocks`; those that were dealt with."""
        tally, dealt = self._fetched, {blocks[0]: True}
        if self._cache.is_kept(blocks[0]):
            tally = self._near
        else:
            dealt = self._cache.bring(blocks)
        with self._lock:
            for block, is_kept in dealt.items():
                self._num_done += 1
                if is_kept:
                    tally[0] += 1
                    tally[1] += self._manifest.block_bytes(block)
                self._progress(self._num_done, len(self._wanted))
        return dealt


def warm(
    cache: TieredCache,
    manifest: Manifest,
    *,
    threads: int = 8,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> WarmReport:
    """Fetches every block that the tiers of this node keep and have room for. Nothing is evicted.

    Args:
        threads: fetches at once.
        progress: called with (blocks done, blocks wanted).

    Raises:
        ConfigError: no tier of the node keeps blocks, or `threads` is not positive.
        IntegrityError, StorageError …: the first that a fetch raised; what was brought stays.
    """
    if threads < 1:
        raise ConfigError(f"threads={threads} must be at least 1")
    if not cache.has_tiers:
        raise ConfigError(
            "nothing to warm: no tier of this node keeps blocks; set cache.tiers.node.capacity, and a cache.policy "
            "other than stream"
        )
    began_s = time.monotonic()
    work = _Warming(cache, manifest, progress)
    workers = [threading.Thread(target=work.run, name=f"dalipipe-warm-{i}", daemon=True) for i in range(threads)]
    for worker in workers:
        worker.start()
    try:
        for worker in workers:
            # A fetch has its own deadline, so this ends.
            worker.join()
    except BaseException:
        work.stop()
        raise
    if work.failure is not None:
        raise work.failure
    return work.report(time.monotonic() - began_s)
