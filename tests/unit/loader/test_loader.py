"""The iterator that trainers see, over a source that needs no image."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from dalipipe.errors import ClosedError, ConfigError, PipelineError, PipelineTimeoutError, StateError, StorageError
from dalipipe.graphs.contract import Batch
from dalipipe.loader.loader import Loader
from dalipipe.order.signature import OrderSignature
from dalipipe.telemetry import Recorder
from tests.support.host import within
from tests.support.waiting import wait_until

STEPS, BATCH = 5, 4
ORDER = OrderSignature(
    mode="block",
    seed=1,
    batch_size=BATCH,
    block_samples=2,
    lanes=4,
    window_blocks=1,
    exchange=0.0,
    last_batch="drop",
)


class CountingSource:
    """Endless batches from (epoch, step) on; fails or stalls where it is told to."""

    alive = 0

    def __init__(self, epoch: int, step: int, fault: Callable[[int, int], None] = lambda epoch, step: None) -> None:
        self.position = (epoch, step)
        self.fault = fault
        self.closed = False
        CountingSource.alive += 1

    def __iter__(self) -> CountingSource:
        return self

    def __next__(self) -> Batch:
        epoch, step = self.position
        self.fault(epoch, step)
        self.position = (epoch, step + 1) if step + 1 < STEPS else (epoch + 1, 0)
        first = (epoch * STEPS + step) * BATCH
        return Batch(epoch=epoch, step=step, tensors={"id": torch.arange(first, first + BATCH)}, near_at=0.0)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            CountingSource.alive -= 1


def make(fault: Callable[[int, int], None] = lambda epoch, step: None, **changes: Any) -> Loader:
    arguments: dict[str, Any] = {
        "start": lambda epoch, step: CountingSource(epoch, step, fault),
        "num_steps": STEPS,
        "identity": "a" * 32,
        "order": ORDER,
        "batch_size": BATCH,
        "device": torch.device("cpu"),
        "ahead": 2,
        "timeout_s": 5.0,
        "recorder": Recorder(),
    }
    return Loader(**(arguments | changes))


def batch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "dalipipe-batches"]


@pytest.fixture
def loader() -> Iterator[Loader]:
    CountingSource.alive = 0
    with make() as made:
        yield made
    assert CountingSource.alive == 0
    assert not batch_threads()


def steps(batches: Any) -> list[int]:
    """The global number of each batch."""
    return [int(batch["id"][0]) // BATCH for batch in batches]


def test_each_iteration_is_the_next_epoch(loader: Loader) -> None:
    assert len(loader) == STEPS
    assert steps(loader) == [0, 1, 2, 3, 4]
    assert steps(loader) == [5, 6, 7, 8, 9]
    assert loader.stats()["batches"] == 10
    assert loader.stats()["samples"] == 40


def test_break_then_iterate_is_the_next_epoch(loader: Loader) -> None:
    for batch in loader:
        if int(batch["id"][0]) == 1 * BATCH:
            break
    assert steps(loader) == [5, 6, 7, 8, 9]


def test_state_after_break_continues_the_broken_epoch(loader: Loader) -> None:
    batches = iter(loader)
    assert [steps([next(batches)]) for _ in range(3)] == [[0], [1], [2]]
    state = json.loads(json.dumps(loader.state_dict()))
    with make() as resumed:
        resumed.load_state_dict(state)
        assert steps(resumed) == [3, 4]
        assert steps(resumed) == [5, 6, 7, 8, 9]


def test_state_is_small_and_counts_delivered_batches_only() -> None:
    asked: list[int] = []
    with make(lambda epoch, step: asked.append(step)) as loader:
        next(iter(loader))
        wait_until(lambda: len(asked) > 2, "the feeder's running ahead")  # which must not show
        state = loader.state_dict()
    assert (state["epoch"], state["step"]) == (0, 1)
    assert len(json.dumps(state)) < 1024


def test_state_before_the_first_batch_and_after_the_last(loader: Loader) -> None:
    before = loader.state_dict()
    assert steps(loader) == [0, 1, 2, 3, 4]
    after = loader.state_dict()
    with make() as resumed:
        resumed.load_state_dict(before)
        assert steps(resumed) == [0, 1, 2, 3, 4]
        resumed.load_state_dict(after)
        assert steps(resumed) == [5, 6, 7, 8, 9]


def test_state_taken_inside_the_last_step_leaves_nothing_of_its_epoch(loader: Loader) -> None:
    state = {}
    for _ in loader:
        state = loader.state_dict()
    with make() as resumed:
        resumed.load_state_dict(state)
        assert steps(resumed) == []
        assert steps(resumed) == [5, 6, 7, 8, 9]


def test_resume_twice_in_one_epoch(loader: Loader) -> None:
    batches = iter(loader)
    next(batches)
    first = loader.state_dict()
    next(batches)
    second = loader.state_dict()
    loader.load_state_dict(first)
    assert steps(loader) == [1, 2, 3, 4]
    loader.load_state_dict(second)
    assert steps(loader) == [2, 3, 4]


def test_set_epoch_moves_but_keeps_a_loaded_position(loader: Loader) -> None:
    loader.set_epoch(3)
    assert steps(loader) == [15, 16, 17, 18, 19]
    loader.load_state_dict(loader.state_dict() | {"epoch": 7, "step": 2})
    loader.set_epoch(7)
    assert steps(loader) == [37, 38, 39]
    for wrong in (-1, 1.5, "2"):
        with pytest.raises(ConfigError, match="count from 0"):
            loader.set_epoch(wrong)  # type: ignore[arg-type]


def test_an_older_iterator_does_not_steal_batches(loader: Loader) -> None:
    old = iter(loader)
    next(old)
    new = iter(loader)
    with pytest.raises(ClosedError, match="iterated"):
        next(old)
    assert steps(new) == [5, 6, 7, 8, 9]


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({"identity": "b" * 32}, "identity: state 'bbbb"),
        ({"seed": 2}, "seed: state 2, this loader 1"),
        ({"lanes": 2}, "lanes: state 2, this loader 4"),
        ({"version": 99}, "version 99"),
        ({"step": -1}, "step=-1"),
        ({"epoch": True}, "epoch=True"),
        ({"step": 99}, "step 99 of an epoch of 5"),
    ],
)
def test_foreign_states_are_refused_with_both_sides(loader: Loader, change: dict[str, Any], shown: str) -> None:
    with pytest.raises(StateError, match=shown):
        loader.load_state_dict(loader.state_dict() | change)


def test_a_failure_reaches_the_trainer_with_its_type_and_the_loader_can_go_on() -> None:
    failing = [True]

    def fault(epoch: int, step: int) -> None:
        if step == 3 and failing:
            failing.clear()
            raise StorageError("reading s3://lake/shard-000001.tar failed")

    with make(fault) as loader:
        batches = iter(loader)
        assert [steps([next(batches)]) for _ in range(3)] == [[0], [1], [2]]
        with pytest.raises(StorageError, match=r"shard-000001\.tar"):
            next(batches)
        loader.load_state_dict(loader.state_dict())
        assert steps(loader) == [3, 4]


def test_a_stuck_source_is_an_error_and_close_stays_fast() -> None:
    release = threading.Event()
    with make(lambda epoch, step: release.wait(10) and None, timeout_s=0.3) as loader:
        with pytest.raises(PipelineTimeoutError, match=r"prefetch\.timeout_s=0\.3"):
            next(iter(loader))
        release.set()
        with within(2.5):
            loader.close()
    wait_until(lambda: not batch_threads(), "the end of the thread that was left behind")


def test_an_interrupt_while_the_source_starts_or_is_closed_leaves_nothing_behind() -> None:
    CountingSource.alive = 0

    class Interrupting(CountingSource):
        def close(self) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            super().close()

    def start(epoch: int, step: int) -> CountingSource:
        os.kill(os.getpid(), signal.SIGINT)
        return Interrupting(epoch, step)

    loader = make(start=start)
    with pytest.raises(KeyboardInterrupt):
        next(iter(loader))
    assert CountingSource.alive == 1, "the interrupt waited until the source had an owner"
    with pytest.raises(KeyboardInterrupt):
        loader.close()
    assert CountingSource.alive == 0
    assert not batch_threads()


def test_closing_while_another_thread_starts_the_source_leaves_nothing_behind() -> None:
    """The one that started it takes it down again, and says so."""
    CountingSource.alive = 0
    starting, closed, caught = threading.Event(), threading.Event(), []

    def start(epoch: int, step: int) -> CountingSource:
        starting.set()
        assert closed.wait(10)
        return CountingSource(epoch, step)

    def iterate() -> None:
        try:
            next(iter(loader))
        except ClosedError as error:
            caught.append(str(error))

    loader = make(start=start)
    thread = threading.Thread(target=iterate)
    thread.start()
    assert starting.wait(10)
    loader.close()
    closed.set()
    thread.join(10)
    assert caught == ["the loader was closed while it started"]
    assert CountingSource.alive == 0
    assert not batch_threads()


def test_a_closed_loader_says_so(loader: Loader) -> None:
    other = make()
    next(iter(other))
    other.close()
    other.close()
    with pytest.raises(ClosedError):
        iter(other)


def test_rest_keeps_the_position(loader: Loader) -> None:
    batches = iter(loader)
    next(batches)
    loader.rest()
    assert CountingSource.alive == 0
    assert steps(batches) == [1, 2, 3, 4]


class Offers:
    """Stands for the publisher and keeps what it is told."""

    def __init__(self) -> None:
        self.positions: list[tuple[int, int]] = []
        self.closed = False

    def offer(self, state: dict[str, Any]) -> None:
        self.positions.append((state["epoch"], state["step"]))

    def close(self) -> None:
        self.closed = True


def test_published_positions_count_only_batches_that_the_trainer_is_done_with() -> None:
    offers = Offers()
    with make(publisher=offers) as loader:
        for number, _ in enumerate(loader):
            # While it works on a batch, that batch is not in what could be published, though state_dict counts it.
            assert offers.positions[-1] == (0, number)
            assert loader.state_dict()["step"] == number + 1
        assert offers.positions == [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (1, 0)]
        next(iter(loader))
    assert offers.positions[-1] == (1, 0)
    assert offers.closed


def test_two_threads_on_one_loader_are_told_so() -> None:
    entered, release = threading.Event(), threading.Event()

    def fault(epoch: int, step: int) -> None:
        entered.set()
        release.wait(10)

    with make(fault) as loader:
        first = threading.Thread(target=lambda: next(iter(loader)))
        first.start()
        assert entered.wait(10)
        with pytest.raises(PipelineError, match="two threads"):
            loader._next(loader._iteration)
        release.set()
        first.join(10)
