"""One job in made-up time: from figures to what its steps waited for and what its nodes brought."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dalipipe.cache.readers import Readers, cache_readers
from dalipipe.order.config import ShuffleConfig
from dalipipe.order.epoch import EpochOrder
from dalipipe.order.recipe import orders
from dalipipe.order.seating import rank_slots
from dalipipe.prefetch.config import PrefetchConfig
from dalipipe.prefetch.depth import DepthController
from dalipipe.prefetch.plan import StepPlanner
from dalipipe.prefetch.schedule import Schedule
from dalipipe.shards.shape import DataShape
from dalipipe.simulate.cluster import AlikeOthers, SimulatedNode, StepTrace, Trace, Trainer
from dalipipe.simulate.events import Events, Pipe
from dalipipe.simulate.latency import Latency
from dalipipe.simulate.rank import SimulatedRank
from dalipipe.simulate.tiers import EvenBlocks, open_tiers
from dalipipe.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job as its configuration describes it, and the machines that it runs on.

    batch_size: samples a step of one rank. policy: pin, lru, lfu or stream. budgets: bytes by tier of a node, the
    nearest first. Rates are bytes a second, None without a limit: lake_rate of all nodes together, link_rate and
    disk_rate of one. num_nodes x ranks_per_node ranks, one a GPU.
    """

    shape: DataShape
    num_nodes: int
    ranks_per_node: int
    batch_size: int
    shuffle: ShuffleConfig
    prefetch: PrefetchConfig
    memory_cap_bytes: int
    last_batch: str
    epoch_samples: int | None
    replicas: int
    policy: str
    budgets: dict[str, int]
    step_s: float
    decode_s: float
    latency: Latency
    lake_rate: float | None
    link_rate: float | None
    disk_rate: float | None
    threads: int

    @property
    def num_gpus(self) -> int:
        """Ranks of the job."""
        return self.num_nodes * self.ranks_per_node

    @property
    def global_batch_size(self) -> int:
        """B: samples of a step of the whole job."""
        return self.batch_size * self.num_gpus // self.replicas

    @property
    def gpu_rate(self) -> float:
        """Bytes a second that a GPU consumes while it does not wait."""
        return self.batch_size * self.shape.num_bytes / self.shape.num_samples / self.step_s

    def orders(self) -> Callable[[int], EpochOrder]:
        """The shipped order of each epoch. Raises ConfigError as it does."""
        return orders(
            {"": self.shape},
            batch_size=self.global_batch_size,
            shuffle=self.shuffle,
            last_batch=self.last_batch,
            epoch_samples=self.epoch_samples,
        )

    def world(self, rank: int) -> World:
        """A rank's place in the job."""
        node, local_rank = divmod(rank, self.ranks_per_node)
        return World(
            rank=rank,
            world_size=self.num_gpus,
            local_rank=local_rank,
            local_world_size=self.ranks_per_node,
            node=node,
        )

    def readers(self) -> Readers:
        """What the cache of a node knows of the job."""
        signature = self.orders()(0).signature
        return cache_readers(signature, self.shape, self.world(0), replicas=self.replicas)


