"""The ledger closes, and a delay is charged to where it was."""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from unittest import mock

import pytest

import dalipipe as dp
from dalipipe.errors import ConfigError
from dalipipe.telemetry import Causes, Recorder, Stage, StepBook, StepRow
from tests.support.conditions import slow_calls
from tests.support.host import slowness
from tests.support.webserver import WebServer

_DELAY_S = 0.1


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_wait_is_split_by_what_the_other_thread_did() -> None:
    clock = Clock()
    causes = Causes("decode", clock=clock)
    for cause, until_s in (("decode", 1.0), ("lake", 3.0), ("handover", 3.5), ("decode", 10.0)):
        causes.enter(cause)
        clock.now_s = until_s
    assert causes.charge(0.5, 4.0) == pytest.approx({"decode": 1.0, "lake": 2.0, "handover": 0.5})
    assert causes.charge(4.0, 4.0) == {}
    causes.fill("pool", 7.0)  # known at its end only
    clock.now_s = 12.0
    assert causes.charge(5.0, 11.0) == pytest.approx({"decode": 3.0, "pool": 3.0})


def test_spans_of_a_followed_thread_are_its_causes_and_those_of_others_are_not() -> None:
    recorder, causes = Recorder(), Causes("decode")

    def feeder() -> None:
        recorder.follow(causes)
        with recorder.span(Stage.LAKE):
            time.sleep(0.02)
        with recorder.lacking("pool"):
            time.sleep(0.02)

    began_s = time.perf_counter()
    with recorder.span(Stage.HANDOVER):
        thread = threading.Thread(target=feeder)
        thread.start()
        thread.join()
    charged = causes.charge(began_s, time.perf_counter())
    assert set(charged) <= {"decode", "lake", "pool"}
    assert charged["lake"] >= 0.02
    assert charged["pool"] >= 0.02
    assert recorder.snapshot()["stage_s.lake"] >= 0.02


def test_marks_nest_and_the_loader_inside_a_mark_is_not_the_marks() -> None:
    book = StepBook()
    book.ask()
    book.got(epoch=0, step=0, samples=1, waits={"lake": 0.0})
    with dp.step("forward"):
        time.sleep(0.01)
        with dp.step("collective"):
            time.sleep(0.02)
        time.sleep(0.01)
    with dp.step("fetching"):  # a mark around the request for the next batch
        book.ask()
        time.sleep(0.03)
        book.got(epoch=0, step=1, samples=1, waits={"lake": 0.03})
    book.leave()
    first, second = book.after(0)
    assert 0.02 <= first.phases["forward"] < first.phases["collective"] + 0.02
    assert first.phases["collective"] >= 0.02
    assert second.phases.get("fetching", 0.0) < 0.01
    assert second.waits["lake"] == 0.03
    for row in (first, second):
        assert sum(row.rows.values()) == pytest.approx(row.wall_s)


@pytest.mark.parametrize("name", ["lake", "other", "two words", ""])
def test_marks_that_would_count_twice_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="step"):
        dp.step(name)


def test_bytes_that_come_while_a_batch_is_waited_for_are_in_its_row() -> None:
    read = {"bytes": 0}
    book = StepBook(lambda: read["bytes"])
    for step in range(3):
        book.ask()
        read["bytes"] += 100  # meanwhile
        book.got(epoch=0, step=step, samples=1, waits={})
        read["bytes"] += 10
    book.leave()
    assert [row.lake_bytes for row in book.after(0)] == [110, 110, 110]


