"""The start of a run: which steps have their samples read alone, and which blocks that puts off. No threads, no time.

All lanes of the order open their blocks in the same step, so a run begins with a lump of blocks, of which the first
steps need little. While it came, nothing else would; and when it had come, half of its use would be over and the next
lump due. So the first steps have their samples read alone beside a few blocks at a time. Where half as many blocks as
the lump has come as soon, all may come in order of need.

Else the samples of the first period are read alone, in order of need, and what the link carries beyond that goes to the
blocks of the next period, a few at a time so that they come one after the other. A later step whose blocks have not
come when its turn is near has its samples read alone too, until for a whole period none had to. Blocks that would come
after their turn are put off until there is nothing else to bring: they are for the cache, and only with them what was
read alone is known to be right.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import islice

from dalipipe.prefetch.cold import LooseSamples
from dalipipe.prefetch.tasks import ColdTask, PendingStep

COLD_PERIODS = 6
"""`prefetch.cold_steps=auto`: so many times the steps that the blocks of the first one last, at most."""

# What is read alone at once is at most this share of a block; where one step takes more, the block comes whole.
_MAX_SHARE = 0.5
# Where, so few at a time, as many as this share of the lump come before the samples of the first steps, blocks are as
# quick as samples. That one comes says nothing: a narrow link brings one soon, and the lump late.
_PROBE_BLOCKS = 2
_PROBE_STEPS = 3
_PROBE_SHARE = 0.5
# Samples are asked for when their step is so near, for up to so many steps at once.
_REACH = 5
_MAX_WAVE = 4
# A block that is not under way when its turn is nearer than this share of a period would come too late to be of use.
_HORIZON = 0.8
# Blocks under way together while samples are read alone: a link that is full would bring more only later.
_BLOCKS_BYTES = 16 << 20


class ColdStart:
    """Not thread-safe: the owner of the schedule guards it.

    Args:
        block_bytes: mean size of a block.
        num_samples: of a block.
        threads: so many at most read samples alone.
    """

    def __init__(self, *, block_bytes: int, num_samples: Callable[[int], int], threads: int) -> None:
        self._max_blocks = max(1, _BLOCKS_BYTES // block_bytes)
        self._num_samples = num_samples
        self._threads = threads
        self._num_reading = 0
        self._period = 1
        self._num_left = 0
        self._num_clean = 0
        self._is_probing = True
        self._num_came = self._num_first = 0
        self._tasks: deque[ColdTask] = deque()
        self._num_admitted = self._num_looked = 0
        self._put_off: dict[int, int] = {}  # and the number of the first step that has it brought in its turn again
        self._whole: set[int] = set()  # blocks that some step needs more of than is read alone
        self._unchecked: dict[int, list[Mapping[int, tuple[int, int]]]] = {}
        self._comparing: set[int] = set()  # also those that turned out to be wrong

    def begin(self, num_steps: int, period: int) -> None:
        """At most the next `num_steps` steps have their samples read alone; the blocks of the first one are used for
        `period` steps."""
        self._num_left = num_steps
        self._period = max(1, period)

    @property
    def is_on(self) -> bool:
        """Whether steps may still have their samples read alone."""
        return self._num_left > 0

    @property
    def steps_ahead(self) -> int:
        """So many steps more than usual belong into the window: those whose blocks can still come before their turn."""
        return self._period if self.is_on else 0

    def may_fetch(self, num_under_way: int) -> bool:
        """Whether another block may be begun beside those that are under way."""
        return not self.is_on or num_under_way < (_PROBE_BLOCKS if self._is_probing else self._max_blocks)

    def admit(self, pending: PendingStep) -> list[int]:
        """A step enters the window; the blocks that it lacks and that are to be brought for it, in order of need."""
        pending.number = self._num_admitted
        self._num_admitted += 1
        if pending.number == 0:
            self._num_first = len(pending.lacks)
        wanted = []
        for block in pending.plan.blocks:
            if block not in pending.lacks:
                continue
            if not self._is_small(pending, block):
                self._whole.add(block)
            if not (self.is_on and pending.number < self._put_off.get(block, 0)) or block in self._whole:
                self._put_off.pop(block, None)
                wanted.append(block)
        return wanted

    def came_whole(self, block: int) -> None:
        """The block is near."""
        self._num_came += 1
        self._put_off.pop(block, None)
        self._whole.discard(block)
        self._comparing.discard(block)

    def want(self, block: int) -> bool:
        """The block is put off no more; whether it was."""
        return self._put_off.pop(block, None) is not None

    def want_again(self, window: Iterable[PendingStep]) -> list[int]:
        """As the start is over: the blocks that were put off and that steps wait for, in order of need."""
        return [
            block
            for pending in window
            for block in pending.plan.blocks
            if block in pending.lacks and self._put_off.pop(block, None) is not None
        ]

    def next_put_off(self) -> int | None:
        """The first block that was put off, once the start is over."""
        return None if self.is_on else next(iter(self._put_off), None)

    def has_task(self, window: Iterable[PendingStep]) -> bool:
        """Whether a free thread would be given samples to read."""
        if self._num_reading >= self._threads or not (self._tasks or self.is_on):
            return False
        if self._is_probing and not self._tasks:
            # What is being read tells what comes next; until then a thread that asked would get nothing.
            return not self._num_reading and next(iter(window), None) is not None
        return bool(self._tasks) or any(not pending.is_asked for pending in islice(window, _REACH))

    def next_task(self, window: Iterable[PendingStep], wanted: deque[int]) -> ColdTask | None:
        """The samples to read next: those of the nearest step first. Blocks that would come too late leave `wanted`."""
        if self._num_reading >= self._threads:
            return None
        if self.is_on:
            self._ask(window, wanted)
        while self._tasks:
            task = self._tasks.popleft()
            if any(task.block in pending.lacks for pending in task.pendings):
                self._num_reading += 1
                return task
        return None

    def came(self, task: ColdTask, samples: LooseSamples | None) -> list[PendingStep]:
        """The answer to a task; the steps that lack nothing more. With None they wait for the block."""
        self._num_reading -= 1
        if samples is None:
            self._whole.add(task.block)
            return []
        waiting = [pending for pending in task.pendings if task.block in pending.lacks]
        for pending in waiting:
            pending.loose[task.block] = samples
            pending.lacks.discard(task.block)
        if waiting:
            self._unchecked.setdefault(task.block, []).append(samples.digests)
        return [pending for pending in waiting if not pending.lacks]

    def ends_with(self, pending: PendingStep) -> bool:
        """A step leaves the window; whether the start is over with it, so that no block is put off any more."""
        was_on = self.is_on
        self._num_clean = 0 if pending.loose else self._num_clean + 1
        self._num_left = 0 if self._num_clean >= self._period else self._num_left - 1
        return was_on and not self.is_on

    @property
    def unchecked(self) -> Collection[int]:
        """The blocks of which samples were read alone and are not compared with it yet, or just now."""
        return self._unchecked.keys() | self._comparing

    def has_unchecked(self, block: int) -> bool:
        """Whether samples of the block were read alone and are not compared with it yet."""
        return block in self._unchecked

    def take_unchecked(self, block: int) -> list[Mapping[int, tuple[int, int]]]:
        """`LooseSamples.digests` of what was read alone of a block and not compared with it yet."""
        self._comparing.add(block)
        return self._unchecked.pop(block, [])

    def clear(self) -> None:
        """Forgets everything."""
        self._tasks.clear()
        self._put_off.clear()
        self._whole.clear()
        self._unchecked.clear()
        self._comparing.clear()

    def _ask(self, window: Iterable[PendingStep], wanted: deque[int]) -> None:
        if self._is_probing:
            self._probe(window, wanted)
        else:
            near = list(islice(window, _REACH + _MAX_WAVE))
            for first, pending in enumerate(near[:_REACH]):
                if not pending.is_asked:
                    self._ask_for(near[first : min(first + _MAX_WAVE, _REACH + _MAX_WAVE)])
        spared = self._whole.union(islice(wanted, _PROBE_BLOCKS if self._num_looked == 0 else 0))
        for pending in islice(window, max(1, int(_HORIZON * self._period)) if self.is_on else 0):
            for block in pending.lacks if pending.number >= self._num_looked else ():
                if block in wanted and block not in spared:
                    wanted.remove(block)
                    self._put_off[block] = pending.number + self._period
            self._num_looked = max(self._num_looked, pending.number + 1)

    def _probe(self, window: Iterable[PendingStep], wanted: deque[int]) -> None:
        """Reads the first steps alone beside a few blocks at a time. Where half as many as the lump come as soon, the
        start is over."""
        steps = list(islice(window, _PROBE_STEPS))
        if steps and steps[0].number == 0 and not steps[0].is_asked:
            self._ask_for(steps[:1])
            self._ask_for(steps[1:])
        if not steps or self._tasks or self._num_reading:
            return
        self._is_probing = False
        if self._num_came and self._num_came >= _PROBE_SHARE * self._num_first:
            self._num_left = 0
            wanted.extendleft(reversed(self.want_again(window)))

    def _ask_for(self, wave: Sequence[PendingStep]) -> None:
        """Cuts what some steps lack into tasks, by block."""
        by_block: dict[int, list[PendingStep]] = {}
        num_samples: Counter[int] = Counter()
        for pending in wave:
            pending.is_asked = True
            for block in sorted(pending.lacks):
                if not self._is_small(pending, block):
                    continue
                num_samples[block] += pending.plan.blocks[block]
                if num_samples[block] > _MAX_SHARE * self._num_samples(block):
                    self._tasks.append(ColdTask(pendings=tuple(by_block.pop(block)), block=block))
                    num_samples[block] = pending.plan.blocks[block]
                by_block.setdefault(block, []).append(pending)
        self._tasks.extend(ColdTask(pendings=tuple(steps), block=block) for block, steps in by_block.items())

    def _is_small(self, pending: PendingStep, block: int) -> bool:
        return pending.plan.blocks[block] <= _MAX_SHARE * self._num_samples(block)