def ranks_are_apart(job: Job) -> bool:
    """Whether each rank has lanes of its own, so that no block is read by two of them."""
    signature = job.orders()(0).signature
    return signature.mode == "block" and signature.lanes % (job.num_gpus // job.replicas) == 0


def nodes_are_apart(job: Job) -> bool:
    """Whether each node has lanes of its own, so that no block is read by two nodes."""
    signature = job.orders()(0).signature
    return signature.mode == "block" and job.replicas == 1 and signature.lanes % job.num_nodes == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Who of a job is simulated one by one: the first ranks of some nodes. All others are like them."""

    nodes: tuple[int, ...]
    ranks_a_node: int

    @property
    def num_ranks(self) -> int:
        """Ranks that are simulated."""
        return len(self.nodes) * self.ranks_a_node


class Simulation:
    """A run of some nodes of a job, from a step of an epoch on.

    Args:
        sample: who is simulated.
        start: (epoch, step).
        warm: with `pin`: which of the blocks that a node is to keep are there already; None: none, as in a new job.
        seed: of the latencies.
    """

    def __init__(
        self,
        job: Job,
        *,
        sample: Sample,
        start: tuple[int, int],
        warm: Callable[[int], bool] | None,
        folder: Path,
        seed: int,
    ) -> None:
        self._job = job
        self._folder = folder
        self._warm = warm
        self._start = start
        self._sample = sample
        crowd = job.num_gpus / sample.num_ranks
        self._events = Events()
        self._draw = random.Random(seed)
        self._lake = Pipe(self._events, job.lake_rate, crowd)
        self._orders = job.orders()
        self._readers = job.readers()
        self._blocks = EvenBlocks(job.shape)
        self.trace = Trace()
        self._ranks: list[SimulatedRank] = []
        self._nodes = [self._open_node(number) for number in sample.nodes]
        others = AlikeOthers(
            job.latency,
            per_rank=crowd - 1,
            after_s=job.decode_s + self._transfer_s(),
            draw=random.Random(seed + 1),
        )
        self._trainer = Trainer(
            events=self._events, ranks=self._ranks, others=others, step_s=job.step_s, trace=self.trace
        )

    def run(self, num_steps: int) -> None:
        """Trains so many steps; the trace tells about them."""
        self._trainer.run(num_steps)

    def close(self) -> None:
        """Lets the caches go."""
        for node in self._nodes:
            node.close()

    def _open_node(self, number: int) -> SimulatedNode:
        job, events = self._job, self._events
        crowd = job.ranks_per_node / self._sample.ranks_a_node
        cache, counter = open_tiers(
            job.shape,
            policy=job.policy,
            budgets=job.budgets,
            readers=self._readers,
            folder=self._folder / str(number),
            clock=lambda: 1.0 + events.now_s,
            warm=self._warm,
        )
        node = SimulatedNode(
            events=events,
            cache=cache,
            counter=counter,
            sample_bytes=round(job.shape.num_bytes / job.shape.num_samples),
            latency=job.latency,
            lake=self._lake,
            link=Pipe(events, job.link_rate, crowd),
            disk=Pipe(events, job.disk_rate, crowd),
            draw=self._draw,
            trace=self.trace,
        )
        first = number * job.ranks_per_node
        self._ranks += [self._open_rank(rank, node) for rank in range(first, first + self._sample.ranks_a_node)]
        return node

    def _open_rank(self, rank: int, node: SimulatedNode) -> SimulatedRank:
        job, blocks = self._job, self._blocks
        slots = rank_slots(job.global_batch_size, job.num_gpus, rank, job.replicas)
        return SimulatedRank(
            events=self._events,
            planner=StepPlanner(self._orders, self._start, slots, lambda ids: ids // job.shape.block_samples),
            schedule=Schedule(
                cap_bytes=job.memory_cap_bytes,
                block_bytes=blocks.mean_bytes,
                num_samples=blocks.num_samples,
                spare_threads=max(1, job.threads // 2),
            ),
            controller=DepthController(job.prefetch.depth),
            source=node,
            block_bytes=blocks.block_bytes,
            threads=job.threads,
            feeds=job.prefetch.queue_depth,
            ahead=max(1, job.prefetch.device_batches),
            decode_s=job.decode_s,
            cold_steps=self._cold_steps(),
            decoded=self._decoded,
        )

    def _cold_steps(self) -> int | None:
        if self._start[1] or self._warm is not None or self._job.threads < 2:  # a job that goes on, or one thread alone
            return 0
        return None if self._job.prefetch.cold_steps == "auto" else int(self._job.prefetch.cold_steps)

    def _decoded(self) -> None:
        self._trainer.decoded()

    def _transfer_s(self) -> float:
        rates = [rate for rate in (self._job.lake_rate, self._job.link_rate) if rate]
        return self._blocks.mean_bytes / min(rates) if rates else 0.0


def simulate(
    job: Job,
    *,
    sample: Sample,
    start: tuple[int, int],
    num_steps: int,
    warm: Callable[[int], bool] | None = None,
    seed: int = 0,
) -> list[StepTrace]:
    """What the steps [start, start + num_steps) of a job waited for, and what the simulated ranks brought for them; see
    `Simulation`."""
    with tempfile.TemporaryDirectory(prefix="dalipipe-plan-") as folder:
        simulation = Simulation(job, sample=sample, start=start, warm=warm, folder=Path(folder), seed=seed)
        try:
            simulation.run(num_steps)
        finally:
            simulation.close()
    return simulation.trace.steps(0, num_steps)
