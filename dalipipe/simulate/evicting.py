"""How much is found in a cache that evicts, by place of the epoch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dalipipe.order.signature import order_signature
from dalipipe.shards.shape import DataShape
from dalipipe.simulate.job import Job, Sample, ranks_are_apart, simulate
from dalipipe.simulate.latency import LognormalLatency

EVICTING = ("lru", "lfu")
_MOST_BLOCKS = 2_000
_EPOCHS, _FULL_FROM = 5, 2
_PARTS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class HitProfile:
    """The share of the blocks of an epoch that a node finds in its cache, and that of each twentieth of its steps."""

    mean: float
    parts: tuple[float, ...]

    def at(self, position: float) -> float:
        """The share at a place in [0, 1] of the epoch."""
        return self.parts[min(int(position * len(self.parts)), len(self.parts) - 1)]


def hit_profile(job: Job, *, seed: int) -> HitProfile:
    """What a node finds in its cache once that is full.

    Blocks of a node are used and dropped through the shipped order, tier and policy, all of them or, where there are
    more than 2,000, as many in a cache that is as much smaller: what is found depends on the share that fits (LRU:
    c + (1 - c) ln(1 - c)) and not on how many there are.
    """
    node_bytes = job.shape.num_bytes * job.readers().node_share
    mean_bytes = job.shape.num_bytes / job.shape.num_blocks
    budget_bytes = sum(job.budgets.values())
    blocks = max(1, min(_MOST_BLOCKS, int(node_bytes / mean_bytes)))
    share = min(1.0, budget_bytes / node_bytes)
    block_samples = job.shape.block_samples
    shape = DataShape(
        num_samples=blocks * block_samples, block_samples=block_samples, num_bytes=int(blocks * mean_bytes)
    )
    signature = job.orders()(0).signature
    lanes = 1
    if signature.lanes and ranks_are_apart(job):
        lanes = max(1, signature.lanes * job.ranks_per_node // job.num_gpus)
    while block_samples % lanes or lanes * 8 > blocks:
        lanes -= 1
    small = replace(
        job,
        shape=shape,
        num_nodes=1,
        ranks_per_node=1,
        replicas=1,
        batch_size=block_samples,
        shuffle=replace(job.shuffle, lanes=lanes, window=_window_share(job)),
        prefetch=replace(job.prefetch, depth=2),
        epoch_samples=None,
        budgets={
            name: int(num_bytes / budget_bytes * share * shape.num_bytes) for name, num_bytes in job.budgets.items()
        },
        latency=LognormalLatency(0.0, 0.0),
        lake_rate=None,
        link_rate=None,
        disk_rate=None,
        step_s=1.0,
        decode_s=0.0,
    )
    total = small.orders()(0).num_steps
    sample = Sample(nodes=(0,), ranks_a_node=1)
    traces = simulate(small, sample=sample, start=(0, 0), num_steps=_EPOCHS * total, seed=seed)
    near, asked_for = [0] * _PARTS, [0] * _PARTS
    for number, step in enumerate(traces[_FULL_FROM * total :]):
        part = number % total * _PARTS // total
        near[part] += step.near_blocks
        asked_for[part] += step.near_blocks + step.lake_blocks
    return HitProfile(
        mean=sum(near) / max(1, sum(asked_for)),
        parts=tuple(found / max(1, of) for found, of in zip(near, asked_for, strict=True)),
    )


def _window_share(job: Job) -> float:
    """The window as a share of the data set, which is the same in a smaller one."""
    if job.shuffle.mode != "block":
        return 0.05
    signature = order_signature(
        job.shape, batch_size=job.global_batch_size, shuffle=job.shuffle, last_batch=job.last_batch
    )
    return min(1.0, signature.lanes * signature.window_blocks * signature.block_samples / job.shape.num_samples)
