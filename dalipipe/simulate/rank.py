"""One rank in made-up time: the shipped planner, schedule and depth controller, and a batch that decodes ahead.

`WindowPrefetcher` is threads around these parts; here the threads are numbers and all else is the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np

from dalipipe.cache.contract import BlockView
from dalipipe.errors import PipelineError
from dalipipe.order.step import Sample, Step
from dalipipe.prefetch.cold import LooseSamples
from dalipipe.prefetch.coldstart import COLD_PERIODS
from dalipipe.prefetch.depth import DepthController
from dalipipe.prefetch.plan import StepPlan, StepPlanner
from dalipipe.prefetch.schedule import Schedule
from dalipipe.prefetch.tasks import BuildTask, ColdTask, FetchTask, PlanTask
from dalipipe.simulate.events import Events

_NO_SIZES = np.zeros((0, 2), np.int32)
_LOOSE = LooseSamples(data={}, digests={})
_MOST_TASKS = 100_000


class Source(Protocol):
    """Where blocks come from: the node that the rank runs on."""

    def fetch(self, block: int, step: int, arrived: Callable[[BlockView, float], None]) -> None:
        """Brings a block that step number `step` of the run needs first; `arrived` is told the view and how long the
        lake took, 0 where it was not asked."""

    def read_alone(self, block: int, num_samples: int, step: int, arrived: Callable[[bool], None]) -> None:
        """Reads samples of a block that step number `step` needs without the block; `arrived` is told False where the
        block is near already."""


class SimulatedRank:
    """One rank.

    Args:
        threads: blocks that are fetched at once.
        feeds: steps that the decoder has taken in, beyond the one that it gives out (DALI's queue).
        ahead: batches that are decoded before the trainer asks for them.
        decode_s: seconds that one of them takes, one after the other.
        cold_steps: so many steps may read their samples alone at the start; None: until the first blocks are used up.
        decoded: called when a batch is ready for the trainer.
    """

    def __init__(
        self,
        *,
        events: Events,
        planner: StepPlanner,
        schedule: Schedule,
        controller: DepthController,
        source: Source,
        block_bytes: Callable[[int], int],
        threads: int,
        feeds: int,
        ahead: int,
        decode_s: float,
        cold_steps: int | None,
        decoded: Callable[[], None],
    ) -> None:
        self._events = events
        self._planner = planner
        self._schedule = schedule
        self._controller = controller
        self._source = source
        self._block_bytes = block_bytes
        self._idle_threads = threads
        self._feeds = feeds
        self._ahead = ahead
        self._decode_s = decode_s
        self._cold_steps = cold_steps
        self._decoded = decoded
        self._needs: dict[int, int] = {}
        self._num_planned = 0
        self._num_taken = 0
        self._plans: dict[int, StepPlan] = {}
        self._without_room: list[int] = []
        self._asking_since_s: float | None = 0.0
        self._asked_s = 0.0
        self._decodes = False
        self.num_ready = 0

    @property
    def depth(self) -> int:
        """Steps that are kept ready or under way just now."""
        return self._controller.depth

    def start(self) -> None:
        """The first step is asked for."""
        self._work()

    def consume(self) -> None:
        """The trainer takes a batch."""
        self.num_ready -= 1
        self._ask()
        self._work()

    def _ask(self) -> None:
        """The decoding thread asks for the next step as soon as it is free and the queue is not full."""
        if self._asking_since_s is None and not self._decodes and self.num_ready < self._ahead:
            self._asking_since_s = self._events.now_s

    def _work(self) -> None:
        """Everything that can be done now is done."""
        for _ in range(_MOST_TASKS):
            if not (self._find_room() or self._next_task() or self._take()):
                return
        raise PipelineError("the simulated prefetcher does not come to rest")

    def _find_room(self) -> bool:
        for block in self._without_room:
            if self._schedule.reserve(block, self._block_bytes(block)):
                self._without_room.remove(block)
                self._fetch(block)
                return True
            if self._schedule.is_pressing():
                self._without_room.remove(block)
                self._schedule.give_back(block)
                self._idle_threads += 1
                return self._next_task()
        return False

    def _next_task(self) -> bool:
        if not self._idle_threads:
            return False
        task = self._schedule.next_task(self._controller.depth)
        if isinstance(task, BuildTask):
            task.pending.ready = _step_of(task.pending.plan)
        elif isinstance(task, PlanTask):
            self._plan()
        elif isinstance(task, ColdTask):
            self._read_alone(task)
        elif isinstance(task, FetchTask):
            self._idle_threads -= 1
            if self._schedule.reserve(task.block, self._block_bytes(task.block)):
                self._fetch(task.block)
            else:
                self._without_room.append(task.block)
        else:
            return False
        return True

    def _plan(self) -> None:
        plans = self._planner.next_window()
        if plans[0].blocks:
            period = self._schedule.count_samples(plans[0].blocks) // max(1, len(plans[0].ids))
            self._controller.expect(period)
            if not self._num_planned:
                steps = COLD_PERIODS * max(1, period) if self._cold_steps is None else self._cold_steps
                self._schedule.begin_cold(steps, period)
        for plan in plans:
            for block in plan.blocks:
                self._needs.setdefault(block, self._num_planned)
            self._plans[self._num_planned] = plan
            self._num_planned += 1
        self._schedule.planned(plans)

    def _fetch(self, block: int) -> None:
        self._source.fetch(block, self._needs.get(block, self._num_taken), lambda view, s: self._came(block, view, s))

    def _read_alone(self, task: ColdTask) -> None:
        block = task.block
        num_samples = sum(pending.plan.blocks[block] for pending in task.pendings)

        def arrived(found: bool) -> None:
            self._idle_threads += 1
            self._schedule.came_loose(task, _LOOSE if found else None)
            self._work()

        self._idle_threads -= 1
        self._source.read_alone(block, num_samples, self._number_of(task.pendings[0].plan), arrived)

    def _number_of(self, plan: StepPlan) -> int:
        return next(number for number, known in self._plans.items() if known is plan)

    def _came(self, block: int, view: BlockView, lake_s: float) -> None:
        self._idle_threads += 1
        if lake_s > 0:
            self._controller.fetched(lake_s)
        self._schedule.take_loose(block)
        self._schedule.arrived(block, view)
        self._work()

    def _take(self) -> bool:
        """The decoding thread gets the step that it asks for, if that is ready."""
        if self._asking_since_s is None:
            return False
        step = self._schedule.take()
        if step is None:
            return False
        now_s = self._events.now_s
        self._controller.delivered(now_s - self._asking_since_s, now_s - self._asked_s)
        self._asking_since_s, self._asked_s = None, now_s
        self._num_taken += 1
        number = self._num_taken - 1 - self._feeds
        if number < 0:
            self._ask()
            return True
        self._decodes = True
        self._events.at(now_s + self._decode_s, lambda: self._is_decoded(number))
        return True

    def _is_decoded(self, number: int) -> None:
        self._decodes = False
        blocks = self._plans.pop(number).blocks
        for block in blocks:
            if self._needs.get(block) == number:
                del self._needs[block]
        self._schedule.leave(list(blocks))
        self.num_ready += 1
        self._decoded()
        self._ask()
        self._work()


def _step_of(plan: StepPlan) -> Step:
    return Step(
        epoch=plan.order.epoch,
        step=plan.step,
        ids=plan.ids,
        fields={},
        sizes=_NO_SIZES,
        valid=plan.valid,
        substitutes=_no_substitutes,
        release=_nothing,
    )


def _no_substitutes(_place: int) -> Iterator[Sample]:
    return iter(())


def _nothing() -> None:
    return
