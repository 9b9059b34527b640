"""What a job will do, from the places of an epoch that are simulated."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dalipipe.cache.policies import block_hash
from dalipipe.simulate.cluster import StepTrace
from dalipipe.simulate.evicting import EVICTING, HitProfile, hit_profile
from dalipipe.simulate.job import Job, Sample, nodes_are_apart, ranks_are_apart, simulate
from dalipipe.simulate.tiers import kept_share
from dalipipe.telemetry import LATENCY_BOUNDS_S

# About 0.5 ms of CPU each, and four places a job: a few seconds.
_FETCHES_A_PLACE = 4_000
_MOST_RANKS = 8
_LEAST_STEPS, _FEW_STEPS, _MOST_STEPS = 4, 48, 400
_LEAST_AGAIN, _MUCH_AGAIN = 0.1, 0.3
_WHOLE_FETCHES = 10_000
_SETTLE_STEPS = 8
_EVICTING_PLACES = 3
NO_STALL_S = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch:
    """One epoch of the whole job.

    au: accelerator utilisation, step time over wall time. wait_s: all waits of the epoch. hit_ratio: of the blocks that
    ranks asked for, those that the node had. stalls: steps by how long they waited: up to each bound of
    `LATENCY_BOUNDS_S`, and longer; steps that waited less than 0.1 ms are not in it. read_again: blocks that ranks
    asked for, over the blocks that the epoch consists of. depth: steps that were prefetched, mean.
    """

    num_steps: int
    au: float
    wall_s: float
    first_wait_s: float
    wait_s: float
    hit_ratio: float
    lake_bytes: int
    lake_requests: int
    read_again: float
    depth: float
    stalls: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The first epoch, and a later one when caches are as full as they get.

    about: what was simulated, for people.
    """

    first: Epoch
    later: Epoch
    about: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Steps of an epoch that stand for `weight` of it: measured after `settle` steps that are not."""

    start: int
    settle: int
    steps: int
    weight: float


def predict(job: Job, *, num_steps: int = 0, seed: int = 0) -> Outcome:
    """Simulates a job.

    Args:
        num_steps: steps that are simulated at each place of an epoch; 0 = as many as take a few seconds.
        seed: of the latencies; the order's own is `job.shuffle.seed`.

    Raises:
        ConfigError: as the order does, or the data set does not fill one step.
    """
    total = job.orders()(0).num_steps
    asked_for = total * job.num_gpus * _blocks_a_step(job)
    # Two epochs fill a cache that keeps what came; one that evicts, and epochs that are parts of a stream, take longer.
    fills = job.policy not in EVICTING and job.epoch_samples is None
    if fills and not num_steps and job.num_gpus <= _MOST_RANKS and 2 * asked_for <= _WHOLE_FETCHES:
        return _whole_epochs(job, seed)
    return _places(job, num_steps, seed)


def _blocks_a_step(job: Job) -> float:
    """Blocks that a rank asks for in a step, at most."""
    signature = job.orders()(0).signature
    scattered = signature.mode == "full" or (signature.mode == "block" and not ranks_are_apart(job))
    if scattered:
        return job.batch_size
    return job.batch_size * min(1.0, 1 / job.shape.block_samples + _share_again(job))


def _share_again(job: Job) -> float:
    """About the share of samples whose block was there and had to go, where more blocks are open than memory holds."""
    over = open_bytes(job) - job.memory_cap_bytes
    if over <= 0 or not ranks_are_apart(job):
        return 0.0
    return max(_LEAST_AGAIN, over / open_bytes(job))  # steps ahead take a part of the memory


def _few_steps(job: Job) -> int:
    """Steps that a place has at least: fewer where most blocks are asked for again, or all ranks of a node share its
    lanes, as each step has many requests then; more where memory is just too small, as waits are rare and long then."""
    again = _share_again(job)
    if not ranks_are_apart(job) and nodes_are_apart(job):
        fetches = job.ranks_per_node * _blocks_a_step(job)
        return max(_SETTLE_STEPS, min(_FEW_STEPS, int(_FETCHES_A_PLACE / fetches)))
    if again < _MUCH_AGAIN:
        return 2 * _FEW_STEPS if again else _FEW_STEPS
    return max(_LEAST_STEPS, min(_FEW_STEPS, int(_FETCHES_A_PLACE / _blocks_a_step(job))))


def _period(job: Job) -> int:
    """Steps after which a simulation that begins anywhere is in its stride."""
    if not ranks_are_apart(job):
        return 1
    if not _share_again(job):
        return job.shape.block_samples
    blocks = job.memory_cap_bytes / (job.shape.num_bytes / job.shape.num_samples * job.shape.block_samples)
    return max(1, min(job.shape.block_samples, math.ceil(blocks / _blocks_a_step(job))))


def _whole_epochs(job: Job, seed: int) -> Outcome:
    """Every step of two epochs, of every rank."""
    total = job.orders()(0).num_steps
    sample = Sample(nodes=tuple(range(job.num_nodes)), ranks_a_node=job.ranks_per_node)
    traces = simulate(job, sample=sample, start=(0, 0), num_steps=2 * total, seed=seed)
    epochs = [
        _epoch(job, [(traces[epoch * total : (epoch + 1) * total], 1.0)], sample=sample, starts=epoch == 0)
        for epoch in (0, 1)
    ]
    return Outcome(first=epochs[0], later=epochs[1], about=f"every step of 2 epochs, on all {job.num_gpus} GPUs")


def _places(job: Job, num_steps: int, seed: int) -> Outcome:
    """Some steps of the begin and of the middle of the first and of a later epoch, on some ranks."""
    total = job.orders()(0).num_steps
    sample = _sample(job)
    profile = hit_profile(job, seed=seed) if job.policy in EVICTING else None
    epochs = []
    places = _choose_places(job, sample, num_steps)
    for epoch in (0, 1):
        seen = []
        for number, place in enumerate(places):
            here = _as_kept(job, epoch, profile, place.start / total)
            seen.append((_look(here, sample, epoch, place, seed + number), place.weight))
        epochs.append(_epoch(job, seen, sample=sample, starts=epoch == 0, profile=profile))
    about = (
        f"{', '.join(f'{place.steps} steps from {place.start + place.settle}' for place in places)} of {total:,}, of "
        f"the first and of a later epoch, on {sample.num_ranks} of {job.num_gpus:,} GPUs"
    )
    return Outcome(first=epochs[0], later=epochs[1], about=about)


def _choose_places(job: Job, sample: Sample, num_steps: int) -> list[_Place]:
    order = job.orders()(0)
    total, signature = order.num_steps, order.signature
    steps = num_steps or int(_FETCHES_A_PLACE / (sample.num_ranks * _blocks_a_step(job)))
    period, few = _period(job), _few_steps(job)
    lump = job.shape.block_samples if ranks_are_apart(job) else 1
    steps = min(max(steps, num_steps or few), _MOST_STEPS, total)
    settle = min(period + min(few, _SETTLE_STEPS), max(1, total - steps), 2 * steps)
    if not num_steps and steps > lump:
        steps -= steps % lump  # lanes open their blocks in the same step: whole lumps are looked at
    # While windows fill up, at the begin of an epoch, lanes open blocks faster than they use them up.
    rows = job.shape.num_samples // job.shape.block_samples // max(1, signature.lanes)
    ramp = min(total, math.ceil(total * signature.window_blocks / (2 * max(rows, 1)))) if signature.lanes else 0
    begin = min(steps, max(ramp, 1))
    places = [_Place(start=0, settle=0, steps=begin, weight=begin / total)]
    if ramp > begin:
        start = max(0, (begin + ramp) // 2 - settle)
        places.append(_Place(start=start, settle=settle, steps=steps, weight=(ramp - begin) / total))
    rest = 1.0 - max(ramp, begin) / total
    # What is found in a cache that evicts depends on how far the epoch is.
    parts = _EVICTING_PLACES if job.policy in EVICTING else 1
    for part in range(parts):
        start = max(0, min(int(total * (part + 0.5) / parts), total - steps - settle))
        places.append(_Place(start=start, settle=settle, steps=min(steps, total - start - settle), weight=rest / parts))
    return [place for place in places if place.weight > 0 and place.steps > 0]


def _as_kept(job: Job, epoch: int, profile: HitProfile | None, position: float) -> Job:
    """The job itself, or, where blocks are evicted, one whose caches hold the share that is found at this position."""
    if profile is None:
        return job
    share = profile.at(position) if epoch else 0.0
    return replace(job, policy="pin", budgets={"node": int(share * job.shape.num_bytes * job.readers().node_share)})


def _sample(job: Job) -> Sample:
    """Ranks of the node in the middle, fewer where each asks for many blocks."""
    many = job.num_gpus * _blocks_a_step(job) * _few_steps(job) > _FETCHES_A_PLACE and _share_again(job) > 0
    if job.num_gpus <= _MOST_RANKS and ranks_are_apart(job) and not many:
        return Sample(nodes=tuple(range(job.num_nodes)), ranks_a_node=job.ranks_per_node)
    ranks = min(_MOST_RANKS, job.ranks_per_node)
    if not ranks_are_apart(job) and nodes_are_apart(job):
        # Its ranks share each block that one of them brings: a part of them would ask the lake for more.
        return Sample(nodes=(job.num_nodes // 2,), ranks_a_node=job.ranks_per_node)
    while ranks > 1 and ranks * _blocks_a_step(job) * _FEW_STEPS > _FETCHES_A_PLACE:
        ranks //= 2
    return Sample(nodes=(job.num_nodes // 2,), ranks_a_node=ranks)


def _look(job: Job, sample: Sample, epoch: int, place: _Place, seed: int) -> list[StepTrace]:
    """The measured steps of a place; the begin of a later epoch is reached from the end of the one before."""
    start, settle = (epoch, place.start), place.settle
    if epoch and not place.start and not settle:
        total = job.orders()(0).num_steps
        settle = min(total, _period(job) + _SETTLE_STEPS, 2 * place.steps + _SETTLE_STEPS)
        start = (epoch - 1, total - settle)
    warm = _warm(job) if epoch else None
    traces = simulate(job, sample=sample, start=start, num_steps=settle + place.steps, warm=warm, seed=seed)
    return traces[settle:]


def _warm(job: Job) -> Callable[[int], bool]:
    """Which of the blocks that a node is to keep are there in a later epoch: all, unless its ranks read more blocks
    than are theirs; then the first that came have taken the room."""
    signature = job.orders()(0).signature
    lanes = max(1, signature.lanes)
    if ranks_are_apart(job) or signature.exchange:
        return lambda _block: True
    # A node reads of (nearly) all blocks of the lanes that it has a part in.
    lanes_of_node = max(1, math.ceil(lanes * job.ranks_per_node / job.num_gpus)) if signature.lanes else lanes
    share = min(1.0, job.ranks_per_node / job.num_gpus * lanes / lanes_of_node)
    return lambda block: block_hash(block ^ 0x5BD1E995) < share


def _epoch(
    job: Job,
    seen: Sequence[tuple[list[StepTrace], float]],
    *,
    sample: Sample,
    starts: bool,
    profile: HitProfile | None = None,
) -> Epoch:
    """An epoch of the whole job from what was seen of it; `starts`: the first wait is that of a job that starts."""
    total = job.orders()(0).num_steps
    first_wait_s = seen[0][0][0].wait_s if starts else 0.0
    mean_wait_s = 0.0
    stalls = dict.fromkeys([f"{bound:g}" for bound in LATENCY_BOUNDS_S] + ["inf"], 0.0)
    for number, (steps, weight) in enumerate(seen):
        waits = [step.wait_s for step in steps]
        if starts and not number:
            waits = waits[1:] or [0.0]
        mean_wait_s += weight * sum(waits) / len(waits)
        for wait_s in waits:
            if wait_s > NO_STALL_S:
                bound = next((f"{bound:g}" for bound in LATENCY_BOUNDS_S if wait_s <= bound), "inf")
                stalls[bound] += weight * total / len(waits)
    wait_s = first_wait_s + mean_wait_s * total
    wall_s = wait_s + job.step_s * total
    steps = max(seen, key=lambda place: place[1])[0]
    near, asked_for = _volume(job, seen, sample, starts=starts, profile=profile)
    blocks = total * job.global_batch_size / job.shape.block_samples
    mean_block_bytes = job.shape.num_bytes / job.shape.num_samples * job.shape.block_samples
    return Epoch(
        num_steps=total,
        au=job.step_s * total / wall_s,
        wall_s=wall_s,
        first_wait_s=first_wait_s,
        wait_s=wait_s,
        hit_ratio=near,
        lake_bytes=round((1 - near) * asked_for * mean_block_bytes),
        lake_requests=round((1 - near) * asked_for),
        read_again=asked_for / blocks,
        depth=sum(step.depth for step in steps) / len(steps),
        stalls=stalls,
    )


def _volume(
    job: Job,
    seen: Sequence[tuple[list[StepTrace], float]],
    sample: Sample,
    *,
    starts: bool,
    profile: HitProfile | None,
) -> tuple[float, float]:
    """(the share of blocks that nodes have, blocks that all ranks ask for in an epoch)."""
    total = job.orders()(0).num_steps
    steps = max(seen, key=lambda place: place[1])[0]
    is_whole = len(steps) == total
    near = sum(step.near_blocks for step in steps)
    asked_for = near + sum(step.lake_blocks for step in steps)
    near_share = near / asked_for if asked_for else 1.0  # the prefetcher had them still
    if profile is not None:
        near_share = 0.0 if starts else profile.mean
    blocks = total * job.global_batch_size / job.shape.block_samples
    if not is_whole and ranks_are_apart(job) and open_bytes(job) <= job.memory_cap_bytes:
        # Each block once an epoch, and `pin` keeps what its arithmetic says: nothing to estimate.
        if profile is None:
            keeps = job.policy == "pin" and not starts
            near_share = kept_share(job.budgets, job.shape, job.readers()) if keeps else 0.0
        return near_share, blocks
    return near_share, asked_for * job.num_gpus / sample.num_ranks * total / len(steps)


def open_bytes(job: Job) -> float:
    """Bytes of the blocks that a rank has open at once and that its node does not keep."""
    signature = job.orders()(0).signature
    kept = kept_share(job.budgets, job.shape, job.readers()) if job.policy == "pin" else 0.0
    block_bytes = job.shape.num_bytes / job.shape.num_samples * job.shape.block_samples
    open_blocks = signature.lanes * signature.window_blocks * job.replicas / job.num_gpus
    return open_blocks * block_bytes * (1 - kept)
