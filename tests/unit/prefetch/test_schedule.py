"""The schedule, whatever order its tasks end in: no step is stuck, no block comes twice, and all is compared."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dalipipe.prefetch.cold import LooseSamples
from dalipipe.prefetch.plan import StepPlan
from dalipipe.prefetch.schedule import Schedule
from dalipipe.prefetch.tasks import BuildTask, ColdTask, FetchTask, PlanTask

BLOCK_BYTES = 8 << 20
NO_BYTES = np.zeros(0, np.int64)


@dataclass
class View:
    """A block in memory."""

    held_bytes: int = BLOCK_BYTES
    tier: str = "lake"
    released: bool = False

    def release(self) -> None:
        assert not self.released
        self.released = True


@dataclass
class Threads:
    """What some threads would do with a schedule, one thing after the other, in an order that chance chooses."""

    schedule: Schedule
    plans: deque[list[StepPlan]]
    num_threads: int
    depth: int
    near: set[int]
    choose: random.Random
    sizes: tuple[int, ...] = (BLOCK_BYTES,)
    busy: list[Any] = field(default_factory=list)
    without_room: list[int] = field(default_factory=list)
    views: dict[int, View] = field(default_factory=dict)
    read_alone: set[int] = field(default_factory=set)
    num_fetched: int = 0
    num_in_vain: int = 0

    def size(self, block: int) -> int:
        return self.sizes[block % len(self.sizes)]

    def work(self) -> bool:
        """Does one thing; False when there is nothing to do."""
        for block in self.without_room:
            if self.schedule.reserve(block, self.size(block)):
                self.without_room.remove(block)
                self.busy.append(FetchTask(block=block))
                return True
            if self.schedule.is_pressing():
                self.without_room.remove(block)
                self.schedule.give_back(block)
                assert self.start(), "a thread was called away from a block for nothing"
                # What is asked when a start ends may come to nothing, but only once until something ends.
                self.num_in_vain += block in self.without_room
                assert self.num_in_vain < 3, "a thread is called away from a block that it is given again and again"
                return True
        can_start = len(self.busy) + len(self.without_room) < self.num_threads
        if can_start and (not self.busy or self.choose.random() < 0.5) and self.start():
            return True
        if self.busy:
            self.end(self.busy.pop(self.choose.randrange(len(self.busy))))
            return True
        return False

    def start(self) -> bool:
        task = self.schedule.next_task(self.depth)
        if isinstance(task, FetchTask):
            self.check_beside(task)
            together = self.choose.randint(0, len(task.beside))  # what the shards and the cache make of it
            self.schedule.give_back_beside(task.beside[together:])
            if self.schedule.reserve(task.block, self.size(task.block)):
                kept = self.schedule.keep_beside({block: self.size(block) for block in task.beside[:together]})
                self.schedule.give_back_beside(task.beside[len(kept) : together])
                self.busy.append(FetchTask(block=task.block, beside=tuple(kept)))
            else:
                self.schedule.give_back_beside(task.beside[:together])
                self.without_room.append(task.block)
        elif task is not None:
            self.busy.append(task)
        return task is not None

    def check_beside(self, task: FetchTask) -> None:
        """Neighbours, none of them twice, and none that is needed later than what the next step lacks."""
        assert task.beside == tuple(range(task.block + 1, task.block + 1 + len(task.beside)))
        others = [fetch for fetch in self.busy if isinstance(fetch, FetchTask)]
        coming = {block for fetch in others for block in (fetch.block, *fetch.beside)}
        assert coming.isdisjoint(task.beside)
        head = self.schedule.head
        if head is not None and task.block in head.lacks:
            assert set(task.beside) <= head.plan.blocks.keys()

    def end(self, task: Any) -> None:
        self.num_in_vain = 0
        if isinstance(task, BuildTask):
            blocks = task.pending.plan.blocks
            assert all(block in task.views or block in task.pending.loose for block in blocks)
            task.pending.ready = task.pending.plan  # type: ignore[assignment]
        elif isinstance(task, ColdTask):
            near = task.block in self.near
            self.read_alone.add(task.block)
            samples = None if near else LooseSamples(data={}, digests={0: (1, 1)})
            self.schedule.came_loose(task, samples)
        elif isinstance(task, FetchTask):
            self.num_fetched += 1
            came = self.choose.randint(0, len(task.beside))  # the others came damaged
            for block in (task.block, *task.beside[:came]):
                self.schedule.take_loose(block)
                old = self.views.get(block)
                assert old is None or old.released, "a block came that was there"
                view = self.views[block] = View(held_bytes=self.size(block))
                self.schedule.arrived(block, view)  # type: ignore[arg-type]
            self.schedule.give_back_beside(task.beside[came:])
        elif isinstance(task, PlanTask) and self.plans:  # else the planner never answers
            self.schedule.planned(self.plans.popleft())


def plan(step: int, blocks: dict[int, int], epoch: int = 0, num_steps: int = 10**9) -> StepPlan:
    order: Any = SimpleNamespace(epoch=epoch, num_steps=num_steps)
    return StepPlan(order=order, step=step, ids=NO_BYTES, valid=NO_BYTES.astype(bool), blocks=blocks)


def lanes(num_lanes: int, num_periods: int, block_samples: int, a_step: int) -> list[dict[int, int]]:
    """Blocks as the order uses them: a lane's own, one after the other, all lanes in step."""
    steps: list[dict[int, int]] = []
    for at in range(0, num_periods * block_samples, a_step):
        counts: dict[int, int] = {}
        for lane in range(num_lanes):
            for place in range(at, at + a_step):
                block = lane + num_lanes * (place // block_samples)
                counts[block] = counts.get(block, 0) + 1
        steps.append(counts)
    return steps


STEPS = st.one_of(
    st.builds(lanes, st.integers(1, 4), st.integers(1, 6), st.integers(2, 9), st.integers(1, 9)),
    st.lists(st.dictionaries(st.integers(0, 12), st.integers(1, 9), max_size=5), min_size=1, max_size=30),
)


@dataclass(frozen=True, kw_only=True)
class Case:
    steps: list[dict[int, int]]
    block_samples: int
    cap_blocks: int
    num_threads: int
    depth: int
    cold_steps: int
    period: int
    near: set[int]
    most_blocks: int
    seed: int
    num_epochs: int = 1
    sizes: tuple[int, ...] = (BLOCK_BYTES,)


CASES = st.builds(
    Case,
    steps=STEPS,
    block_samples=st.integers(2, 9),
    cap_blocks=st.sampled_from([1, 2, 5, 100]),
    num_threads=st.integers(1, 6),
    depth=st.integers(1, 12),
    cold_steps=st.integers(0, 30),
    period=st.integers(0, 8),
    near=st.sets(st.integers(0, 12)),
    most_blocks=st.sampled_from([1, 2, 8]),
    seed=st.integers(0, 2**32),
    num_epochs=st.integers(1, 3),
    sizes=st.sampled_from([(BLOCK_BYTES,), (BLOCK_BYTES, BLOCK_BYTES // 8, BLOCK_BYTES // 2)]),
)


@settings(max_examples=300, deadline=None)
@given(CASES)
@example(  # the probe ends while a thread waits for room, which then waits on
    Case(
        steps=lanes(2, 1, 2, 1),
        block_samples=2,
        cap_blocks=1,
        num_threads=3,
        depth=1,
        cold_steps=1,
        period=0,
        near={1},
        most_blocks=1,
        seed=10748398,
        num_epochs=1,
        sizes=(8388608,),
    )
)
@example(  # block 6 was for a step that is gone, and may not come with what the next one lacks
    Case(
        steps=[{0: 1}, {6: 1}, {5: 1}],
        block_samples=2,
        cap_blocks=2,
        num_threads=1,
        depth=1,
        cold_steps=1,
        period=0,
        near=set(),
        most_blocks=2,
        seed=0,
    )
)
def test_every_step_comes_and_what_was_read_alone_is_compared(case: Case) -> None:
    schedule = Schedule(
        cap_bytes=case.cap_blocks * BLOCK_BYTES,
        block_bytes=BLOCK_BYTES,
        num_samples=lambda block: case.block_samples,
        spare_threads=max(1, case.num_threads // 2),
        most_blocks=case.most_blocks,
    )
    schedule.begin_cold(min(case.cold_steps, len(case.steps)), case.period)
    choose = random.Random(case.seed)
    num_steps = len(case.steps)
    epochs = [number * case.num_epochs // num_steps for number in range(num_steps + 1)]
    plans = [
        plan(number, blocks, epochs[number], number + 1 if epochs[number + 1] > epochs[number] else num_steps + 1)
        for number, blocks in enumerate(case.steps)
    ]
    windows: deque[list[StepPlan]] = deque()
    while plans:
        cut = choose.randint(1, 9)
        windows.append(plans[:cut])
        plans = plans[cut:]
    threads = Threads(schedule, windows, case.num_threads, case.depth, case.near, choose, case.sizes)
    handed_out: deque[StepPlan] = deque()
    num_taken = num_idle = 0
    while num_taken < len(case.steps):
        step: Any = schedule.take()
        if step is not None:
            assert step.step == num_taken
            if step.order.num_steps == num_taken + 1:
                unchecked = [block for block in threads.read_alone if schedule.has_loose(block)]
                assert not unchecked, "an epoch ends before all that was read alone in it is compared"
            num_taken += 1
            handed_out.append(step)
        elif not threads.work():
            num_idle += 1
            assert handed_out or num_idle < 3, f"step {num_taken} is stuck"
        # As a graph that decodes some batches at once.
        if handed_out and (len(handed_out) > 2 or not threads.busy):
            schedule.leave(list(handed_out.popleft().blocks))
    while handed_out:
        schedule.leave(list(handed_out.popleft().blocks))
    while threads.work():
        assert threads.num_fetched < 1000, "the schedule does not come to rest"
    assert not any(schedule.has_loose(block) for block in threads.read_alone)
    if not case.cold_steps:
        assert not threads.read_alone
    schedule.clear()
    assert schedule.resident_bytes == 0
    assert all(view.released for view in threads.views.values())


def begin(steps: list[dict[int, int]], cap_blocks: int = 100) -> Schedule:
    """A schedule that has planned, over blocks of 16 samples of which 8 may be under way at the start."""
    schedule = Schedule(cap_bytes=cap_blocks << 21, block_bytes=2 << 20, num_samples=lambda block: 16, spare_threads=99)
    schedule.begin_cold(16, 8)
    assert isinstance(schedule.next_task(10), PlanTask)
    schedule.planned([plan(number, blocks) for number, blocks in enumerate(steps)])
    return schedule


def tasks_of(schedule: Schedule) -> tuple[list[ColdTask], list[int]]:
    """What it gives to threads now: samples to read alone, and blocks."""
    alone, blocks = [], []
    while (task := schedule.next_task(10)) is not None:
        if isinstance(task, ColdTask):
            alone.append(task)
        elif isinstance(task, FetchTask):
            blocks.append(task.block)
    return alone, blocks


def answer(schedule: Schedule, tasks: list[ColdTask]) -> None:
    for task in tasks:
        schedule.came_loose(task, LooseSamples(data={}, digests={}))


def test_while_blocks_are_slow_the_first_period_is_read_alone_and_blocks_of_the_second_come() -> None:
    schedule = begin(lanes(4, 3, 16, 2))
    alone, blocks = tasks_of(schedule)
    numbers = [(task.block, [pending.number for pending in task.pendings]) for task in alone]
    assert numbers == [(0, [0]), (1, [0]), (2, [0]), (3, [0]), (0, [1, 2]), (1, [1, 2]), (2, [1, 2]), (3, [1, 2])]
    assert blocks == [0, 1]  # to see which is quicker
    answer(schedule, alone)
    alone, blocks = tasks_of(schedule)
    assert {pending.number for task in alone for pending in task.pendings} == {3, 4, 5, 6}
    assert blocks == [4, 5, 6, 7, 8, 9]


def test_a_thread_that_waits_for_room_is_not_called_away_for_samples_that_are_not_to_be_read_yet() -> None:
    schedule = begin(lanes(4, 3, 16, 2), cap_blocks=5)
    alone, blocks = tasks_of(schedule)
    assert blocks == [0, 1]
    answer(schedule, alone[:4])  # the first step's
    assert schedule.reserve(0, 6 << 20)
    assert not schedule.reserve(1, 6 << 20)
    assert isinstance(schedule.next_task(10), BuildTask)
    assert not schedule.is_pressing(), "only the samples that are being read tell what is read next"
    answer(schedule, alone[4:])
    assert schedule.is_pressing()


def test_where_blocks_are_as_quick_as_samples_they_come_in_order_of_need() -> None:
    schedule = begin(lanes(4, 3, 16, 2))
    alone, blocks = tasks_of(schedule)
    assert blocks == [0, 1]
    for block in blocks:
        schedule.arrived(block, View())  # type: ignore[arg-type]
    answer(schedule, alone)
    alone, blocks = tasks_of(schedule)
    assert not alone
    assert blocks[:6] == [2, 3, 4, 5, 6, 7]


def test_that_one_block_of_many_comes_soon_does_not_end_the_start() -> None:
    """Behind a narrow link the others would come after the samples in hand are used up."""
    schedule = begin(lanes(16, 3, 16, 2))
    alone, blocks = tasks_of(schedule)
    schedule.arrived(blocks[0], View())  # type: ignore[arg-type]
    answer(schedule, alone)
    alone, _ = tasks_of(schedule)
    assert {pending.number for task in alone for pending in task.pendings} == {3, 4, 5, 6}


def test_a_block_that_nobody_waits_for_and_cannot_be_had_is_told() -> None:
    schedule = begin(lanes(4, 3, 16, 2))
    error = OSError("gone")
    for number in range(24):
        while (step := schedule.take()) is None:
            task = schedule.next_task(10)
            if isinstance(task, ColdTask):
                answer(schedule, [task])
            elif isinstance(task, BuildTask):
                task.pending.ready = task.pending.plan  # type: ignore[assignment]
            elif isinstance(task, FetchTask) and task.block not in (0, 1):
                assert task.block != 3, "it was to be put off"
                schedule.arrived(task.block, View())  # type: ignore[arg-type]
        assert step.step == number
        schedule.leave(list(step.blocks))  # type: ignore[attr-defined]
        if number == 4:  # the two that came to see which is quicker
            for block in (0, 1):
                schedule.take_loose(block)
                schedule.arrived(block, View())  # type: ignore[arg-type]
        if number == 22:
            break
    fetched = []
    while 2 not in fetched:
        task = schedule.next_task(10)
        assert task is not None
        if isinstance(task, FetchTask):
            fetched.append(task.block)
            if task.block != 2:
                schedule.arrived(task.block, View())  # type: ignore[arg-type]
    schedule.failed(2, error)
    assert schedule.head is not None
    assert schedule.failure_of(schedule.head) == (2, error)
