"""The report of a run: one HTML file without references to anything outside."""

from __future__ import annotations

import html
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from dalipipe.metrics.cost import Bill
from dalipipe.metrics.evidence import RankSteps, Run
from dalipipe.metrics.runfolder import read_json_lines
from dalipipe.metrics.verdict import Judgement
from dalipipe.report.svg import Array, bars, binned, lines, stacked
from dalipipe.units import format_bytes

_BINS = 240
_MOST_RANKS = 64
_PHASES = ("forward", "backward", "collective", "optimiser", "other")
_STYLE = """
:root{--ink:#1f2933;--soft:#616e7c;--line:#e4e7eb;--good:#2f8132;--bad:#b44d12}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);max-width:980px;margin:32px auto;padding:0 16px}
h1{font-size:22px;margin:0 0 4px} h2{font-size:17px;margin:36px 0 8px} .soft{color:var(--soft)}
.verdict{border-left:6px solid var(--bad);background:#fdf6f0;padding:14px 18px;margin:18px 0;border-radius:4px}
.verdict.healthy{border-color:var(--good);background:#f1f8f1} .verdict b{font-size:17px}
.verdict ul{margin:8px 0 8px 18px;padding:0}
table{border-collapse:collapse;margin:8px 0}
th,td{padding:4px 14px 4px 0;text-align:right;border-bottom:1px solid var(--line)}
th:first-child,td:first-child{text-align:left} th{color:var(--soft);font-weight:500}
svg{display:block;max-width:100%;height:auto} svg text{font:11px system-ui,sans-serif;fill:var(--soft)}
.grid{stroke:var(--line)} .legend{display:flex;flex-wrap:wrap;gap:4px 14px;font-size:12px;color:var(--soft)}
.legend i{display:inline-block;width:10px;height:10px;margin-right:5px;border-radius:2px}
.pair{display:grid;grid-template-columns:1fr 1fr;gap:12px 24px}
.pair h3{font-size:14px;margin:12px 0 2px;font-weight:600}
.figures{display:flex;gap:34px;margin:14px 0} .figures div b{display:block;font-size:22px;font-weight:600}
@media (max-width:800px){.pair{grid-template-columns:1fr}}
"""


def render(judged: Judgement, folder: Path) -> str:
    """The page of a judged run whose folder is `folder`."""
    run = judged.run
    series = {rank.rank: read_json_lines(folder / "series" / f"rank-{rank.rank:05d}.jsonl") for rank in run.ranks}
    events = [line for line in read_json_lines(folder / "events.jsonl") if line.get("event") == "warning"]
    first = run.ranks[0]
    ranks = f"{len(run.ranks)} {'rank' if len(run.ranks) == 1 else 'ranks'}"
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(first.at))
    made_by = f"{first.facts.get('device', '?')}, dalipipe {first.facts.get('version', '?')}"
    about = f"{ranks}, {run.num_steps:,} steps, {made_by}, {when}"
    parts = [
        f"<h1>Run {html.escape(folder.resolve().name)}</h1><div class=soft>{html.escape(about)}</div>",
        _verdict(judged),
        _headline(judged),
        "<h2>Where the time of a step goes</h2>",
        _steps(run),
        "<h2>Tails</h2>",
        _tails(run),
        "<h2>Over time</h2>",
        f'<div class="pair">{_over_time(run, series)}</div>',
        *(["<h2>Ranks</h2>", _ranks(run)] if len(run.ranks) > 1 else []),
        "<h2>What waiting costs</h2>",
        _bill(judged.bill),
        *(["<h2>Warnings</h2>", _events(events)] if events else []),
    ]
    title = html.escape(f"dalipipe: {folder.resolve().name}")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def _verdict(judged: Judgement) -> str:
    found = judged.verdict
    reasons = "".join(f"<li>{html.escape(reason)}</li>" for reason in found.evidence)
    healthy = " healthy" if found.kind == "healthy" else ""
    return (
        f'<div class="verdict{healthy}"><b>{html.escape(found.sentence)}</b><ul>{reasons}</ul>'
        f"Next: {html.escape(found.knob)}</div>"
    )


