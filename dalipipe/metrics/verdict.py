"""A run, its diagnosis and its bill together, as `doctor` and `report` show them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dalipipe.metrics.cost import Bill, make_bill
from dalipipe.metrics.diagnosis import diagnose
from dalipipe.metrics.evidence import Run, open_run, run_from_snapshots
from dalipipe.metrics.judgement import Verdict
from dalipipe.metrics.live import addresses, watch_for


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What `doctor` says of a run."""

    run: Run
    verdict: Verdict
    bill: Bill

    def to_json(self) -> dict[str, Any]:
        """A JSON-able dictionary."""
        run = self.run
        return {
            "verdict": self.verdict.kind,
            **{name: value for name, value in asdict(self.verdict).items() if name != "kind"},
            "source": run.source,
            "ranks": len(run.ranks),
            "steps": run.num_steps,
            "step_s": max(rank.wall_s / max(1, rank.num_steps) for rank in run.ranks),
            "rows": {row: run.share(row) for row in run.rows()},
            "stall_share": run.stall_share(),
            "bill": asdict(self.bill),
        }


def load_run(where: str, *, seconds: float) -> Run:
    """The run in the folder `where`, or the one behind the metrics ports `where`, watched for `seconds`.

    Raises:
        ConfigError: neither a folder nor an address.
        DataError: nothing to judge there.
    """
    if Path(where).is_dir():
        return open_run(Path(where))
    return run_from_snapshots(watch_for(addresses(where), seconds), source=where)


def judge_run(run: Run, prices: Mapping[str, float]) -> Judgement:
    """Diagnosis and bill; prices that are given (above 0) go before those that the run was started with."""
    known = dict(run.fact("prices") or {})
    known |= {name: value for name, value in prices.items() if value > 0}
    if not known.get("gpu_hour"):
        known["gpu_hour"] = float(run.fact("gpu_hour", 0.0) or 0.0)
    wall_s = max(rank.wall_s for rank in run.ranks)
    bill = make_bill(
        gpus=len(run.ranks),
        wall_s=wall_s,
        num_steps=max(rank.num_steps for rank in run.ranks),
        stall_share=run.stall_share(),
        prices=known,
        lake_bytes=run.counter("bytes_read.lake"),
        lake_requests=run.counter("lake_requests.read") + run.counter("lake_requests.head"),
        cache_bytes=run.counter("bytes_written.node"),
        synthetic_step_s=run.synthetic_step_s,
    )
    return Judgement(run=run, verdict=diagnose(run), bill=bill)
