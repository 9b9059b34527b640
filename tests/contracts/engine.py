"""What every engine must do. A test class of an implementation inherits this and gives it an `engine`."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path

import pytest

from dalipipe.engines import Engine
from dalipipe.errors import ClosedError, ConfigError
from tests.support.host import within


class OddError(Exception):
    """An exception with arguments of its own, which plain pickling would not build again."""

    def __init__(self, subject: str, *, code: int) -> None:
        super().__init__(f"{subject}: {code}")
        self.subject = subject
        self.code = code

    def __reduce__(self) -> tuple[object, ...]:
        return partial(OddError, code=self.code), (self.subject,)


def square(number: int) -> int:
    return number * number


def fail_at_three(number: int) -> int:
    if number == 3:
        raise OddError("three", code=33)
    time.sleep(0.002)
    return number


def touch(folder: str) -> str:
    path = Path(folder) / f"{os.getpid()}-{time.monotonic_ns()}"
    path.write_bytes(b"")
    return path.name


def echo(data: bytes) -> bytes:
    return data


class EngineContract:
    """`engine` is open and is closed by the fixture."""

    @pytest.fixture
    def engine(self) -> Engine:
        raise NotImplementedError("give the engine that is tested")

    @pytest.mark.parametrize("num_tasks", [0, 1, 2, 50])
    def test_every_task_is_answered_once_under_its_number(self, engine: Engine, num_tasks: int) -> None:
        names = [f"task-{number}" for number in range(num_tasks)]
        done = list(engine.run(square, list(range(num_tasks)), names=names))
        assert sorted((one.index, one.result) for one in done) == [(n, n * n) for n in range(num_tasks)]

    def test_engine_runs_again_and_again(self, engine: Engine) -> None:
        for _ in range(3):
            assert len(list(engine.run(square, [1, 2, 3], names=["a", "b", "c"]))) == 3

    def test_it_runs_after_it_was_told_to_expect_tasks(self, engine: Engine) -> None:
        for expected in (0, 1, 2, 50):
            engine.prepare(expected)
        assert sorted(one.index for one in engine.run(square, [1, 2, 3], names=["a", "b", "c"])) == [0, 1, 2]

    def test_tasks_and_results_may_be_large(self, engine: Engine) -> None:
        data = [bytes([number]) * (3 << 20) for number in range(4)]
        done = list(engine.run(echo, data, names=["0", "1", "2", "3"]))
        assert all(one.result == data[one.index] for one in done)

    def test_partial_functions_run(self, engine: Engine) -> None:
        assert [one.result for one in engine.run(partial(pow, 2), [5], names=["five"])] == [32]

    def test_exception_of_a_task_is_raised_as_it_is(self, engine: Engine) -> None:
        with pytest.raises(OddError) as caught:
            list(engine.run(fail_at_three, list(range(200)), names=[str(number) for number in range(200)]))
        assert (caught.value.subject, caught.value.code) == ("three", 33)

    def test_nothing_starts_before_the_first_answer_is_asked_for_and_closing_stops_the_rest(
        self, engine: Engine, tmp_path: Path
    ) -> None:
        run = engine.run(touch, [str(tmp_path)] * 1000, names=[str(number) for number in range(1000)])
        assert list(tmp_path.iterdir()) == []
        next(run)
        with within(2):
            run.close()  # type: ignore[attr-defined]
        after_close = len(list(tmp_path.iterdir()))
        assert after_close < 1000
        assert list(run) == []

    def test_names_must_match_the_tasks(self, engine: Engine) -> None:
        with pytest.raises(ConfigError, match=r"2 tasks .* 1 names"):
            list(engine.run(square, [1, 2], names=["a"]))

    def test_closed_engine_refuses(self, engine: Engine) -> None:
        engine.close()
        engine.close()
        with pytest.raises(ClosedError):
            list(engine.run(square, [1], names=["a"]))