def _headline(judged: Judgement) -> str:
    run = judged.run
    wall_s = max(rank.wall_s for rank in run.ranks)
    step_s = max(float(rank.wall_s.mean()) for rank in run.steps)
    figures = [
        ("AU", f"{100 * (1 - judged.bill.stall_share):.1f} %"),
        ("samples/s", f"{run.counter('samples') / wall_s:,.0f}"),
        ("mean step", _milliseconds(step_s)),
        ("from the lake", format_bytes(int(run.counter("bytes_read.lake")))),
        ("bad samples", f"{run.counter('quarantined'):,.0f}"),
    ]
    cells = "".join(
        f'<div><b>{html.escape(value)}</b><span class="soft">{name}</span></div>' for name, value in figures
    )
    return f'<div class="figures">{cells}</div>'


def _steps(run: Run) -> str:
    """The rank that waits longest, its steps in order."""
    place = max(range(len(run.steps)), key=lambda at: float(run.steps[at].waited_s.sum()))
    rank, which = run.steps[place], run.ranks[place].rank
    rows = {name: binned(values, _BINS) for name, values in _ordered(rank).items()}
    note = f'<div class="soft">Milliseconds a step of rank {which}; warm colours are waits for data.</div>'
    points = binned(np.arange(len(rank.wall_s), dtype=np.float64), _BINS)
    return note + stacked(points, rows, y_unit=_milliseconds, x_label="step")


def _tails(run: Run) -> str:
    names = [name for name in run.rows() if run.share(name) >= 0.001]
    head = "".join(f"<th>{name}</th>" for name in ("mean", "p50", "p95", "p99", "longest", "share"))
    body = []
    for name in ("step", *sorted(names, key=lambda row: -run.share(row))):
        values = np.concatenate([_column(rank, name) for rank in run.steps])
        figures = [values.mean(), *np.quantile(values, [0.5, 0.95, 0.99]), values.max()]
        share = 1.0 if name == "step" else run.share(name)
        cells = "".join(f"<td>{_milliseconds(float(value))}</td>" for value in figures)
        body.append(f"<tr><td>{html.escape(name)}</td>{cells}<td>{100 * share:.1f} %</td></tr>")
    steps = np.concatenate([rank.wall_s for rank in run.steps])
    waits = np.concatenate([rank.waited_s for rank in run.steps])
    shares = np.linspace(0, 100, 101)
    plot = lines(
        {
            "step": (shares, np.quantile(steps, shares / 100)),
            "wait for data": (shares, np.quantile(waits, shares / 100)),
        },
        y_unit=_milliseconds,
        x_label="percentile",
        width=960,
    )
    return f"<table><tr><th></th>{head}</tr>{''.join(body)}</table>{plot}"


def _ordered(rank: RankSteps) -> dict[str, Array]:
    """Rows that are at least a thousandth of the time: phases as a step goes through them, then waits."""
    rows = {**rank.phases, **rank.waits}
    names = sorted(rows, key=lambda name: _PHASES.index(name) if name in _PHASES else len(_PHASES))
    return {name: rows[name] for name in names if rows[name].sum() >= 0.001 * rank.wall_s.sum()}


def _column(rank: RankSteps, name: str) -> Array:
    if name == "step":
        return rank.wall_s
    zero = np.zeros_like(rank.wall_s)
    return rank.waits.get(name, zero) + rank.phases.get(name, zero)


