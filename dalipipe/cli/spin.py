"""`dalipipe spin URL`."""

from __future__ import annotations

import time
from dataclasses import asdict

from dalipipe.build import Loader
from dalipipe.cli.output import emit, table
from dalipipe.cli.schema import BenchJob
from dalipipe.errors import ConfigError
from dalipipe.metrics.cost import make_bill
from dalipipe.metrics.spin import spin


def run(cfg: BenchJob, *, as_json: bool) -> int:
    """Runs the emulated step on the loader, on batches in memory and on made-up data: the last two bound the first."""
    if cfg.bench.step_s <= 0:
        raise ConfigError("spin replays an emulated step: give its length with bench.step_s=SECONDS")
    prices = cfg.cost.prices()
    with Loader(cfg) as loader:
        num_steps = cfg.bench.steps or len(loader) * cfg.bench.epochs
        found = spin(
            loader,
            lambda _batch: time.sleep(cfg.bench.step_s),
            num_steps=num_steps,
            num_batches=cfg.bench.spin_batches,
            run_dir=cfg.run_dir,
        )
        batch, gpus = loader.batch_size, loader.global_batch_size // loader.batch_size
    bill = make_bill(
        gpus=gpus,
        wall_s=found.loader_step_s * num_steps,
        num_steps=num_steps,
        stall_share=0.0,
        synthetic_step_s=found.synthetic_step_s,
        prices=prices,
    )
    rows: list[tuple[object, ...]] = [("", "ms a step", "images/s")]
    for name, step_s in (
        ("with the loader", found.loader_step_s),
        ("batches in memory", found.spin_step_s),
        ("no loader at all", found.synthetic_step_s),
    ):
        rows.append((name, f"{1000 * step_s:.2f}", f"{batch / step_s:.0f}"))
    lines = [table(rows), f"the loader costs {found.gap_points:.1f} points of utilisation"]
    if cfg.cost.gpu_hour:
        per_day = ", ".join(f"{money:,.0f} on {fleet:,}" for fleet, money in bill.per_day.items())
        lines.append(f"in money a day: {per_day} GPUs")
    else:
        lines.append("in money: give cost.gpu_hour=PRICE")
    result = {
        **asdict(found),
        "images_per_s": batch / found.loader_step_s,
        "share": found.spin_step_s / found.loader_step_s,
        "au": found.au,
        "gap_points": found.gap_points,
    }
    emit({**result, "bill": asdict(bill)}, "\n".join(lines), as_json=as_json)
    return 0
