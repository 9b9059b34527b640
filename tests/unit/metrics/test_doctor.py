"""Each verdict on a run that suffers from that very thing, and no other."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from dalipipe.engines.cpus import default_workers
from dalipipe.metrics.diagnosis import diagnose
from dalipipe.metrics.evidence import open_run
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
