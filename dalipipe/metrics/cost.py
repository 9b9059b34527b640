"""Stall time as GPU-hours and money."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

FLEETS = (8, 100, 1000)
_DAY_S = 86_400.0
_MONTH_DAYS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """What waiting for data cost, and what keeping data near costs.

    stall_share: of the wall time of the steps, the share that a perfect loader would save; baseline says what it was
    measured against. Money is in the currency of `cost.*`, 0 where no price was given. per_day: for 8, 100 and 1,000
    GPUs that run as these did; net_per_day: that, less disk, egress and requests of the same number of GPUs.
    """

    gpus: int
    stall_share: float
    baseline: str
    gpu_hours: float
    gpu_hours_lost: float
    money_lost: float
    data_money_per_day: float
    gpu_hours_lost_per_day: dict[int, float] = field(default_factory=dict)
    per_day: dict[int, float] = field(default_factory=dict)
    net_per_day: dict[int, float] = field(default_factory=dict)


def make_bill(
    *,
    gpus: int,
    wall_s: float,
    num_steps: int,
    stall_share: float,
    prices: Mapping[str, float],
    lake_bytes: float = 0.0,
    lake_requests: float = 0.0,
    cache_bytes: float = 0.0,
    synthetic_step_s: float = 0.0,
) -> Bill:
    """The bill of a run of `gpus` ranks over `wall_s` seconds and `num_steps` steps in lock-step.

    Args:
        stall_share: share of the wall time that the slowest rank of each step waited for its batch: in lock-step the
            maximum is paid by all (DS-Analyzer's stall; the AU of MLPerf Storage is 1 - stall_share).
        synthetic_step_s: mean length of the same step without any loader, where it was measured: then only what is
            above it counts, so that collectives and jitter are not blamed on the loader.
        prices: gpu_hour, disk_gb_month, egress_gb, requests_1k.
        lake_bytes, lake_requests: of all ranks; cache_bytes: that lie in the node caches.
    """
    baseline = "the waits for batches; measure the synthetic step with `dalipipe spin` for a stricter bound"
    if synthetic_step_s > 0 and num_steps > 0 and wall_s > 0:
        stall_share = max(0.0, 1.0 - synthetic_step_s * num_steps / wall_s)
        baseline = f"the same step on synthetic batches, {1000 * synthetic_step_s:.1f} ms"
    price = prices.get("gpu_hour", 0.0)
    hours = gpus * wall_s / 3600
    days = wall_s / _DAY_S
    disk_per_day = cache_bytes / 1e9 * prices.get("disk_gb_month", 0.0) / _MONTH_DAYS
    lake_money = lake_bytes / 1e9 * prices.get("egress_gb", 0.0) + lake_requests / 1e3 * prices.get("requests_1k", 0.0)
    data_per_day = disk_per_day + (lake_money / days if days > 0 else 0.0)
    per_day = {fleet: 24 * price * fleet * stall_share for fleet in FLEETS}
    return Bill(
        gpus=gpus,
        stall_share=stall_share,
        baseline=baseline,
        gpu_hours=hours,
        gpu_hours_lost=hours * stall_share,
        money_lost=hours * stall_share * price,
        data_money_per_day=data_per_day,
        gpu_hours_lost_per_day={fleet: 24 * fleet * stall_share for fleet in FLEETS},
        per_day=per_day,
        net_per_day={fleet: money - data_per_day * fleet / gpus for fleet, money in per_day.items()},
    )
