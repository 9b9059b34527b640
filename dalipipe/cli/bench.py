"""`dalipipe bench URL`."""

from __future__ import annotations

from dataclasses import asdict

from dalipipe.build import Loader
from dalipipe.cli.output import emit, progress, table
from dalipipe.cli.schema import BenchJob
from dalipipe.metrics.bench import run_bench
from dalipipe.units import format_bytes


def run(cfg: BenchJob, *, as_json: bool) -> int:
    """Measures the loader that the configuration describes."""
    with Loader(cfg) as loader, progress("benchmark") as report:
        result = run_bench(loader, cfg.bench, progress=report)
        device = str(loader.device)
    rows: list[tuple[object, ...]] = [
        ("images/s", f"{result.images_per_s:.0f}"),
        ("CPU s per 1,000 images", f"{result.cpu_s_per_1k:.2f}"),
        ("first batch", f"{result.first_batch_s:.2f} s"),
        ("wall", f"{result.wall_s:.2f} s for {result.images} images in {result.steps} steps"),
        ("waiting for batches", f"{result.wait_s:.2f} s"),
    ]
    if cfg.bench.step_s:
        rows.append((f"AU at {cfg.bench.step_s:g} s a step", f"{100 * result.au:.1f} %"))
    rows += [(f"bytes from {tier}", format_bytes(n)) for tier, n in result.bytes_read.items() if n]
    rows += [(f"thread seconds in {stage}", f"{s:.2f}") for stage, s in result.stage_s.items() if s >= 0.005]
    head = f"{cfg.graph.name} {cfg.graph.size} px {cfg.graph.dtype} on {device}, batch {loader.batch_size}"
    emit({"device": device, **asdict(result)}, f"{head}\n{table(rows)}", as_json=as_json)
    return 0
