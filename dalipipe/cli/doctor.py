"""`dalipipe doctor [RUN | HOST:PORT-PORT | env]`."""

from __future__ import annotations

import os
from dataclasses import asdict

from dalipipe.cli.output import emit, table
from dalipipe.cli.schema import DoctorJob
from dalipipe.errors import ConfigError
from dalipipe.metrics.cost import Bill


def run(cfg: DoctorJob, *, as_json: bool) -> int:
    """Says what bounds a run, finished or live; without one, what is wrong with this host."""
    if cfg.run in ("", "env"):
        return _environment(cfg, as_json=as_json)
    from dalipipe.metrics.verdict import judge_run, load_run

    if not cfg.seconds > 0:
        raise ConfigError(f"seconds={cfg.seconds} must be above 0: how long a live job is watched")
    judged = judge_run(load_run(cfg.run, seconds=cfg.seconds), cfg.cost.prices())
    found, result = judged.verdict, judged.to_json()
    lines = [found.sentence, *(f"  because  {reason}" for reason in found.evidence), f"  next     {found.knob}", ""]
    lines += [f"where the time of {result['steps']} steps on {result['ranks']} ranks went"]
    shares = sorted(result["rows"].items(), key=lambda item: -item[1])
    lines += [table([(row, f"{100 * share:.1f} %") for row, share in shares]), "", *bill_lines(judged.bill)]
    emit(result, "\n".join(lines), as_json=as_json)
    return 0


def bill_lines(bill: Bill) -> list[str]:
    """The bill as lines of text."""
    lines = [
        f"waiting for data cost {bill.gpu_hours_lost:.3g} of {bill.gpu_hours:.3g} GPU-hours "
        f"({100 * bill.stall_share:.1f} %; against {bill.baseline})"
    ]
    rows: list[tuple[object, ...]] = [("a day, as this run goes", *(f"{fleet:,} GPUs" for fleet in bill.per_day))]
    rows.append(("GPU-hours lost", *(f"{hours:,.0f}" for hours in bill.gpu_hours_lost_per_day.values())))
    if bill.money_lost or any(bill.per_day.values()):
        rows.append(("money lost", *(f"{money:,.0f}" for money in bill.per_day.values())))
        rows.append(("less disk, egress, requests", *(f"{money:,.0f}" for money in bill.net_per_day.values())))
    lines.append(table(rows))
    if not any(bill.per_day.values()) and bill.stall_share > 0:
        lines.append("  in money: give cost.gpu_hour=PRICE")
    return lines


def _environment(cfg: DoctorJob, *, as_json: bool) -> int:
    from dalipipe.metrics.environment import describe_environment

    report = describe_environment(
        environ=os.environ, cache_dir=cfg.cache.dir, url=cfg.data.url, storage=cfg.storage, probe_torch=cfg.torch
    )
    result = {"healthy": report.healthy, "facts": report.facts, "findings": [asdict(f) for f in report.findings]}
    emit(result, report.text(), as_json=as_json)
    return 0 if report.healthy else 1
