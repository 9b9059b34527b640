"""What `dalipipe plan` answers: capacity, policy, utilisation, lake, cost and advice for a job of so many GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from dalipipe.cache.config import CacheConfig
from dalipipe.errors import ConfigError
from dalipipe.loader.config import LoaderConfig
from dalipipe.metrics.cost import Bill, make_bill
from dalipipe.order.config import ShuffleConfig
from dalipipe.prefetch.config import PrefetchConfig
from dalipipe.shards.shape import DataShape
from dalipipe.simulate.capacity import choose_policy, rule_bytes, step_time, tier_budgets
from dalipipe.simulate.config import PlanConfig
from dalipipe.simulate.job import Job, nodes_are_apart, ranks_are_apart
from dalipipe.simulate.latency import Latency, LognormalLatency
from dalipipe.simulate.predict import Outcome, open_bytes, predict
from dalipipe.storage.budget import declared_rate
from dalipipe.storage.store import StorageConfig
from dalipipe.units import format_bytes, parse_bytes, parse_capacity

_GOOD_AU = 0.95
_MOST_GPUS = 1 << 20
_BATCH_SIZE, _LEAST_STEPS = 256, 16
_LATENCY_S, _P99_OVER_MEDIAN = 0.05, 6.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The parts of a configuration that a job's reading depends on, each as the loader takes it."""

    plan: PlanConfig = field(default_factory=PlanConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    shuffle: ShuffleConfig = field(default_factory=ShuffleConfig)
    prefetch: PrefetchConfig = field(default_factory=PrefetchConfig)
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    storage: StorageConfig = field(default_factory=StorageConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a run tells about times; 0 and None where nothing is known."""

    step_s: float = 0.0
    decode_s: float = 0.0
    latency: Latency | None = None
    lake_rate: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The answer for one number of GPUs.

    node_cache_bytes: by the rule, read bandwidth x cover time; cache_bytes: what was counted with, of one node.
    """

    job: Job
    node_cache_bytes: int
    outcome: Outcome
    bill: Bill
    advice: list[str]

    @property
    def cache_bytes(self) -> int:
        """Bytes of the caches of one node that were counted with."""
        return sum(self.job.budgets.values())

    def to_json(self) -> dict[str, Any]:
        """A JSON-able dictionary; sizes in bytes, times in seconds, `*_rate` in bytes a second."""
        first, later = self.outcome.first, self.outcome.later
        return {
            "gpus": self.job.num_gpus,
            "nodes": self.job.num_nodes,
            "node_cache_bytes": self.node_cache_bytes,
            "policy": self.job.policy,
            "au": later.au,
            "au_first_epoch": first.au,
            "lake_bytes_per_epoch": later.lake_bytes,
            "lake_bytes_first_epoch": first.lake_bytes,
            "lake_requests_per_epoch": later.lake_requests,
            "lake_rate": later.lake_bytes / later.wall_s,
            "hit_ratio": later.hit_ratio,
            "read_again": later.read_again,
            "prefetch_depth": later.depth,
            "stalls": {"first_epoch": first.stalls, "per_epoch": later.stalls},
            "wait_s_per_epoch": later.wait_s,
            "first_batch_s": first.first_wait_s,
            "epoch_s": later.wall_s,
            "first_epoch_s": first.wall_s,
            "steps_per_epoch": later.num_steps,
            "step_s": self.job.step_s,
            "decode_s": self.job.decode_s,
            "gpu_read_rate": self.job.gpu_rate,
            "latency": self.job.latency.describe(),
            "batch_size": self.job.batch_size,
            "cache_bytes": self.cache_bytes,
            "cluster_cache_bytes": self.cache_bytes * self.job.num_nodes,
            "dataset_bytes": self.job.shape.num_bytes,
            "cost": asdict(self.bill),
            "simulated": self.outcome.about,
            "advice": self.advice,
        }


def make_plan(
    settings: Settings, shape: DataShape, num_gpus: int, prices: Mapping[str, float], measured: Measured | None = None
) -> Plan:
    """Simulates the job on `num_gpus` GPUs and says what follows.

    Args:
        shape: the data set.
        prices: as `make_bill`.
        measured: of a run; what `settings.plan` says goes before it.

    Raises:
        ConfigError: a value can never work, or values do not go together; names the keys.
    """
    plan = settings.plan
    if plan.steps < 0 or plan.epochs < 0:
        raise ConfigError(f"plan.steps={plan.steps} and plan.epochs={plan.epochs} must be at least 0")
    job = make_job(settings, shape, num_gpus, measured)
    needed_bytes = rule_bytes(plan, job.gpu_rate, job.ranks_per_node)
    budgets = tier_budgets(settings.cache, plan, needed_bytes)
    _, why = _policy(settings, shape, budgets, job.num_nodes)
    outcome = predict(job, num_steps=plan.steps, seed=settings.shuffle.seed)
    later = outcome.later
    bill = make_bill(
        gpus=num_gpus,
        wall_s=later.wall_s,
        num_steps=later.num_steps,
        stall_share=1 - later.au,
        prices=prices,
        lake_bytes=later.lake_bytes,
        lake_requests=later.lake_requests,
        cache_bytes=sum(job.budgets.values()) * job.num_nodes,
    )
    return Plan(
        job=job,
        node_cache_bytes=needed_bytes,
        outcome=outcome,
        bill=bill,
        advice=[why, *_advice(job, outcome, needed_bytes)],
    )


def make_job(settings: Settings, shape: DataShape, num_gpus: int, measured: Measured | None = None) -> Job:
    """The job of a configuration on `num_gpus` GPUs. Arguments and errors as `make_plan`."""
    plan, measured = settings.plan, measured or Measured()
    nodes = num_nodes(plan, num_gpus)
    batch_size = rank_batch_size(settings.loader, num_gpus, shape.num_samples)
    step_s = step_time(
        plan,
        batch_size=batch_size,
        sample_bytes=shape.num_bytes / shape.num_samples,
        measured_step_s=measured.step_s,
    )
    rate = batch_size * shape.num_bytes / shape.num_samples / step_s
    budgets = tier_budgets(settings.cache, plan, rule_bytes(plan, rate, num_gpus // nodes))
    policy, _ = _policy(settings, shape, budgets, nodes)
    return Job(
        shape=shape,
        num_nodes=nodes,
        ranks_per_node=num_gpus // nodes,
        batch_size=batch_size,
        shuffle=settings.shuffle,
        prefetch=settings.prefetch,
        memory_cap_bytes=_memory_cap(settings.prefetch),
        last_batch=settings.loader.last_batch,
        epoch_samples=settings.loader.epoch_samples,
        replicas=settings.loader.replicas,
        policy=policy,
        budgets={} if policy == "stream" else budgets,
        step_s=step_s,
        decode_s=_seconds(plan.decode_s, "plan.decode_s") if plan.decode_s is not None else measured.decode_s,
        latency=_latency(plan, measured),
        lake_rate=_rate(plan.lake_bandwidth, "plan.lake_bandwidth") or measured.lake_rate,
        link_rate=declared_rate(settings.storage.bandwidth),
        disk_rate=_rate(plan.disk_bandwidth, "plan.disk_bandwidth"),
        threads=min(settings.prefetch.threads, settings.storage.concurrency),
    )


def _policy(settings: Settings, shape: DataShape, budgets: Mapping[str, int], nodes: int) -> tuple[str, str]:
    return choose_policy(
        settings.cache.policy,
        cluster_bytes=sum(budgets.values()) * nodes,
        dataset_bytes=shape.num_bytes,
        epochs=settings.plan.epochs,
    )


def gpu_counts(plan: PlanConfig) -> list[int]:
    """`plan.gpus` as numbers: those of one node where it is left out.

    Raises:
        ConfigError: it is neither a number nor a list of numbers, or one of them does not fill whole nodes.
    """
    per_node = plan.gpus_per_node
    if per_node < 1:
        raise ConfigError(f"plan.gpus_per_node={per_node} must be at least 1")
    asked = per_node if plan.gpus is None else plan.gpus
    counts = list(asked) if isinstance(asked, (list, tuple)) else [asked]
    for count in counts:
        if isinstance(count, bool) or not isinstance(count, int):
            raise ConfigError(f"plan.gpus={plan.gpus!r} must be a number of GPUs, or a list such as [8,64,512]")
        num_nodes(plan, count)
    if not counts:
        raise ConfigError("plan.gpus=[] names no number of GPUs; give one, or a list such as [8,64,512]")
    return counts


def num_nodes(plan: PlanConfig, num_gpus: int) -> int:
    """Nodes of so many GPUs; a single node may have fewer than `plan.gpus_per_node`.

    Raises:
        ConfigError: they are none, too many, or no whole nodes; names the nearest.
    """
    per_node = plan.gpus_per_node
    if not 1 <= num_gpus <= _MOST_GPUS:
        raise ConfigError(f"plan.gpus={num_gpus} must be from 1 to {_MOST_GPUS:,}")
    if num_gpus > per_node and num_gpus % per_node:
        below = num_gpus // per_node * per_node
        raise ConfigError(
            f"plan.gpus={num_gpus} are no whole nodes of plan.gpus_per_node={per_node}; nearest: {below} or "
            f"{below + per_node}"
        )
    return max(1, num_gpus // per_node)


def rank_batch_size(loader: LoaderConfig, num_gpus: int, num_samples: int) -> int:
    """Samples a step of one rank: where none is given 256, or fewer so that an epoch has 16 steps.

    Raises:
        ConfigError: both sizes are given, or one cannot be.
    """
    local, total, replicas = loader.batch_size, loader.global_batch_size, loader.replicas
    if local is not None and total is not None:
        raise ConfigError(
            f"give one of loader.batch_size={local} (per rank) and loader.global_batch_size={total} (whole job)"
        )
    if replicas < 1 or num_gpus % replicas:
        raise ConfigError(f"loader.replicas={replicas} must divide plan.gpus={num_gpus} into whole groups")
    groups = num_gpus // replicas
    if total is not None and (total < groups or total % groups):
        raise ConfigError(
            f"loader.global_batch_size={total} must divide by the {groups} ranks (or groups of replicas); nearest: "
            f"{max(1, total // groups) * groups}"
        )
    size = max(1, min(_BATCH_SIZE, num_samples // (_LEAST_STEPS * groups))) if local is None else local
    if total is not None:
        size = total // groups
    if size < 1:
        raise ConfigError(f"loader.batch_size={size} must be at least 1")
    return size


def _advice(job: Job, outcome: Outcome, needed_bytes: int) -> list[str]:
    later, advice = outcome.later, []
    if job.budgets and sum(job.budgets.values()) < needed_bytes:
        advice.append(
            f"the node's cache of {format_bytes(sum(job.budgets.values()))} is smaller than the "
            f"{format_bytes(needed_bytes)} that its GPUs read in plan.cover_s"
        )
    signature = job.orders()(0).signature
    groups = job.num_gpus // job.replicas
    if signature.mode == "block" and not ranks_are_apart(job):
        whom = "its node" if nodes_are_apart(job) else "nodes"
        advice.append(
            f"shuffle.lanes={signature.lanes} for {groups} ranks: ranks share lanes, and each block is asked of {whom} "
            f"{later.read_again:.1f} times an epoch; set shuffle.lanes={groups}, or a multiple that divides the global "
            f"batch of {job.global_batch_size:,}"
        )
    elif open_bytes(job) > job.memory_cap_bytes:
        advice.append(
            f"a rank has {format_bytes(open_bytes(job))} of blocks open that no cache keeps, and prefetch.memory_cap "
            f"is {format_bytes(job.memory_cap_bytes)}: blocks are asked for {later.read_again:.1f} times; lower "
            "shuffle.window, or raise the cap"
        )
    if later.au < _GOOD_AU:
        advice.append(f"GPUs wait {1 - later.au:.0%} of the time: {_bound(job, outcome)}")
    elif outcome.first.au < _GOOD_AU:
        advice.append(
            f"GPUs wait {1 - outcome.first.au:.0%} of the first epoch, {1 - later.au:.1%} of later ones; "
            "`dalipipe cache warm` before the job, or accept it once"
        )
    return advice


def _bound(job: Job, outcome: Outcome) -> str:
    """What limits a job that waits."""
    later = outcome.later
    if job.decode_s >= 0.98 * job.step_s:
        return f"decoding a batch takes {job.decode_s:.3g} s and a step {job.step_s:.3g} s; more or faster CPUs"
    wanted = later.lake_bytes / (later.num_steps * job.step_s)
    if job.lake_rate and wanted > 0.9 * job.lake_rate:
        return (
            f"without waits the job would read {format_bytes(wanted)}/s from the lake, which gives "
            f"{format_bytes(job.lake_rate)}/s; more of the lake, or caches that hold more"
        )
    if job.link_rate and wanted / job.num_nodes > 0.9 * job.link_rate:
        return (
            f"without waits a node would read {format_bytes(wanted / job.num_nodes)}/s, and storage.bandwidth is "
            f"{format_bytes(job.link_rate)}/s"
        )
    near = job.gpu_rate * job.ranks_per_node * later.read_again * later.hit_ratio
    if job.disk_rate and near > 0.9 * job.disk_rate:
        return (
            f"without waits a node would read {format_bytes(near)}/s from its disk, which gives "
            f"{format_bytes(job.disk_rate)}/s"
        )
    return (
        "the slowest of many requests comes late; raise prefetch.depth, prefetch.memory_cap or prefetch.threads, "
        "and keep storage.hedge"
    )


def _latency(plan: PlanConfig, measured: Measured) -> Latency:
    if plan.latency_s is None and measured.latency is not None:
        return measured.latency
    median_s = _LATENCY_S if plan.latency_s is None else _seconds(plan.latency_s, "plan.latency_s")
    p99_s = _P99_OVER_MEDIAN * median_s
    if plan.latency_p99_s is not None:
        p99_s = _seconds(plan.latency_p99_s, "plan.latency_p99_s")
    if p99_s < median_s:
        raise ConfigError(f"plan.latency_p99_s={p99_s} must be at least the median, plan.latency_s={median_s}")
    return LognormalLatency(median_s, p99_s)


def _memory_cap(prefetch: PrefetchConfig) -> int:
    """`prefetch.memory_cap` in bytes, and whether the rest of `prefetch` can be simulated."""
    if prefetch.cold_steps != "auto" and not (isinstance(prefetch.cold_steps, int) and prefetch.cold_steps >= 0):
        raise ConfigError(f"prefetch.cold_steps={prefetch.cold_steps!r} must be auto or a number of steps from 0")
    for name in ("threads", "queue_depth"):
        if getattr(prefetch, name) < 1:
            raise ConfigError(f"prefetch.{name}={getattr(prefetch, name)} must be at least 1")
    if prefetch.whole_epoch:
        raise ConfigError(
            "prefetch.whole_epoch=true is not simulated; leave it out: it makes the first epoch sooner warm"
        )
    cap_bytes = parse_capacity(prefetch.memory_cap, 1 << 60, "prefetch.memory_cap")
    if cap_bytes != parse_capacity(prefetch.memory_cap, 1 << 61, "prefetch.memory_cap"):
        raise ConfigError(f"prefetch.memory_cap={prefetch.memory_cap!r}: plan knows no host; give bytes, such as 4GiB")
    return cap_bytes


def _rate(value: int | float | str | None, key: str) -> float | None:
    if value is None:
        return None
    rate = parse_bytes(value.removesuffix("/s") if isinstance(value, str) else value, key)
    if rate < 1:
        raise ConfigError(f"{key}={value!r} must be more than 0 bytes a second, or null")
    return float(rate)


def _seconds(value: float, key: str) -> float:
    if not 0 <= value < float("inf"):
        raise ConfigError(f"{key}={value} must be at least 0 seconds")
    return float(value)
