"""Four real processes under torchrun, killed with SIGKILL in the middle, go on as two: each sample exactly once."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from dalipipe.loader.publish import read_published
from dalipipe.order import ShuffleConfig, epoch_order
from dalipipe.shards.manifest import Manifest
from dalipipe.storage.local import LocalStore
from dalipipe.storage.store import StorageConfig
from tests.conftest import NUM_IMAGES
from tests.support.jobs import kill_job
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
BATCH_SIZE = 8
NUM_STEPS = -(-NUM_IMAGES // BATCH_SIZE)
OPTIONS = (f"loader.global_batch_size={BATCH_SIZE}", "loader.last_batch=partial", "resume=auto", "state.every_s=0")


def torchrun(num_processes: int, output: Path, *args: object) -> subprocess.Popen[bytes]:
    """Starts the job; what it prints goes to a file."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_processes}"]
    with output.open("wb") as file:
        return subprocess.Popen(
            [*launcher, str(ROOT / "tests/support/train_job.py"), *map(str, args), *OPTIONS],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            stdout=file,
            stderr=subprocess.STDOUT,
        )


def lines(logs: Path, num_processes: int) -> dict[int, dict[int, list[int]]]:
    """rank -> step -> ids, of whole lines."""
    found: dict[int, dict[int, list[int]]] = defaultdict(dict)
    for rank in range(num_processes):
        path = logs / f"{rank}-of-{num_processes}.txt"
        for line in path.read_text().splitlines() if path.exists() else ():
            epoch, step, *ids = map(int, line.split())
            assert epoch == 0
            assert step not in found[rank], "a rank got one step twice"
            found[rank][step] = ids
    return found


def global_batches(by_rank: dict[int, dict[int, list[int]]], start: int, stop: int) -> list[list[int]]:
    """The ids of each step, in order of ranks; every rank must have been there."""
    return [[i for rank in sorted(by_rank) for i in by_rank[rank][step]] for step in range(start, stop)]


@pytest.mark.timeout(300)  # seven processes that import torch, on machines with few cores
def test_killed_with_four_processes_and_resumed_with_two(packed: Path, tmp_path: Path) -> None:
    (logs := tmp_path / "logs").mkdir()
    store = LocalStore(tmp_path / "state", StorageConfig())
    kill_after = random.randrange(2, NUM_STEPS - 4)
    job = torchrun(4, output := tmp_path / "first.txt", packed, tmp_path / "cache", store.url, logs, 0.15)
    wait_until(lambda: len(lines(logs, 4)[0]) >= kill_after, output.read_text, timeout_s=120, process=job)
    kill_job(job)
    published = read_published(store)
    assert published is not None
    reached = int(published.state["step"])
    assert 0 < reached < NUM_STEPS, f"killed after step {kill_after}"

    job = torchrun(2, output := tmp_path / "second.txt", packed, tmp_path / "cache", store.url, logs, 0)
    assert job.wait(120) == 0, output.read_text()

    before, after = lines(logs, 4), lines(logs, 2)
    assert min(after[0]) == min(after[1]) == reached
    # As a trainer that goes back to its checkpoint does: what came after the state does not count.
    seen = global_batches(before, 0, reached) + global_batches(after, reached, NUM_STEPS)
    manifest = Manifest.open(LocalStore(packed, StorageConfig()).read)
    order = epoch_order(manifest.shape, epoch=0, batch_size=BATCH_SIZE, shuffle=ShuffleConfig(), last_batch="partial")
    plan = [row[row >= 0].tolist() for row in order.ids(0, order.num_steps)]
    assert seen == plan
    assert np.array_equal(np.sort(np.concatenate(seen)), np.arange(NUM_IMAGES))
    final = read_published(store)
    assert final is not None
    assert (final.state["epoch"], final.state["step"]) == (1, 0)
