"""The ledger through processes: four ranks under torchrun, one of them slow."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dalipipe.metrics.diagnosis import diagnose
from dalipipe.metrics.evidence import open_run

_ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_one_slow_rank_of_four_processes_is_named(packed: Path, tmp_path: Path) -> None:
    job = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    job += [str(Path(__file__).with_name("ranks_job.py")), str(packed), str(tmp_path), "40", "2"]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(_ROOT), *filter(None, sys.path)])}
    subprocess.run(job, check=True, timeout=280, env=environ, cwd=_ROOT)
    run = open_run(tmp_path / "run")
    assert [rank.rank for rank in run.ranks] == [0, 1, 2, 3]
    for rank in run.steps:  # the books of every process close
        for number in range(len(rank.wall_s)):
            rows = sum(float(row[number]) for row in (*rank.waits.values(), *rank.phases.values()))
            assert rows == pytest.approx(float(rank.wall_s[number]), abs=1e-6)
        assert np.median(rank.phases["other"] / rank.wall_s) <= 0.03
    verdict = diagnose(run)
    assert verdict.kind == "straggler", verdict
    assert "rank 2" in verdict.sentence
    assert "forward" in verdict.sentence
