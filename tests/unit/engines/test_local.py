"""`LocalEngine`, with workers that are really killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dalipipe.engines import LocalEngine
from dalipipe.errors import ClosedError, ConfigError, PackError
from tests.contracts.engine import EngineContract, square
from tests.support.host import within
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[3]


class TestInline(EngineContract):
    @pytest.fixture
    def engine(self) -> Iterator[LocalEngine]:
        engine = LocalEngine(1)
        yield engine
        engine.close()

    def test_tasks_run_in_this_process(self, engine: LocalEngine) -> None:
        assert [one.result for one in engine.run(_pid, [0, 1], names=["a", "b"])] == [os.getpid()] * 2


class TestProcesses(EngineContract):
    @pytest.fixture
    def engine(self) -> Iterator[LocalEngine]:
        engine = LocalEngine(2)
        yield engine
        engine.close()
        assert multiprocessing.active_children() == []

    def test_tasks_run_in_both_workers_at_once(self, engine: LocalEngine, tmp_path: Path) -> None:
        folder = str(tmp_path)
        done = list(engine.run(_meet, [(folder, "a", "b"), (folder, "b", "a")], names=["a", "b"]))
        assert len({one.result for one in done}) == 2
        assert os.getpid() not in {one.result for one in done}

    def test_workers_wait_for_the_next_run_and_one_that_died_meanwhile_is_replaced(
        self, engine: LocalEngine, tmp_path: Path
    ) -> None:
        runs = []
        for number in range(3):
            folder = tmp_path / str(number)
            folder.mkdir()
            tasks = [(str(folder), "a", "b"), (str(folder), "b", "a")]
            runs.append({one.result for one in engine.run(_meet, tasks, names=["a", "b"])})
            if number == 1:
                victim = multiprocessing.active_children()[0]
                victim.kill()
                victim.join(60)
        assert runs[0] == runs[1]
        assert len(runs[2]) == 2
        assert len(runs[2] & runs[1]) == 1

    def test_workers_start_before_their_tasks_are_known(self, engine: LocalEngine, tmp_path: Path) -> None:
        engine.prepare(1)
        assert multiprocessing.active_children() == []
        engine.prepare(7)
        early = {child.pid for child in multiprocessing.active_children()}
        assert len(early) == 2
        folder = str(tmp_path)
        done = list(engine.run(_meet, [(folder, "a", "b"), (folder, "b", "a")], names=["a", "b"]))
        assert {one.result for one in done} == early

    def test_runs_at_the_same_time_have_workers_of_their_own(self, engine: LocalEngine) -> None:
        first = engine.run(square, list(range(6)), names=list("abcdef"))
        second = engine.run(square, list(range(6)), names=list("ghijkl"))
        both = [(one.result, other.result) for one, other in zip(first, second, strict=True)]
        assert sorted(one for one, _ in both) == sorted(other for _, other in both) == [n * n for n in range(6)]

    def test_killed_worker_is_an_error_that_names_its_task(self, engine: LocalEngine, tmp_path: Path) -> None:
        tasks = [(str(tmp_path / f"{number}.pid"), number == 2) for number in range(6)]
        with pytest.raises(PackError, match=r"was killed \(SIGKILL.*worked on shard-2[;,].*run again"):
            list(engine.run(_killed_at, tasks, names=[f"shard-{number}" for number in range(6)]))
        assert multiprocessing.active_children() == []

    def test_worker_that_exits_is_an_error(self, engine: LocalEngine) -> None:
        with pytest.raises(PackError, match="ended with exit code 7 while it worked on leaver"):
            list(engine.run(_exit, [0, 7], names=["stayer", "leaver"]))

    def test_ctrl_c_is_the_parents_affair(self, engine: LocalEngine) -> None:
        assert [one.result for one in engine.run(_interrupt_itself, [1, 1], names=["a", "b"])] == [1, 1]

    def test_workers_traceback_is_the_cause(self, engine: LocalEngine) -> None:
        with pytest.raises(ZeroDivisionError) as caught:
            list(engine.run(_divide, [0, 0], names=["a", "b"]))
        assert "in _divide" in str(caught.value.__cause__)

    @pytest.mark.parametrize("number", [0, 1])
    def test_what_cannot_be_pickled_is_named(self, engine: LocalEngine, number: int) -> None:
        with pytest.raises(PackError, match=r"task (odd|also odd) (returned|raised) .* cannot be pickled"):
            list(engine.run(_unpicklable, [number, number], names=["odd", "also odd"]))

    def test_function_that_cannot_be_pickled_is_refused(self, engine: LocalEngine) -> None:
        with pytest.raises(ConfigError, match="module-level function"):
            engine.run(lambda number: number, [1, 2], names=["a", "b"])

    def test_worker_that_cannot_start_says_so(self, tmp_path: Path) -> None:
        script = tmp_path / "script.py"
        script.write_text(
            "from dalipipe.engines import LocalEngine\n"
            "from tests.contracts.engine import square\n"
            "list(LocalEngine(2).run(square, [1, 2], names=['a', 'b']))\n"
        )
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        ran = subprocess.run(
            [sys.executable, script], check=False, capture_output=True, text=True, timeout=60, env=environment
        )
        assert ran.returncode == 1
        assert "if __name__ == '__main__':" in ran.stderr.splitlines()[-1]

    def test_closing_the_iterator_ends_busy_workers(self, engine: LocalEngine) -> None:
        run = engine.run(_sleep, [0.0, 60.0, 60.0], names=["a", "b", "c"])
        next(run)
        children = multiprocessing.active_children()
        assert len(children) == 2
        with within(2):
            run.close()  # type: ignore[attr-defined]
        assert not any(child.is_alive() for child in children)

    def test_stubborn_workers_are_killed(self, engine: LocalEngine, tmp_path: Path) -> None:
        run = engine.run(_ignore_sigterm, [str(tmp_path / "a"), str(tmp_path / "b")], names=["a", "b"])
        outcome: list[BaseException] = []
        runner = threading.Thread(target=_collect, args=(run, outcome))
        runner.start()
        wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
        with within(2.5):
            engine.close()
            runner.join(60)
        assert isinstance(outcome[0], ClosedError)

    def test_a_terminated_task_removes_its_temporary_file(self, engine: LocalEngine, tmp_path: Path) -> None:
        run = engine.run(_hold_temporary, [str(tmp_path / "a"), str(tmp_path / "b")], names=["a", "b"])
        outcome: list[BaseException] = []
        runner = threading.Thread(target=_collect, args=(run, outcome))
        runner.start()
        wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
        engine.close()
        runner.join(60)
        assert isinstance(outcome[0], ClosedError)
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
    def test_no_worker_outlives_its_parent(self, tmp_path: Path, number: signal.Signals) -> None:
        """Even a parent that is killed; Ctrl-C goes to the whole group, as a terminal sends it."""
        parent = subprocess.Popen(
            [sys.executable, "-m", "tests.unit.engines.orphans", str(tmp_path)],
            cwd=ROOT,
            start_new_session=True,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            wait_until(lambda: len(list(tmp_path.glob("*.pid"))) == 2, timeout_s=30)
            pids = [int(path.stem) for path in tmp_path.glob("*.pid")]
            if number == signal.SIGINT:
                os.killpg(parent.pid, number)
            else:
                os.kill(parent.pid, number)
            _, errors = parent.communicate(timeout=10)
            wait_until(lambda: not any(_is_running(pid) for pid in pids), timeout_s=2)
            if number == signal.SIGINT:
                assert errors.count("Traceback") == 1
                assert errors.rstrip().endswith("KeyboardInterrupt")
        finally:
            if parent.poll() is None:
                parent.kill()
                parent.wait(10)


def test_an_iterator_that_nobody_finishes_leaves_no_process() -> None:
    run = LocalEngine(2).run(square, list(range(10)), names=[str(number) for number in range(10)])
    next(run)
    del run
    assert multiprocessing.active_children() == []


def _pid(_: int) -> int:
    return os.getpid()


def _meet(task: tuple[str, str, str]) -> int:
    folder, mine, other = task
    (Path(folder) / mine).write_bytes(b"")
    wait_until((Path(folder) / other).exists)
    return os.getpid()


def _killed_at(task: tuple[str, bool]) -> None:
    path, dies = task
    Path(path).write_text(str(os.getpid()))
    if dies:
        os.kill(os.getpid(), signal.SIGKILL)


def _exit(code: int) -> None:
    if code:
        os._exit(code)


def _interrupt_itself(number: int) -> int:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.01)
    return number


def _divide(number: int) -> float:
    return 1 / number


class _UnpicklableError(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(one + two)


def _unpicklable(number: int) -> object:
    if number:
        raise _UnpicklableError(1, 2)
    return lambda: None


def _sleep(duration_s: float) -> None:
    time.sleep(duration_s)


def _ignore_sigterm(path: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path(path).write_bytes(b"")
    time.sleep(60)


def _hold_temporary(path: str) -> None:
    try:
        Path(path).write_bytes(b"")
        time.sleep(60)
    finally:
        Path(path).unlink()


def _collect(run: Iterator[object], outcome: list[BaseException]) -> None:
    try:
        list(run)
    except BaseException as error:  # noqa: BLE001 - looked at by the test
        outcome.append(error)


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
