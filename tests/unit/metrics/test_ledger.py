"""The books close: every second is in one row."""

from __future__ import annotations

from typing import Any

import pytest

from dalipipe.errors import ConfigError
from dalipipe.metrics.bench import run_bench
from dalipipe.metrics.config import BenchConfig
from dalipipe.metrics.ledger import StepLedger


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_rows_sum_to_wall_and_each_second_has_one_row() -> None:
    clock, waits = Clock(), {"lake": 0.0, "decode": 0.0}
    ledger = StepLedger(lambda: {"wait_by_s": dict(waits)}, clock=clock)
    waits["lake"] = 5.0  # before the start: not ours
    ledger.start()
    for _ in range(4):
        waits["lake"] += 0.5
        waits["decode"] += 0.25
        clock.now_s += 0.75
        with ledger.phase("forward"):
            clock.now_s += 1.0
        clock.now_s += 0.125
        ledger.step_done(8)
    report = ledger.stop()
    assert report.rows == {"wait: lake": 2.0, "wait: decode": 1.0, "forward": 4.0, "other": 0.5}
    assert sum(report.rows.values()) == report.wall_s == 7.5
    assert report.samples_per_s == 32 / 7.5


class FakeLoader:
    def __init__(self) -> None:
        self.waited_s = 0.0

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Any:
        for _ in range(4):
            self.waited_s += 1.0
            yield {"id": [0, 1, 2]}

    def stats(self) -> dict[str, Any]:
        return {"wait_s": self.waited_s, "stage_s": {"decode": 2 * self.waited_s}, "bytes_read": {"lake": 7}}


def test_bench_measures_after_the_warm_up() -> None:
    slept: list[float] = []
    result = run_bench(FakeLoader(), BenchConfig(epochs=2, warmup_steps=3, step_s=0.25), sleep=slept.append)
    assert (result.steps, result.images) == (5, 15)
    assert result.wait_s == 5.0
    assert result.stage_s == {"decode": 10.0}
    assert result.bytes_read == {"lake": 0}
    assert slept == [0.25] * 8
    with pytest.raises(ConfigError, match="nothing to measure"):
        run_bench(FakeLoader(), BenchConfig(epochs=1, warmup_steps=4))