def _over_time(run: Run, series: Mapping[int, Sequence[Mapping[str, Any]]]) -> str:
    first = min((line["at"] for found in series.values() for line in found), default=0.0)
    longest = max(series, key=lambda rank: len(series[rank]))
    found = series[longest]

    def gauge(name: str) -> tuple[Array, Array]:
        kept = [(line["at"] - first, line["gauges"][name]) for line in found if name in line["gauges"]]
        return _pair(kept)

    def rate(names: Sequence[str]) -> tuple[Array, Array]:
        points = [(line["at"] - first, sum(line["counters"].get(name, 0.0) for name in names)) for line in found]
        steps = pairwise(points)
        return _pair([(b[0], (b[1] - a[1]) / (b[0] - a[0])) for a, b in steps if b[0] - a[0] > 0.05])

    def hits(near: Sequence[str], far: Sequence[str]) -> tuple[Array, Array]:
        points = []
        for line in found:
            close = sum(value for name, value in line["counters"].items() if name.startswith(tuple(near)))
            away = sum(line["counters"].get(name, 0.0) for name in far)
            if close + away:
                points.append((line["at"] - first, close / (close + away)))
        return _pair(points)

    tiers = sorted({name for line in found for name in line["counters"] if name.startswith("bytes_read.")})
    read = {name.partition(".")[2]: rate([name]) for name in tiers if not name.endswith(".index")}
    near_bytes = [name for name in tiers if not name.endswith((".lake", ".index"))]
    rank = run.steps[0]
    busy = binned(1 - rank.waited_s / np.maximum(rank.wall_s, 1e-9), _BINS)
    number = binned(np.arange(len(rank.wall_s), dtype=np.float64), _BINS)
    seconds = "seconds"
    plots = [
        ("Utilisation of the accelerator", lines({"AU": (number, busy)}, y_unit=_percent, x_label="step")),
        ("Samples per second", lines({"samples": rate(["samples"])}, y_unit=_count, x_label=seconds)),
        (
            "Queues",
            lines(
                {"batches ready": gauge("batches_ready"), "prefetch depth (steps)": gauge("prefetch_depth")},
                y_unit=_count,
                x_label=seconds,
            ),
        ),
        (
            "Hit ratio so far",
            lines(
                {
                    "blocks": hits(["blocks_hit."], ["blocks_missed"]),
                    "bytes": hits(near_bytes or ["-"], ["bytes_read.lake"]),
                },
                y_unit=_percent,
                x_label=seconds,
            ),
        ),
        ("Bytes read per second, by tier", lines(read, y_unit=_size, x_label=seconds)),
        (
            "CPUs in use",
            lines(
                {"process": rate(["cpu_s.process"]), "decode threads": rate(["cpu_s.decode"])},
                y_unit=lambda value: f"{value:.1f}",
                x_label=seconds,
            ),
        ),
    ]
    return "".join(f"<div><h3>{name}</h3>{plot}</div>" for name, plot in plots)


def _pair(points: Sequence[tuple[float, float]]) -> tuple[Array, Array]:
    table = np.array(points, np.float64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def _ranks(run: Run) -> str:
    rows = {
        f"rank {snapshot.rank}": {name: float(values.mean()) for name, values in _ordered(rank).items()}
        for snapshot, rank in list(zip(run.ranks, run.steps, strict=True))[:_MOST_RANKS]
    }
    more = (
        f'<p class="soft">the first {_MOST_RANKS} of {len(run.ranks)} ranks</p>' if len(run.ranks) > _MOST_RANKS else ""
    )
    return bars(rows, unit=_milliseconds) + more


def _bill(bill: Bill) -> str:
    fleets = list(bill.per_day)
    head = "".join(f"<th>{fleet:,} GPUs</th>" for fleet in fleets)
    rows = [("GPU-hours lost a day", [f"{value:,.1f}" for value in bill.gpu_hours_lost_per_day.values()])]
    if any(bill.per_day.values()):
        rows.append(("money lost a day", [f"{value:,.0f}" for value in bill.per_day.values()]))
        rows.append(("less disk, egress and requests", [f"{value:,.0f}" for value in bill.net_per_day.values()]))
    body = "".join(
        f"<tr><td>{name}</td>{''.join(f'<td>{value}</td>' for value in values)}</tr>" for name, values in rows
    )
    said = (
        f"This run lost {bill.gpu_hours_lost:.3g} of {bill.gpu_hours:.3g} GPU-hours ({100 * bill.stall_share:.1f} %), "
        f"against {bill.baseline}."
    )
    return f"<table><tr><th></th>{head}</tr>{body}</table><p class=soft>{html.escape(said)}</p>"


def _events(events: Sequence[Mapping[str, Any]]) -> str:
    items = "".join(f"<li>{html.escape(str(line.get('message', '')))}</li>" for line in events[-20:])
    return f"<ul>{items}</ul>"


def _milliseconds(value: float) -> str:
    return f"{1000 * value:,.1f} ms" if value < 0.1 else f"{1000 * value:,.0f} ms"


def _percent(value: float) -> str:
    return f"{100 * value:.0f} %"


def _count(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.1f}"


def _size(value: float) -> str:
    return f"{format_bytes(int(value))}/s"
