"""Each verdict on a run that suffers from that very thing, and no other."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from dalipipe.engines.cpus import default_workers
from dalipipe.metrics.diagnosis import diagnose
from dalipipe.metrics.evidence import RankSteps, Run, open_run
from dalipipe.metrics.snapshot import RankSnapshot
from tests.support.conditions import CONDITIONS, Sets, make_sets, run_condition

_NEEDS_CPUS = ("num-threads",)


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Sets:
    return make_sets(tmp_path_factory.mktemp("sets"))


@pytest.mark.parametrize("kind", CONDITIONS)
def test_a_condition_gets_its_own_sentence(kind: str, sets: Sets, tmp_path: Path) -> None:
    if kind in _NEEDS_CPUS and default_workers() < 2:
        pytest.skip("one decode thread is right on one CPU")
    verdict = diagnose(open_run(run_condition(kind, sets, tmp_path / "job", seed=0)))
    assert verdict.kind == kind, verdict
    assert verdict.knob


def made_up(own_s: list[float], *, wait_s: float = 0.0, row: str = "lake") -> Run:
    """A run of one rank with these steps, without running it."""
    wall = np.array(own_s) + wait_s
    snapshot = RankSnapshot(rank=0, world_size=1, num_steps=len(own_s), wall_s=float(wall.sum()))
    steps = RankSteps(
        wall_s=wall,
        waits={row: np.full(len(own_s), wait_s)},
        phases={"forward": np.array(own_s)},
        lake_bytes=np.zeros(len(own_s)),
        epoch=np.zeros(len(own_s), np.int64),
        key=np.arange(len(own_s)),
    )
    return Run(ranks=[snapshot], steps=[steps], num_steps=len(own_s))


def test_a_few_long_steps_are_the_trainers() -> None:
    assert diagnose(made_up([0.1] * 100)).kind == "healthy"
    assert diagnose(made_up([0.1] * 95 + [0.19] * 5)).kind == "healthy"  # jitter
    found = diagnose(made_up([0.1] * 99 + [5.0]))  # a checkpoint, say
    assert found.kind == "trainer-bound"
    assert "longest 5,000 ms" in " ".join(found.evidence)


@pytest.mark.parametrize(
    ("row", "kind"),
    [("lake", "lake-bound"), ("plan", "lake-bound"), ("pool", "pool-bound"), ("node", "nvme-bound"),
     ("memory", "nvme-bound"), ("decode", "decode-bound"), ("handover", "hand-over-bound")],
)  # fmt: skip
def test_waits_count_from_5_percent_on(row: str, kind: str) -> None:
    assert diagnose(made_up([0.1] * 50, wait_s=0.004, row=row)).kind == "healthy"
    assert diagnose(made_up([0.1] * 50, wait_s=0.006, row=row)).kind == kind


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_confusion_matrix_is_diagonal(sets: Sets, tmp_path: Path) -> None:
    """All conditions x 5 seeds: at least 95 % on the diagonal."""
    found = Counter[tuple[str, str]]()
    for kind in CONDITIONS:
        for seed in range(1, 6):
            verdict = diagnose(open_run(run_condition(kind, sets, tmp_path / "job", seed=seed)))
            found[kind, verdict.kind] += 1
    print(json.dumps({f"{told} -> {said}": count for (told, said), count in found.items()}, indent=1))
    right = sum(count for (told, said), count in found.items() if told == said)
    assert right >= 0.95 * sum(found.values()), found
