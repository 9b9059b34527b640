"""Throughput of a loader, alone or before an emulated accelerator."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from dalipipe.errors import ConfigError
from dalipipe.metrics.config import BenchConfig
from dalipipe.telemetry import step

BatchTensors = Mapping[str, Any]


class BenchLoader(Protocol):
    """What a benchmark asks of a loader."""

    def __iter__(self) -> Iterator[BatchTensors]: ...

    def __len__(self) -> int: ...

    def stats(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """One benchmark run. CPU seconds are of this process with all its threads."""

    images: int
    steps: int
    wall_s: float
    first_batch_s: float
    images_per_s: float
    cpu_s_per_1k: float
    au: float
    """Accelerator utilisation: emulated compute time / wall time, the first batch excluded; 0 without `step_s`."""
    wait_s: float
    stage_s: dict[str, float]
    bytes_read: dict[str, int]


def run_bench(
    loader: BenchLoader,
    config: BenchConfig,
    *,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
    sleep: Callable[[float], None] = time.sleep,
) -> BenchResult:
    """Iterates `bench.epochs` epochs (or `bench.steps` steps of each) and measures after the warm-up.

    Raises:
        ConfigError: nothing is left to measure after the warm-up.
    """
    steps_per_epoch = min(config.steps, len(loader)) if config.steps else len(loader)
    total = steps_per_epoch * config.epochs - config.warmup_steps
    if total < 1 or config.warmup_steps < 1:
        raise ConfigError(
            f"bench.epochs={config.epochs} x {steps_per_epoch} steps leave nothing to measure after "
            f"bench.warmup_steps={config.warmup_steps} (at least 1); use more epochs or a smaller batch"
        )
    asked_at = time.perf_counter()
    first_batch_s = images = 0.0
    measuring_from = cpu_from = 0.0
    before: dict[str, Any] = {}
    for number, batch in enumerate(_batches(loader, config.epochs, steps_per_epoch)):
        if number == 0:
            first_batch_s = time.perf_counter() - asked_at
        if number >= config.warmup_steps:
            images += len(batch["id"])
        if config.step_s:
            with step("accelerator"):
                sleep(config.step_s)
        if number + 1 == config.warmup_steps:
            before, measuring_from, cpu_from = loader.stats(), time.perf_counter(), time.process_time()
        progress(number + 1, total + config.warmup_steps)
    wall_s, cpu_s = time.perf_counter() - measuring_from, time.process_time() - cpu_from
    after = loader.stats()
    return BenchResult(
        images=int(images),
        steps=total,
        wall_s=wall_s,
        first_batch_s=first_batch_s,
        images_per_s=images / wall_s,
        cpu_s_per_1k=1000 * cpu_s / images,
        au=total * config.step_s / wall_s,
        wait_s=after["wait_s"] - before["wait_s"],
        stage_s=_difference(after["stage_s"], before["stage_s"]),
        bytes_read={tier: int(n) for tier, n in _difference(after["bytes_read"], before["bytes_read"]).items()},
    )


def _batches(loader: BenchLoader, epochs: int, steps: int) -> Iterator[BatchTensors]:
    for _ in range(epochs):
        yield from itertools.islice(iter(loader), steps)


def _difference(after: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0) for name, value in after.items()}
