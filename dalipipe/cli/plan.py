"""`dalipipe plan [URL]`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dalipipe.cli.output import emit, progress, table
from dalipipe.cli.schema import PlanJob
from dalipipe.errors import ConfigError
from dalipipe.metrics.cost import Bill
from dalipipe.shards.shape import DataShape
from dalipipe.simulate.calibrate import Comparison, ObservedRun, compare, observe, settings_of_run
from dalipipe.simulate.dataset import declared_shape
from dalipipe.simulate.plan import Plan, Settings, gpu_counts, make_plan, num_nodes
from dalipipe.simulate.topology import CrossNodeReads, cross_node_reads
from dalipipe.units import format_bytes
from dalipipe.wiring.dataset import open_manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """What the plan is made for: a data set, a configuration, and what a run measured."""

    settings: Settings
    shape: DataShape
    run: ObservedRun | None
    compared: Comparison | None
    cross: CrossNodeReads | None
    url: str


def run(cfg: PlanJob, *, as_json: bool) -> int:
    """Simulates a job that has not run, and says what to buy and what to set."""
    prices, counts = cfg.cost.prices(), gpu_counts(cfg.plan)
    known = _known(cfg, counts[0])
    if known.run is not None and cfg.plan.gpus is None:
        counts = [known.run.num_gpus]
    measured = known.run.measured if known.run is not None else None
    plans = []
    with progress("simulating") as report:
        for number, count in enumerate(counts):
            plans.append(make_plan(known.settings, known.shape, count, prices, measured))
            report(number + 1, len(counts))
    result: dict[str, Any] = {"url": known.url, **plans[0].to_json()}
    result["cross_node_reads"] = asdict(known.cross) if known.cross else None
    result["calibration"] = known.compared.to_json() if known.compared else None
    if len(plans) > 1:
        result["by_gpus"] = [plan.to_json() for plan in plans]
    emit(result, _text(known, plans, has_prices=any(prices.values())), as_json=as_json)
    return 0


def _known(cfg: PlanJob, num_gpus: int) -> _Known:
    if cfg.data.mix or cfg.data.repeat:
        raise ConfigError(
            "dalipipe plan simulates one data set, each sample once an epoch: leave data.mix and data.repeat out (what "
            "cache.policy=lfu saves where samples are hot is in docs/cache.md)"
        )
    settings = Settings(
        plan=cfg.plan,
        cache=cfg.cache,
        shuffle=cfg.shuffle,
        prefetch=cfg.prefetch,
        loader=cfg.loader,
        storage=cfg.storage,
    )
    shape, cross, url = declared_shape(cfg.plan), None, cfg.data.url
    if shape is not None and url:
        raise ConfigError(
            f"data.url={url} and plan.samples={cfg.plan.samples} name two data sets: leave one of them out"
        )
    run = observe(Path(cfg.plan.run).expanduser()) if cfg.plan.run else None
    nodes = cfg.plan.nodes or num_nodes(cfg.plan, num_gpus)
    if nodes < 1:
        raise ConfigError(f"plan.nodes={cfg.plan.nodes} must be at least 0")
    if url:
        store, manifest = open_manifest(cfg.data, cfg.storage)
        try:
            shape, cross = manifest.shape, cross_node_reads(manifest, nodes)
        finally:
            store.close()
    if run is None:
        if shape is None:
            raise ConfigError(
                "plan needs a data set: give its URL, or plan.samples and plan.sample_bytes, or plan.from (the folder "
                "of a run)"
            )
        return _Known(settings=settings, shape=shape, run=None, compared=None, cross=cross, url=url)
    return _Known(
        settings=settings_of_run(run, settings),
        shape=shape or run.shape,
        run=run,
        compared=compare(run),
        cross=cross,
        url=url,
    )


def _text(known: _Known, plans: list[Plan], *, has_prices: bool) -> str:
    first = plans[0]
    shape, told = known.shape, first.to_json()
    lines = [
        f"{shape.num_samples:,} samples, {format_bytes(shape.num_bytes)}, blocks of "
        f"{format_bytes(shape.num_bytes / shape.num_blocks)}; a step of {told['batch_size']} samples a GPU takes "
        f"{told['step_s']:.3g} s, {format_bytes(told['gpu_read_rate'])}/s; the lake's latency: {told['latency']}",
        "",
        table(_rows(plans, has_prices=has_prices)),
        "",
    ]
    for plan in plans:
        lines += [f"{_gpus(plan.job.num_gpus)}: {sentence}" for sentence in plan.advice]
    waits = [(float(bound), steps) for bound, steps in first.outcome.later.stalls.items() if steps > 0]
    if waits:
        shown = ", ".join(
            f"{steps:,.1f} up to {bound:g} s" if bound < float("inf") else f"{steps:,.1f} longer"
            for bound, steps in waits
        )
        lines.append(f"waits of {_gpus(first.job.num_gpus)}, steps of {first.outcome.later.num_steps:,}: {shown}")
    if known.cross is not None:
        lines.append(_cross_line(known.cross))
    if known.compared is not None:
        lines.append(_comparison_line(known.compared))
    elif known.run is not None:
        lines.append("the run itself: its ledger has too few steps to compare with")
    lines.append(f"simulated: {first.outcome.about}")
    return "\n".join(lines)


def _rows(plans: list[Plan], *, has_prices: bool) -> list[tuple[str, ...]]:
    told = [plan.to_json() for plan in plans]

    def row(name: str, key: str, shown: Any) -> tuple[str, ...]:
        return (name, *(shown(one[key]) for one in told))

    rows = [
        row("GPUs", "gpus", lambda n: f"{n:,}"),
        row("nodes", "nodes", lambda n: f"{n:,}"),
        row("node cache by the rule", "node_cache_bytes", format_bytes),
        row("node cache counted with", "cache_bytes", format_bytes),
        row("policy", "policy", str),
        row("AU, first epoch", "au_first_epoch", lambda share: f"{100 * share:.1f} %"),
        row("AU, later epochs", "au", lambda share: f"{100 * share:.1f} %"),
        row("blocks still in memory", "read_again", lambda share: f"{100 * max(0.0, 1 - share):.1f} %"),
        row("of others, in node caches", "hit_ratio", lambda share: f"{100 * share:.1f} %"),
        row("lake an epoch, first", "lake_bytes_first_epoch", format_bytes),
        row("lake an epoch, later", "lake_bytes_per_epoch", format_bytes),
        row("lake requests an epoch", "lake_requests_per_epoch", lambda n: f"{n:,}"),
        row("lake, mean rate", "lake_rate", lambda rate: f"{format_bytes(rate)}/s"),
        row("prefetch depth", "prefetch_depth", lambda steps: f"{steps:.0f} steps"),
        row("an epoch takes", "epoch_s", _duration),
    ]
    bills = [plan.bill for plan in plans]
    rows.append(("GPU-hours lost an epoch", *(f"{bill.gpu_hours_lost:.3g}" for bill in bills)))
    if has_prices:
        rows.append(("money lost an epoch", *(f"{bill.money_lost:,.2f}" for bill in bills)))
        rows.append(("disk, egress, requests a day", *(_data_money(bill) for bill in bills)))
    return rows


def _data_money(bill: Bill) -> str:
    return f"{bill.data_money_per_day:,.2f}"


def _cross_line(cross: CrossNodeReads) -> str:
    groups = f"; packed in {cross.groups} groups" if cross.groups else ""
    return (
        f"cross-node reads, {cross.nodes} nodes: with equal runs of samples {cross.shards_of_two_nodes} shards are "
        f"read by two nodes, {format_bytes(cross.cross_node_bytes)}; with whole shards none, and the fullest node has "
        f"{cross.largest_node:.3g} times the mean{groups}"
    )


def _comparison_line(compared: Comparison) -> str:
    points = 100 * (compared.predicted_au - compared.observed_au)
    return (
        f"the run itself: AU predicted {100 * compared.predicted_au:.1f} %, observed {100 * compared.observed_au:.1f} "
        f"% ({points:+.1f} points); mean wait {1000 * compared.predicted_wait_s:.3g} and "
        f"{1000 * compared.observed_wait_s:.3g} ms a step ({compared.about})"
    )


def _gpus(number: int) -> str:
    return "1 GPU" if number == 1 else f"{number:,} GPUs"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
