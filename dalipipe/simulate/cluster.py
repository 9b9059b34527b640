"""Some ranks of a job in made-up time, in lock-step with all the others.

All blocks that the simulated ranks ask for, and when, follow from the shipped order, cache and prefetcher. Ranks are
alike, so those that are left out load the lake as much as these do, and delay a step by the slowest of their requests:
that one is drawn as the largest of as many latencies as they have requests for this step.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from dalipipe.cache.contract import BlockView
from dalipipe.cache.tiered import TieredCache
from dalipipe.errors import PipelineError
from dalipipe.simulate.events import Events, Pipe
from dalipipe.simulate.latency import Latency
from dalipipe.simulate.rank import SimulatedRank
from dalipipe.simulate.tiers import CountingLake


@dataclass(slots=True)
class StepTrace:
    """One step of the job: how long all waited for it, and blocks that the simulated nodes brought for it.

    begun_s: when each of its blocks that came from the lake was asked for; alone_s: the same of samples that were read
    alone.
    """

    wait_s: float = 0.0
    depth: int = 0
    lake_blocks: int = 0
    lake_bytes: int = 0
    near_blocks: int = 0
    near_bytes: int = 0
    begun_s: list[float] = field(default_factory=list)
    alone_s: list[float] = field(default_factory=list)


class Trace:
    """What was seen, by number of the step."""

    def __init__(self) -> None:
        self._steps: dict[int, StepTrace] = {}

    def step(self, number: int) -> StepTrace:
        """The step of that number, counted from the start of the simulation."""
        return self._steps.setdefault(number, StepTrace())

    def steps(self, start: int, stop: int) -> list[StepTrace]:
        """Steps [start, stop)."""
        return [self.step(number) for number in range(start, stop)]


class SimulatedNode:
    """One node: its cache, its link, its disk.

    Args:
        lake: shared by all nodes.
        latency: of a request to the lake; a block is one.
    """

    def __init__(
        self,
        *,
        events: Events,
        cache: TieredCache,
        counter: CountingLake,
        sample_bytes: int,
        latency: Latency,
        lake: Pipe,
        link: Pipe,
        disk: Pipe,
        draw: random.Random,
        trace: Trace,
    ) -> None:
        self._events = events
        self._cache = cache
        self._counter = counter
        self._sample_bytes = sample_bytes
        self._latency = latency
        self._lake = lake
        self._link = link
        self._disk = disk
        self._draw = draw
        self._trace = trace
        self._coming: dict[int, list[Callable[[], None]]] = {}

    def close(self) -> None:
        """Lets the cache go."""
        self._cache.close()

    def fetch(self, block: int, step: int, arrived: Callable[[BlockView, float], None]) -> None:
        """As `Source.fetch`."""
        num_read = self._counter.num_read
        view = self._cache.get(block)
        seen, num_bytes = self._trace.step(step), len(view.memory)
        if self._counter.num_read > num_read:
            seen.lake_blocks += 1
            seen.lake_bytes += num_bytes
            self._from_lake(block, num_bytes, seen, lambda s: arrived(view, s))
            return
        seen.near_blocks += 1
        seen.near_bytes += num_bytes
        if block in self._coming:  # another rank of the node has just asked for it
            self._coming[block].append(lambda: arrived(view, 0.0))
            return
        if view.tier == "node":
            self._disk.serve(num_bytes, lambda: arrived(view, 0.0))
        else:
            self._events.at(self._events.now_s, lambda: arrived(view, 0.0))

    def read_alone(self, block: int, num_samples: int, step: int, arrived: Callable[[bool], None]) -> None:
        """As `Source.read_alone`."""
        if self._cache.contains(block) and block not in self._coming:
            self._events.at(self._events.now_s, lambda: arrived(False))
            return
        now_s = self._events.now_s
        self._trace.step(step).alone_s.append(now_s)
        num_bytes = num_samples * self._sample_bytes

        def answered() -> None:
            self._transfer(num_bytes, lambda: arrived(True))

        # Each sample is a request, and the last one counts.
        self._events.at(now_s + self._latency.at(self._draw.random() ** (1 / num_samples)), answered)

    def _transfer(self, num_bytes: int, done: Callable[[], None]) -> None:
        """Through the lake's network and the node's link at once; the slower one counts."""
        left = [self._lake, self._link]

        def passed() -> None:
            left.pop()
            if not left:
                done()

        for pipe in tuple(left):
            pipe.serve(num_bytes, passed)

    def _from_lake(self, block: int, num_bytes: int, seen: StepTrace, arrived: Callable[[float], None]) -> None:
        begun_s = self._events.now_s
        seen.begun_s.append(begun_s)
        self._coming[block] = []

        def answered() -> None:
            self._transfer(num_bytes, came)

        def came() -> None:
            arrived(max(self._events.now_s - begun_s, 1e-9))
            for other in self._coming.pop(block):
                other()

        self._events.at(begun_s + self._latency.at(self._draw.random()), answered)


class Others(Protocol):
    """The ranks that are not simulated one by one."""

    def ready_s(self, seen: StepTrace, now_s: float) -> float:
        """When the last of them has its batch for this step, `now_s` where that is earlier."""


class AlikeOthers:
    """`per_rank` ranks stand behind each simulated one.

    Args:
        after_s: from the arrival of a block to the batch: transfer and decoding.
    """

    def __init__(self, latency: Latency, *, per_rank: float, after_s: float, draw: random.Random) -> None:
        self._latency = latency
        self._per_rank = per_rank
        self._after_s = after_s
        self._draw = draw

    def ready_s(self, seen: StepTrace, now_s: float) -> float:
        """As `Others.ready_s`."""
        begun = seen.alone_s or seen.begun_s
        num_requests = len(begun) * self._per_rank
        lot, place = self._draw.random(), self._draw.random()
        if num_requests <= 0:
            return now_s
        # The largest of n numbers that are uniform in [0, 1) is below u with probability u^n.
        largest_s = self._latency.at(lot ** (1 / num_requests))
        begun_s = begun[int(place * len(begun))]
        return max(now_s, begun_s + largest_s + self._after_s)


class Trainer:
    """All ranks in lock-step: a step begins when the last rank has its batch, and takes `step_s`."""

    def __init__(
        self, *, events: Events, ranks: list[SimulatedRank], others: Others, step_s: float, trace: Trace
    ) -> None:
        self._events = events
        self._ranks = ranks
        self._others = others
        self._step_s = step_s
        self._trace = trace
        self._trains = False
        self._free_s = 0.0
        self.num_done = 0

    def run(self, num_steps: int) -> None:
        """Trains so many steps.

        Raises:
            PipelineError: the ranks wait for each other for ever.
        """
        for rank in self._ranks:
            rank.start()
        while self.num_done < num_steps:
            if not self._events.step():
                raise PipelineError(f"the simulation stands still after {self.num_done} of {num_steps} steps")

    def decoded(self) -> None:
        """A rank has a batch ready."""
        if not self._trains and all(rank.num_ready for rank in self._ranks):
            self._trains = True
            seen = self._trace.step(self.num_done)
            self._events.at(self._others.ready_s(seen, self._events.now_s), self._begin)

    def _begin(self) -> None:
        now_s = self._events.now_s
        seen = self._trace.step(self.num_done)
        seen.wait_s = now_s - self._free_s
        seen.depth = self._ranks[0].depth
        self._free_s = now_s + self._step_s
        for rank in self._ranks:
            rank.consume()
        self._events.at(self._free_s, self._end)

    def _end(self) -> None:
        self._trains = False
        self.num_done += 1
        self.decoded()
