"""Blocks that no tier keeps: read once for all threads of a process, and where need be of the node, while held."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dalipipe.cache.flights import Flights
from dalipipe.cache.lake import Fetched
from dalipipe.cache.passing import PassingBlocks
from dalipipe.cache.view import HeldView
from dalipipe.filelocks import FileLock
from dalipipe.telemetry import Recorder

ReadRun = Callable[[Sequence[int]], dict[int, Fetched]]
"""Reads blocks that lie one behind the other: the first in any case, or it raises."""


class StreamedBlocks:
    """Blocks in memory as long as somebody holds them.

    Args:
        passing: shares them with the other processes of the node; None keeps them to this one.
        block_bytes: of a block.
        belongs: whether a tier of the node keeps a block, or would.
    """

    def __init__(
        self,
        passing: PassingBlocks | None,
        *,
        wait_s: float,
        recorder: Recorder,
        block_bytes: Callable[[int], int],
        belongs: Callable[[int], bool],
    ) -> None:
        self._passing = passing
        self._recorder = recorder
        self._block_bytes = block_bytes
        self._belongs = belongs
        self._flights = Flights(wait_s, self._let_pass)

    def contains(self, block: int) -> bool:
        """Whether the block is held just now, here or in another process that shares it."""
        return self._flights.contains(block) or (self._passing is not None and self._passing.contains(block))

    def get_run(
        self, run: Sequence[int], read: ReadRun, deliver: Callable[[int, HeldView], None]
    ) -> dict[int, Fetched]:
        """Delivers the first of `run`, and with it those that this thread reads by the same request: all up to the
        first that somebody else reads or holds, or that a tier keeps.

        Returns: what was read.

        Raises:
            CacheTimeoutError: somebody else has been reading the first for longer than the deadline.
            IntegrityError, StorageError …: as `read`.
        """
        first = run[0]
        found: dict[int, Fetched] = {}
        landed: dict[int, Fetched] = {}

        def read_first(lock: FileLock | None) -> Fetched:
            found.update(self._read(run, lock, read, landed))
            return found[first]

        def share(_block: int) -> Fetched:
            if self._passing is None:
                return read_first(None).apart()
            return self._passing.get(first, self._block_bytes(first), read_first)

        try:
            fetched, shared = self._flights.get(first, share)
        except BaseException:
            for block in landed:
                self._flights.release(block)
            raise
        deliver(first, self._held(first, fetched, shared=shared))
        for block, other in landed.items():
            deliver(block, self._held(block, other, shared=False))
        return found

    def offer(self, block: int, fetched: Fetched) -> HeldView:
        """A view of a block that its tier could not keep."""

        def share(_block: int) -> Fetched:
            return fetched.apart() if self._passing is None else self._passing.offer(block, fetched)

        held, shared = self._flights.get(block, share)
        return self._held(block, held, shared=shared)

    def close(self) -> None:
        """Ends the sharing; held views stay valid. Idempotent."""
        if self._passing is not None:
            self._passing.close()

    def _read(
        self, run: Sequence[int], lock: FileLock | None, read: ReadRun, landed: dict[int, Fetched]
    ) -> dict[int, Fetched]:
        """Reads the first of `run`, whose flight this thread leads, and others that nobody reads or holds; those are
        put into `landed` as well, held once."""
        begun: list[int] = []
        try:
            for block in run[1:]:
                if not self._begin(block, lock):
                    break
                begun.append(block)
            found = read([run[0], *begun])
            for block in begun:
                if block in found:
                    data = found[block]
                    landed[block] = data.apart() if self._passing is None else self._passing.finish(block, data)
                    self._flights.land(block, landed[block])
            return found
        finally:
            for block in begun:
                if block not in landed:
                    self._let_pass(block)  # before somebody else begins to hold it
                    self._flights.abandon(block)

    def _begin(self, block: int, lock: FileLock | None) -> bool:
        """Whether this thread is to read a block with another one, whose lock is held where processes share."""
        if self._belongs(block) or not self._flights.begin(block):
            return False
        if self._passing is None or (lock is not None and self._passing.begin(block, lock)):
            return True
        self._flights.abandon(block)
        return False

    def _held(self, block: int, fetched: Fetched, *, shared: bool) -> HeldView:
        num_bytes = len(fetched.data)
        tier = "memory" if shared else fetched.tier
        if tier == "memory":
            self._recorder.add("blocks_hit.memory")
            self._recorder.add("bytes_read.memory", num_bytes)
        return HeldView(fetched.data, tier, held_bytes=num_bytes, on_release=lambda: self._flights.release(block))

    def _let_pass(self, block: int) -> None:
        if self._passing is not None:
            self._passing.release(block)
