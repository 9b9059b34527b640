"""`dalipipe top RUN | HOST:PORT-PORT`."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from dalipipe.cli.output import emit
from dalipipe.cli.schema import TopJob
from dalipipe.errors import ConfigError, DataError

if TYPE_CHECKING:
    from dalipipe.metrics.judgement import Verdict
    from dalipipe.metrics.snapshot import RankSnapshot


def run(cfg: TopJob, *, as_json: bool) -> int:
    """Shows what the ranks of a running job do, again and again, until Ctrl-C or `times`."""
    from rich.console import Console
    from rich.live import Live

    from dalipipe.report.view import live_view

    if not cfg.every_s >= 0.2 or cfg.times < 0:
        raise ConfigError(f"every_s={cfg.every_s} must be at least 0.2 and times={cfg.times} at least 0")
    if not cfg.run:
        raise ConfigError("which job? dalipipe top RUN_FOLDER, or dalipipe top HOST:PORT-PORT (its metrics.port)")
    look = _looker(cfg.run)
    console = Console(record=bool(cfg.svg), width=140 if cfg.svg else None, quiet=as_json)
    before, seen_s = look(), time.monotonic()
    with Live(console=console, auto_refresh=False, transient=bool(cfg.svg)) as live:
        for number in itertools.count(1):
            time.sleep(cfg.every_s)
            after, now_s = look(), time.monotonic()
            ranks, verdict = _between(before, after)
            view = live_view(ranks, now_s - seen_s, verdict, cfg.run)
            live.update(view, refresh=True)
            if as_json:
                said = verdict.kind if verdict is not None else ""
                figures = {"ranks": [asdict(rank) for rank in ranks], "seconds": now_s - seen_s}
                emit({"verdict": said, **figures}, "", as_json=True)
            if number == cfg.times:
                break
            if after != before:
                before, seen_s = after, now_s
    if cfg.svg:
        console.print(view)
        Path(cfg.svg).write_text(console.export_svg(title="dalipipe top"))
    return 0


def _looker(where: str) -> Callable[[], list[RankSnapshot]]:
    from dalipipe.metrics.live import addresses, scrape
    from dalipipe.metrics.runfolder import read_snapshots

    if Path(where).is_dir():
        return lambda: read_snapshots(Path(where))
    urls = addresses(where)
    return lambda: scrape(urls)


def _between(before: list[RankSnapshot], after: list[RankSnapshot]) -> tuple[list[RankSnapshot], Verdict | None]:
    from dalipipe.metrics.diagnosis import diagnose
    from dalipipe.metrics.evidence import run_from_snapshots
    from dalipipe.metrics.snapshot import subtract

    old = {rank.rank: rank for rank in before}
    ranks = [subtract(rank, old[rank.rank]) for rank in after if rank.rank in old]
    try:
        return ranks, diagnose(run_from_snapshots(ranks, "meanwhile"))
    except DataError:
        return ranks, None
