"""The trainer's rows without marks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import dalipipe as dp
from dalipipe.metrics.profiled import ProfiledPhases, phase_shares
from dalipipe.telemetry import Recorder, Stage, StepBook, phases


def test_an_instant_belongs_to_one_phase_and_the_rarer_one_wins() -> None:
    events = [
        ("aten::linear", 1, 0.0, 4.0),
        ("aten::addmm", 1, 1.0, 3.0),  # inside of it
        ("autograd::engine::evaluate_function: AddmmBackward0", 2, 4.0, 7.0),
        ("aten::mm", 2, 5.0, 6.0),
        ("gloo:all_reduce", 2, 6.0, 8.0),
        ("Optimizer.step#AdamW.step", 1, 8.0, 9.0),
        ("aten::mul_", 1, 8.2, 8.8),
        ("aten::item", 1, 9.9, 10.0),
    ]
    assert phase_shares(events) == pytest.approx(
        {"forward": 0.41, "backward": 0.2, "collective": 0.2, "optimiser": 0.1}
    )
    assert phase_shares([]) == {}


def test_the_profiler_splits_a_real_training_step() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
    optimiser = torch.optim.AdamW(net.parameters())
    book = StepBook()
    book.on_boundary = ProfiledPhases(every=100).boundary
    for number in range(14):
        book.ask()
        book.got(epoch=0, step=number, samples=64, waits={})
        optimiser.zero_grad()
        net(torch.randn(64, 256)).sum().backward()
        optimiser.step()
    book.leave()
    early, late = book.after(0)[3], book.after(0)[-1]
    assert set(early.phases) == {"other"}  # nothing was looked at yet
    assert {"forward", "backward", "optimiser", "other"} <= set(late.phases)
    assert all(seconds > 0 for seconds in late.phases.values())
    assert sum(late.rows.values()) == pytest.approx(late.wall_s)


def test_a_loader_asks_the_profiler_when_told_to(packed: Path, tmp_path: Path) -> None:
    weight = torch.randn(300, 300, requires_grad=True)
    words = [f"data.url={packed}", f"cache.dir={tmp_path}", "graph.size=32", "device=cpu", "loader.batch_size=8"]
    with dp.load("train", [*words, "metrics.phases=profiler", "metrics.profile_every=10"]) as loader:
        for _batch in loader:
            (weight @ weight).sum().backward()
        rows = loader.steps.after(0)
    assert {"forward", "backward"} <= set(rows[-1].phases)
    assert sum(rows[-1].rows.values()) == pytest.approx(rows[-1].wall_s, abs=1e-6)


def test_spans_and_marks_open_and_close_ranges_of_a_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    ranges = (lambda name: seen.append(f"+{name}"), lambda: seen.append("-"))
    recorder = Recorder()
    recorder.ranges = ranges
    monkeypatch.setattr(phases, "_ranges", ranges)
    with dp.step("forward"), recorder.span(Stage.DECODE):
        pass
    assert seen == ["+forward", "+dalipipe.decode", "-", "-"]
