"""What only a GPU can show of the ledger."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

import dalipipe as dp
from dalipipe.metrics.runfolder import read_snapshots

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_a_watched_run_on_a_gpu_samples_it_and_shows_ranges(packed: Path, tmp_path: Path) -> None:
    words = [f"data.url={packed}", f"cache.dir={tmp_path / 'cache'}", f"run_dir={tmp_path / 'run'}"]
    words += ["loader.batch_size=16", "metrics.every_s=0.5", "device=cuda:0"]
    weight = torch.randn(2048, 2048, device="cuda")
    with dp.load("train", words) as loader:
        until_s = time.monotonic() + 4
        while time.monotonic() < until_s:
            for _batch in loader:
                with dp.step("forward"):
                    (weight @ weight).sum().item()
        assert loader._recorder.ranges is not None  # NVTX
    snapshot = read_snapshots(tmp_path / "run")[0]
    assert 0 < snapshot.gauges["gpu_utilization"] <= 1
    assert snapshot.gauges["gpu_memory_used"] > 0
