"""How large a node's cache is to be, and whether it is worth having."""

from __future__ import annotations

import math
import re

from dalipipe.cache.config import CacheConfig
from dalipipe.cache.open import POLICIES
from dalipipe.errors import ConfigError
from dalipipe.simulate.config import PlanConfig
from dalipipe.units import format_bytes, parse_bytes, parse_capacity

# An epoch that is ten times what all caches hold is far larger: they save a tenth of it at most.
FAR_LARGER = 10
_SAMPLES = re.compile(r"([0-9]+(?:\.[0-9]+)?(?:[eE][0-9]+)?)\s*samples?(?:/s)?", re.IGNORECASE)
_ANY_BYTES = 1 << 60
_SHORTEST_STEP_S = 1e-6


def step_time(plan: PlanConfig, *, batch_size: int, sample_bytes: float, measured_step_s: float = 0.0) -> float:
    """Seconds of a step that does not wait, from the one figure that is given.

    Args:
        batch_size: samples a step of one rank, of `sample_bytes` each on average.
        measured_step_s: of a run; what `plan.*` says goes before it.

    Raises:
        ConfigError: neither or both are given, or one is no rate or time.
    """
    if plan.step_s is not None and plan.gpu_read_rate is not None:
        raise ConfigError(
            f"plan.step_s={plan.step_s} and plan.gpu_read_rate={plan.gpu_read_rate!r} say the same thing in two ways: "
            "give one of them"
        )
    if plan.gpu_read_rate is not None:
        rate = _read_rate(plan.gpu_read_rate, sample_bytes)
        return _possible(batch_size * sample_bytes / rate, f"plan.gpu_read_rate={plan.gpu_read_rate!r}")
    step_s = plan.step_s if plan.step_s is not None else measured_step_s
    if plan.step_s is None and not measured_step_s:
        raise ConfigError(
            "plan needs to know how fast a GPU consumes: give plan.step_s (seconds a step), plan.gpu_read_rate (bytes "
            'or "N samples" a second of one GPU), or plan.from (the folder of a run)'
        )
    if not 0 < step_s < math.inf:
        raise ConfigError(f"plan.step_s={step_s} must be more than 0 seconds")
    return _possible(step_s, f"plan.step_s={step_s}")


def _possible(step_s: float, said: str) -> float:
    if step_s < _SHORTEST_STEP_S:
        raise ConfigError(f"{said}: a step of {step_s:.3g} s is shorter than any; check the unit (at least 1e-6 s)")
    return step_s


def rule_bytes(plan: PlanConfig, gpu_rate: float, num_gpus: int) -> int:
    """Node cache = read bandwidth x cover time: what the GPUs of a node read in `plan.cover_s`.

    Args:
        gpu_rate: bytes a second of one GPU.

    Raises:
        ConfigError: the time is none.
    """
    if not 0 <= plan.cover_s < math.inf:
        raise ConfigError(f"plan.cover_s={plan.cover_s} must be at least 0 seconds")
    return round(num_gpus * gpu_rate * plan.cover_s)


def tier_budgets(cache: CacheConfig, plan: PlanConfig, needed_bytes: int) -> dict[str, int]:
    """Bytes by tier of a node that plan counts with, the nearest first: what the configuration says, else the rule.

    Raises:
        ConfigError: a capacity is none, is a fraction of a memory that nobody knows, or belongs to a tier that is not
            simulated.
    """
    if cache.tiers.pool.url:
        raise ConfigError(
            f"cache.tiers.pool.url={cache.tiers.pool.url!r}: plan does not simulate the pool; leave it out, and read "
            "lake_bytes_per_epoch as what the pool and the lake give together"
        )
    key = "cache.tiers.memory.capacity"
    memory_bytes = parse_capacity(cache.tiers.memory.capacity, _ANY_BYTES, key)
    if _is_fraction(cache.tiers.memory.capacity, key):
        raise ConfigError(f"{key}={cache.tiers.memory.capacity!r}: plan knows no host; give bytes, such as 200G")
    key = "cache.tiers.node.capacity"
    disk_bytes = parse_bytes(plan.disk_bytes, "plan.disk_bytes")
    if not _is_fraction(cache.tiers.node.capacity, key):
        node_bytes = parse_capacity(cache.tiers.node.capacity, _ANY_BYTES, key)
    elif disk_bytes:
        node_bytes = parse_capacity(cache.tiers.node.capacity, disk_bytes, key)
    else:
        node_bytes = needed_bytes
    return {name: size for name, size in (("memory", memory_bytes), ("node", node_bytes)) if size}


def choose_policy(policy: str, *, cluster_bytes: int, dataset_bytes: int, epochs: int) -> tuple[str, str]:
    """The policy that is simulated, and why in a sentence.

    With each sample read once an epoch no policy hits more than the share that fits, and never evicting reaches it
    (Mohan et al., "Analyzing and Mitigating Data Stalls in DNN Training", 2021; `cache/policies.py`): so `auto` is
    `pin`, or `stream` where that share is small.

    Args:
        policy: `cache.policy`.
        cluster_bytes: what the caches of all nodes hold together.
        epochs: 1 = the data are read once.

    Raises:
        ConfigError: there is no such policy.
    """
    if policy not in POLICIES:
        raise ConfigError(f"cache.policy={policy!r} is not available; choose one of {', '.join(POLICIES)}")
    holds = f"the caches of all nodes hold {format_bytes(cluster_bytes)} of the {format_bytes(dataset_bytes)}"
    share = min(1.0, cluster_bytes / max(dataset_bytes, 1))
    if policy != "auto":
        if policy in ("lru", "lfu"):
            bound = share + (1 - share) * math.log1p(-share) if share < 1 else 1.0
            return policy, (
                f"{holds}: pin would find {share:.1%} of them in every epoch, lru {bound:.1%}, since blocks are "
                "dropped before they come again; use cache.policy=pin"
                if share < 1
                else f"{holds} that an epoch reads: nothing is dropped"
            )
        return policy, f"{holds} that an epoch reads; the policy is given"
    if epochs == 1:
        return "stream", "the data are read once: stream, do not buy disks"
    if cluster_bytes * FAR_LARGER < dataset_bytes:
        return "stream", (
            f"an epoch of {format_bytes(dataset_bytes)} is far larger than what the cluster's caches hold "
            f"({format_bytes(cluster_bytes)}, {share:.1%}): stream, do not buy disks"
        )
    if share < 1:
        return "pin", f"{holds} that an epoch reads: {share:.0%} is read from the lake once, the rest in every epoch"
    return "pin", f"{holds} that an epoch reads: the lake is read once"


def _read_rate(value: int | float | str, sample_bytes: float) -> float:
    match = _SAMPLES.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is not None:
        rate = float(match[1]) * sample_bytes
    else:
        text = value.strip().removesuffix("/s") if isinstance(value, str) else value
        try:
            rate = float(text)
        except ValueError:
            try:
                rate = float(parse_bytes(text, "plan.gpu_read_rate"))
            except ConfigError:
                raise ConfigError(
                    f"plan.gpu_read_rate={value!r} is no rate: give bytes a second of one GPU (1.5GB, or a number), or "
                    'samples a second ("2500 samples")'
                ) from None
    if not (0 < rate < math.inf):
        raise ConfigError(f"plan.gpu_read_rate={value!r} must be more than 0")
    return rate


def _is_fraction(capacity: int | float | str, key: str) -> bool:
    return parse_capacity(capacity, 2 * _ANY_BYTES, key) != parse_capacity(capacity, _ANY_BYTES, key)
