"""`dalipipe spin URL`."""

from __future__ import annotations

import time
from dataclasses import asdict

from dalipipe.build import Loader
from dalipipe.cli.output import emit, table
from dalipipe.cli.schema import BenchJob
from dalipipe.errors import ConfigError
from dalipipe.metrics.bench import idle_spin, run_bench


def run(cfg: BenchJob, *, as_json: bool) -> int:
    """Runs the emulated step on the loader, then on batches held in memory: the second is the bound of the first."""
    if cfg.bench.step_s <= 0:
        raise ConfigError("spin replays an emulated step: give its length with bench.step_s=SECONDS")
    with Loader(cfg) as loader:
        fed = run_bench(loader, cfg.bench)
        bound = idle_spin(
            loader,
            lambda _batch: time.sleep(cfg.bench.step_s),
            num_batches=cfg.bench.spin_batches,
            num_steps=fed.steps,
        )
    share = fed.images_per_s / bound.images_per_s
    rows = [
        ("with the loader", f"{fed.images_per_s:.0f} images/s"),
        ("batches in memory", f"{bound.images_per_s:.0f} images/s"),
        ("share of the bound", f"{100 * share:.1f} %"),
    ]
    emit({"loader": asdict(fed), "spin": asdict(bound), "share": share}, table(rows), as_json=as_json)
    return 0
