"""The live view of a job as something that rich draws."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from dalipipe.metrics.judgement import Verdict
from dalipipe.metrics.snapshot import RankSnapshot
from dalipipe.report.svg import color_of
from dalipipe.units import format_bytes

_BAR = 28
_MOST_RANKS = 32


def live_view(ranks: Sequence[RankSnapshot], seconds: float, verdict: Verdict | None, source: str) -> RenderableType:
    """What each rank did in the last `seconds`: `ranks` hold differences of two looks."""
    table = Table(expand=True, box=None, pad_edge=False, header_style="dim")
    for name in ("rank", "steps/s", "samples/s", "step", "AU"):
        table.add_column(name, justify="right")
    table.add_column("where the time goes", width=_BAR)
    for name in ("ready", "depth", "hits", "lake/s", "CPUs", "bad"):
        table.add_column(name, justify="right")
    for rank in ranks[:_MOST_RANKS]:
        table.add_row(*_row(rank, seconds))
    if len(ranks) > _MOST_RANKS:
        table.add_row(f"… {len(ranks) - _MOST_RANKS} more")
    names = list(dict.fromkeys(name for rank in ranks for name, share in _shares(rank).items() if share >= 0.01))
    key = Text("  ").join(Text.assemble(("■ ", color_of(name, place)), name) for place, name in enumerate(names))
    said = verdict.sentence if verdict is not None else "no step was finished meanwhile"
    healthy = verdict is not None and verdict.kind == "healthy"
    parts: list[RenderableType] = [Text(said, style="bold green" if healthy else "bold yellow")]
    if verdict is not None and not healthy:
        parts.append(Text(f"next: {verdict.knob}", style="dim"))
    return Panel(Group(*parts, Text(), table, Text(), key), title=f"dalipipe top  {source}", border_style="dim")


def _row(rank: RankSnapshot, seconds: float) -> list[RenderableType]:
    counters, shares = rank.counters, _shares(rank)
    waits = {name.removeprefix("wait_s.") for name in counters if name.startswith("wait_s.")}
    stall = sum(share for name, share in shares.items() if name in waits)
    near = sum(value for name, value in counters.items() if name.startswith("blocks_hit."))
    asked = near + counters.get("blocks_missed", 0.0)
    step = f"{1000 * rank.wall_s / rank.num_steps:.0f} ms" if rank.num_steps else "-"
    style = "green" if stall < 0.05 else "yellow" if stall < 0.2 else "red"
    return [
        str(rank.rank),
        f"{rank.num_steps / seconds:.1f}",
        f"{counters.get('samples', 0.0) / seconds:,.0f}",
        step,
        Text(f"{100 * (1 - stall):.0f} %", style=style) if rank.num_steps else "-",
        _bar(shares),
        f"{rank.gauges.get('batches_ready', 0):.0f}",
        f"{rank.gauges.get('prefetch_depth', 0):.0f}",
        f"{100 * near / asked:.0f} %" if asked else "-",
        format_bytes(int(counters.get("bytes_read.lake", 0.0) / seconds)),
        f"{counters.get('cpu_s.process', 0.0) / seconds:.1f}",
        f"{counters.get('quarantined', 0.0):.0f}",
    ]


def _shares(rank: RankSnapshot) -> dict[str, float]:
    total = sum(rank.rows.values())
    return {name: seconds / total for name, seconds in rank.rows.items()} if total > 0 else {}


def _bar(shares: dict[str, float]) -> Text:
    bar = Text()
    for place, (name, share) in enumerate(shares.items()):
        bar.append("█" * round(_BAR * share), style=color_of(name, place))
    return bar