def test_histograms_and_gauges_sum_over_threads() -> None:
    recorder = Recorder()
    threads = [threading.Thread(target=recorder.observe, args=("read_s", 0.003)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recorder.observe("read_s", 100.0)
    counts = recorder.histograms()["read_s"]
    assert counts[3] == 4
    assert counts[-2] == 1
    assert counts[-1] == pytest.approx(100.012)
    recorder.gauge("depth", lambda: 3)
    recorder.gauge("gone", lambda: 1 / 0)
    assert recorder.gauges() == {"depth": 3.0}


@contextmanager
def served(packed: Path) -> Iterator[WebServer]:
    server = WebServer({str(p.relative_to(packed)): p.read_bytes() for p in packed.rglob("*") if p.is_file()})
    try:
        yield server
    finally:
        server.stop()


def rows_of(url: str, root: Path, trainer: Callable[[], None], *more: str, num_steps: int = 14) -> list[StepRow]:
    """Trains and gives the rows after the first three."""
    words = [f"data.url={url}", f"cache.dir={root}", "graph.size=32", "device=cpu", "data.fields=[image]"]
    with dp.load("train", [*words, *more]) as loader:
        for at, _batch in enumerate(loader):
            trainer()
            if at + 1 == num_steps:
                break
        loader.steps.leave()
        return loader.steps.after(3)


def train() -> None:
    with dp.step("forward"):
        pass


_slept_s: list[float] = []


def slow_train() -> None:
    began_s = time.perf_counter()
    with dp.step("forward"):
        time.sleep(_DELAY_S)
    _slept_s.append(time.perf_counter() - began_s)


@contextmanager
def _slow_lake(server: WebServer) -> Iterator[list[float]]:
    with mock.patch.object(server, "delay_s", _DELAY_S):
        yield server.delays_s


# The row that must grow, what makes it grow by 100 ms a step and gives what they came to, and the training step.
_INJECTED: dict[str, tuple[Callable[[WebServer], AbstractContextManager[list[float]]], Callable[[], None]]] = {
    "lake": (_slow_lake, train),
    "decode": (lambda server: slow_calls("dalipipe.graphs.lane.Lane.run", _DELAY_S), train),
    "handover": (lambda server: slow_calls("dalipipe.graphs.handover.HandOver._fields", _DELAY_S), train),
    "forward": (lambda server: nullcontext(_slept_s), slow_train),
}


@pytest.mark.parametrize("row", _INJECTED)
def test_an_injected_delay_appears_in_its_own_row(row: str, packed: Path, tmp_path: Path) -> None:
    """100 ms in one stage of every step are 100 ms in its row, within 5 %, and all rows sum to the wall time.

    As many times 5 % as the host is slow just now: what else is in the row takes so much longer, or not.
    """
    inject, trainer = _INJECTED[row]
    block_samples = json.loads((packed / "manifest.json").read_text())["block_samples"]
    # One block a step, one fetch at a time and nothing kept: a slow lake cannot hide behind other fetches.
    words = ["prefetch.threads=1", "shuffle.mode=none", f"loader.batch_size={block_samples}", "cache.policy=stream"]
    words += ["cache.request_bytes=0"]  # else one slow request brings the blocks of several steps
    with served(packed) as server:
        before = slowness()
        quick = rows_of(server.url, tmp_path / "a", train, *words)
        with inject(server) as delays_s:
            slow = rows_of(server.url, tmp_path / "b", trainer, *words)
        delay_s, within_s = statistics.median(delays_s), 0.05 * _DELAY_S * max(before, slowness())
    grown_s = _median(slow, row) - _median(quick, row)
    assert grown_s == pytest.approx(delay_s, abs=within_s), [(found.wall_s, found.rows) for found in slow]
    for found in slow:
        assert sum(found.rows.values()) == pytest.approx(found.wall_s, abs=1e-6)


def _median(rows: list[StepRow], name: str) -> float:
    return statistics.median(row.rows.get(name, 0.0) for row in rows)


def test_what_no_mark_and_no_wait_explains_is_at_most_3_percent(packed: Path, tmp_path: Path) -> None:
    def marked() -> None:
        for name in ("forward", "backward", "optimiser"):
            with dp.step(name):
                time.sleep(0.015)

    with served(packed) as server:
        rows = rows_of(server.url, tmp_path, marked, "loader.batch_size=8")
    # The median: where the host takes the CPU away between two marks, that is `other`, and rightly so.
    assert statistics.median(row.phases["other"] / row.wall_s for row in rows) <= 0.03
    assert all(sum(row.rows.values()) == pytest.approx(row.wall_s, abs=1e-6) for row in rows)


def test_break_ends_a_step_and_what_follows_belongs_to_none(packed: Path, tmp_path: Path) -> None:
    with served(packed) as server:
        words = [f"data.url={server.url}", f"cache.dir={tmp_path}", "graph.size=32", "device=cpu"]
        with dp.load("train", [*words, "loader.batch_size=8"]) as loader:
            for _batch in loader:
                break
            time.sleep(0.2)  # an evaluation, say
            for _batch in loader:
                break
            first, second = loader.steps.after(0)
    assert first.wall_s == pytest.approx(sum(first.rows.values()))
    assert first.phases["other"] < 0.1
    assert second.phases["other"] < 0.1
