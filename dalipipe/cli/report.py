"""`dalipipe report RUN`."""

from __future__ import annotations

from pathlib import Path

from dalipipe.cli.output import emit
from dalipipe.cli.schema import ReportJob
from dalipipe.errors import ConfigError


def run(cfg: ReportJob, *, as_json: bool) -> int:
    """Writes one HTML file about a run."""
    from dalipipe.metrics.evidence import open_run
    from dalipipe.metrics.verdict import judge_run
    from dalipipe.report.page import render

    if not cfg.run or not Path(cfg.run).is_dir():
        raise ConfigError(f"run={cfg.run!r} is not a folder; give the run_dir of a job: dalipipe report RUN")
    folder = Path(cfg.run)
    out = Path(cfg.out) if cfg.out else folder / "report.html"
    judged = judge_run(open_run(folder), cfg.cost.prices())
    page = render(judged, folder)
    try:
        out.write_text(page)
    except OSError as error:
        raise ConfigError(f"out={out} cannot be written: {error}") from error
    emit({"out": str(out), **judged.to_json()}, f"{out}\n{judged.verdict.sentence}", as_json=as_json)
    return 0
