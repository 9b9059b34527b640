"""A tier on the node: a block store with the policy and budget that decide what is kept there."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Sequence

from dalipipe.cache.blockstore import TRAILER_BYTES, BlockStore
from dalipipe.cache.contract import Entry, EvictionPolicy
from dalipipe.cache.locks import lock_set
from dalipipe.cache.sets import BudgetSets, folders_of
from dalipipe.cache.usage import UsageTable
from dalipipe.telemetry import Recorder, Stage
from dalipipe.units import format_bytes

_FULL = (errno.ENOSPC, errno.EDQUOT)
_SET_WAIT_S = 10.0

_log = logging.getLogger(__name__)


class Tier:
    """Blocks of one data set in one folder of the node (`node`: a disk, `memory`: shared memory).

    A policy that evicts needs `usage`. Its budget is split among sets of neighbouring blocks, each changed under a lock
    of its own, so that processes need no common account. A policy that never evicts needs neither.

    Args:
        name: node or memory; the counters carry it.
        budget_bytes: what this data set may take here.
        used_bytes: what it takes already. Where nothing is evicted, what other processes add later is not seen: the
            share of blocks that the policy admits is what bounds it.
        num_blocks, num_bytes: of the data set.
    """

    def __init__(
        self,
        name: str,
        blocks: BlockStore,
        policy: EvictionPolicy,
        *,
        budget_bytes: int,
        used_bytes: int,
        num_blocks: int,
        num_bytes: int,
        recorder: Recorder,
        usage: UsageTable | None = None,
    ) -> None:
        self.name = name
        self.blocks = blocks
        self.policy = policy
        self.budget_bytes = budget_bytes
        self._used_bytes = used_bytes
        self._sets = BudgetSets(num_blocks=num_blocks, num_bytes=num_bytes, budget_bytes=budget_bytes)
        self._recorder = recorder
        self._usage = usage
        self._lock = threading.Lock()
        self._warned = False

    @property
    def evicts(self) -> bool:
        """Whether blocks may be dropped to make room for others."""
        return self._usage is not None

    def admits(self, block: int, num_bytes: int) -> bool:
        """Whether the block is to be kept: the policy wants it and it fits."""
        if not self.policy.admits(block):
            return False
        if self._usage is not None:
            return num_bytes <= self._sets.share_bytes(self._sets.blocks_beside(block))
        return self._used_bytes + num_bytes <= self.budget_bytes

    def has_room(self, block: int, num_bytes: int) -> bool:
        """Whether a block that the tier admits fits without another being dropped."""
        if self._usage is None:
            return True
        beside = self._sets.blocks_beside(block)
        return sum(size for _, size in self._held(beside)) + num_bytes <= self._sets.share_bytes(beside)

    def open(self, block: int, num_bytes: int) -> memoryview | None:
        """The block's bytes, or None when it is not here."""
        with self._recorder.span(Stage.NODE):
            memory = self.blocks.open(block, num_bytes)
        if memory is not None:
            self._recorder.add(f"blocks_hit.{self.name}")
            self._recorder.add(f"bytes_read.{self.name}", num_bytes)
            self.used(block)
        return memory

    def used(self, block: int) -> None:
        """Counts a use, where the policy goes by it."""
        if self._usage is not None:
            self._usage.used(block)

    def keep(self, block: int, data: memoryview, *, may_evict: bool = True) -> bool:
        """Writes the block, room made as the policy allows. What is full or fails costs the block its place, never the
        run.

        Args:
            may_evict: False where the block is kept only if there is room for it.
        """
        if self._usage is None:
            return self._keep_for_good(block, data)
        # The lock spans the write: two processes that saw the same room would both fill it.
        number = folders_of(self._sets.blocks_beside(block)).start
        lock = lock_set(self.blocks.locks, number, wait_s=_SET_WAIT_S)
        if lock is None:
            self._recorder.add(f"{self.name}_set_timeouts")
            return False
        try:
            return self._make_room(block, len(data), may_evict) and self._write(block, data)
        finally:
            lock.release()

    def close(self) -> None:
        """Idempotent."""
        if self._usage is not None:
            self._usage.close()

    def _keep_for_good(self, block: int, data: memoryview) -> bool:
        with self._lock:
            if self._used_bytes + len(data) > self.budget_bytes:
                return False
            self._used_bytes += len(data)
        if self._write(block, data):
            return True
        with self._lock:
            self._used_bytes -= len(data)
        return False

    def _make_room(self, block: int, num_bytes: int, may_evict: bool) -> bool:
        assert self._usage is not None
        beside = self._sets.blocks_beside(block)
        entries, uses = self._entries(block, beside)
        excess_bytes = sum(entry.num_bytes for entry in entries) + num_bytes - self._sets.share_bytes(beside)
        if excess_bytes <= 0:
            return True
        if not may_evict:
            return False
        self._usage.age(beside)
        return self._evict(self.policy.victims(entries, excess_bytes, uses))

    def _entries(self, block: int, beside: range) -> tuple[list[Entry], int]:
        """What the block's set holds, and how often the block itself was used."""
        assert self._usage is not None
        usage = self._usage.read(beside)
        entries = [
            Entry(
                block=kept,
                num_bytes=size,
                last_use_s=float(usage["last_s"][kept - beside.start]),
                uses=int(usage["uses"][kept - beside.start]),
            )
            for kept, size in self._held(beside)
            if kept != block
        ]
        return entries, int(usage["uses"][block - beside.start])

    def _held(self, blocks: range) -> list[tuple[int, int]]:
        """(block, bytes) of what is kept of them."""
        return [
            (kept, size - TRAILER_BYTES)
            for folder in folders_of(blocks)
            for kept, size in self.blocks.sizes(folder)
            if kept in blocks
        ]

    def _evict(self, victims: Sequence[int]) -> bool:
        for victim in victims:
            self.blocks.drop(victim)
            self._recorder.add(f"blocks_evicted.{self.name}")
        return bool(victims)

    def _write(self, block: int, data: memoryview) -> bool:
        try:
            self._write_once_more(block, data)
        except OSError as error:
            self._recorder.add(f"{self.name}_write_failures")
            with self._lock:
                warn, self._warned = not self._warned, True
            if warn:
                _log.warning(
                    "block %d (%s) was not kept in %s: %s; blocks are read from the lake without being kept until "
                    "there is room: free space there, or lower cache.tiers.%s.capacity",
                    block,
                    format_bytes(len(data)),
                    self.blocks.path(block).parent,
                    error,
                    self.name,
                )
            return False
        self._recorder.add(f"bytes_written.{self.name}", len(data))
        return True

    def _write_once_more(self, block: int, data: memoryview) -> None:
        try:
            self.blocks.write(block, data)
        except OSError as error:
            # The disk is fuller than the budget knows. Where the policy evicts, room is made among its own.
            if error.errno not in _FULL or self._usage is None:
                raise
            if not self._evict(
                self.policy.victims(self._entries(block, self._sets.blocks_beside(block))[0], len(data))
            ):
                raise
            self.blocks.write(block, data)
