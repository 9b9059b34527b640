"""Benchmarks that make large files take them away, also when they are ended early."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_overlap_ended_early_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, ROOT / "benchmarks" / "overlap.py", "--quick"],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    shared, pattern = Path("/dev/shm"), f"overlap-{process.pid}-*"
    try:
        wait_until(lambda: any(shared.glob(pattern)) and any(tmp_path.glob("*/lake")), process=process)
        process.send_signal(number)
        assert process.wait(60) == 128 + number
    finally:
        process.kill()
        process.wait(10)
    assert not list(shared.glob(pattern))
    assert not list(tmp_path.iterdir())
