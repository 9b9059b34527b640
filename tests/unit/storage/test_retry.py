from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dalipipe.errors import ClosedError, ObjectNotFoundError, StorageError, StorageTimeoutError
from dalipipe.storage import StorageConfig
from dalipipe.storage.calls import CallPool
from dalipipe.storage.failures import is_transient
from dalipipe.storage.fsspec_store import FsspecStore
from dalipipe.storage.retry import call_with_retries
from dalipipe.storage.transport import Transport, discard


class FakeTime:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.delays_s: list[float] = []

    def clock(self) -> float:
        return self.now_s

    def sleep(self, delay_s: float) -> None:
        self.delays_s.append(delay_s)
        self.now_s += delay_s


def _failing(times: int, error: Exception) -> Callable[[float], str]:
    left = [times]

    def attempt(_: float) -> str:
        if left[0]:
            left[0] -= 1
            raise error
        return "done"

    return attempt


@given(st.integers(0, 8), st.lists(st.floats(0, 1, exclude_max=True), min_size=9, max_size=9))
def test_delays_are_jittered_and_bounded(num_failures: int, draws: list[float]) -> None:
    fake, left = FakeTime(), iter(draws)
    result = call_with_retries(
        _failing(num_failures, ConnectionResetError()),
        retries=8,
        timeout_s=1000,
        clock=fake.clock,
        sleep=fake.sleep,
        uniform=lambda: next(left),
    )
    assert result == "done"
    assert fake.delays_s == [draws[i] * min(2.0, 0.05 * 2**i) for i in range(num_failures)]


def test_retries_are_counted_and_end() -> None:
    fake, counted = FakeTime(), []
    with pytest.raises(ConnectionResetError):
        call_with_retries(
            _failing(99, ConnectionResetError()),
            retries=3,
            timeout_s=1000,
            on_retry=lambda: counted.append(1),
            clock=fake.clock,
            sleep=fake.sleep,
        )
    assert (len(fake.delays_s), len(counted)) == (3, 3)


def test_no_retry_begins_behind_the_deadline() -> None:
    fake = FakeTime()
    with pytest.raises(ConnectionResetError):
        call_with_retries(
            _failing(99, ConnectionResetError()),
            retries=1000,
            timeout_s=10,
            clock=fake.clock,
            sleep=fake.sleep,
            uniform=lambda: 0.99,
        )
    assert 5 < fake.now_s < 10


def test_lasting_errors_are_not_tried_again() -> None:
    fake = FakeTime()
    with pytest.raises(FileNotFoundError):
        call_with_retries(_failing(1, FileNotFoundError()), retries=5, timeout_s=10, clock=fake.clock, sleep=fake.sleep)
    assert fake.delays_s == []


class HttpError(Exception):
    def __init__(self, status: int) -> None:
        self.status = status


@pytest.mark.parametrize(
    ("error", "transient"),
    [
        (ConnectionRefusedError(), True),
        (TimeoutError(), True),
        (OSError(errno.EHOSTUNREACH, "no route"), True),
        (HttpError(503), True),
        (HttpError(429), True),
        (HttpError(404), False),
        (HttpError(403), False),
        (FileNotFoundError(), False),
        (PermissionError(), False),
        (OSError(errno.ENOSPC, "full"), False),
        (ValueError(), False),
        (StorageTimeoutError("the call is over"), False),
    ],
)
def test_what_counts_as_passing(error: Exception, transient: bool) -> None:
    assert is_transient(error) is transient


def test_fsspec_calls_are_retried_read_again_and_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: Counter[str] = Counter()

    def record(name: str, amount: float) -> None:
        counts[name] += int(amount)

    store = FsspecStore("memory://retry-test/x", StorageConfig(retries=2), record=record)
    store.put("a", b"0123456789")
    answers: list[Exception | bytes] = [ConnectionResetError(errno.ECONNRESET, "reset"), b"01", b"01234"]

    def flaky(path: str, start: int, end: int) -> bytes:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(store._fs, "cat_file", flaky, raising=True)
    assert bytes(store.read("a", 0, 5)) == b"01234"
    assert counts["retries"] == 1
    answers[:] = [b"01", b"012"]
    with pytest.raises(StorageError, match=r"memory://retry-test/x/a bytes \[0, 5\): the store answered 3 of 5"):
        store.read("a", 0, 5)
    answers[:] = [ConnectionResetError(errno.ECONNRESET, "reset")] * 3
    with pytest.raises(StorageError, match=r"cannot read memory://retry-test/x/a: reset"):
        store.read("a", 0, 5)
    with pytest.raises(ObjectNotFoundError):
        store.head("b")
    store.close()


def test_at_most_num_threads_calls_can_be_stuck_and_late_answers_are_dropped() -> None:
    pool, release = CallPool(url="test://x", num_threads=2), threading.Event()
    try:
        for _ in range(4):
            with pytest.raises(StorageTimeoutError, match="cannot read y"):
                pool.run(lambda: release.wait(30), timeout_s=0.05, action="read y")
        stuck = [thread for thread in threading.enumerate() if thread.name.startswith("dalipipe-storage")]
        assert len(stuck) == 2
        release.set()
        assert pool.run(lambda: 7, timeout_s=10, action="read y") == 7
    finally:
        release.set()
        pool.close()
    assert not any(thread.is_alive() for thread in stuck)


def test_a_calls_own_timeout_error_is_passed_on() -> None:
    pool = CallPool(url="test://x", num_threads=1)

    def fail() -> None:
        raise TimeoutError("of the client")

    with pytest.raises(TimeoutError, match="of the client"):
        pool.run(fail, timeout_s=10, action="read y")
    pool.close()


def test_results_come_in_order_and_only_so_many_ahead() -> None:
    pool, started = CallPool(url="test://x", num_threads=3), []

    def call(number: int) -> int:
        started.append(number)
        time.sleep(0.01 * (number % 3))
        return number

    results = pool.run_in_order((lambda n=n: call(n) for n in range(20)), timeout_s=10, action="read y")  # type: ignore[misc]
    assert [next(results) for _ in range(5)] == [0, 1, 2, 3, 4]
    assert max(started) <= 8
    assert list(results) == list(range(5, 20))
    pool.close()


def test_threads_end_with_a_store_that_nobody_closed() -> None:
    pool = CallPool(url="test://x", num_threads=1)
    thread = pool.run(threading.current_thread, timeout_s=10, action="read y")
    del pool
    thread.join(5)
    assert not thread.is_alive()


def test_calls_one_at_a_time_stay_on_few_threads_and_more_wait_for_a_free_one() -> None:
    pool, release = CallPool(url="test://x", num_threads=6), threading.Event()

    def who() -> int:
        release.wait(30)
        return threading.get_ident()

    try:
        waiting = [pool.submit(who) for _ in range(15)]
        release.set()
        at_once = {pool.wait(future, 30, "read y") for future in waiting}
        one_by_one = {pool.run(threading.get_ident, timeout_s=30, action="read y") for _ in range(40)}
    finally:
        release.set()
        pool.close()
    assert len(at_once) <= 6
    assert len(one_by_one) < 6  # all six in turn would be six


def test_what_waits_for_a_thread_when_the_pool_is_closed_is_told() -> None:
    pool, release = CallPool(url="test://x", num_threads=1), threading.Event()
    try:
        busy = pool.submit(lambda: release.wait(30))
        waits = pool.submit(lambda: 7)
        pool.close()
        with pytest.raises(ClosedError, match="test://x is closed"):
            pool.wait(waits, 30, "read y")
        with pytest.raises(ClosedError, match="test://x is closed"):
            pool.wait(busy, 30, "read y")
    finally:
        release.set()


def test_a_forked_child_closes_a_store_although_threads_that_it_lacks_held_all_locks(tmp_path: Path) -> None:
    transport = Transport("test://x", StorageConfig(budget_dir=str(tmp_path)), discard)
    assert transport.run(lambda: 7, "read y") == 7
    pool, budget = transport._calls, transport._budget
    assert budget is not None
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with pool._lock, pool._crew.lock, transport.limit._free, budget._lock:
            held.set()
            release.wait(30)

    holder = threading.Thread(target=hold)
    holder.start()
    try:
        assert held.wait(30)
        child = os.fork()
        if not child:
            signal.alarm(20)  # or it would hang
            transport.close()
            pool._release()  # what the collector and the end of the process run
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    finally:
        release.set()
        holder.join()
    assert transport.run(lambda: 7, "read y") == 7
    transport.close()


@pytest.mark.parametrize("refused", [False, True])
def test_a_late_request_is_sent_twice_but_not_to_a_store_that_asked_to_slow_down(refused: bool, tmp_path: Path) -> None:
    counts: Counter[str] = Counter()
    transport = Transport("test://x", StorageConfig(budget_dir=str(tmp_path)), lambda name, n: counts.update({name: n}))
    second, num_calls = threading.Event(), 0

    def late() -> None:
        nonlocal num_calls
        num_calls += 1
        second.set() if num_calls > 1 else second.wait(1.0 if refused else 60.0)

    def refuse() -> None:
        raise OSError("Server returned error, status code: 503")

    try:
        for _ in range(40):
            transport.run(lambda: None, "read y", num_bytes=10, hedge=True)
        before = counts["hedges"]
        if refused:
            with pytest.raises(OSError, match="503"):
                transport.run(refuse, "read y", num_bytes=10, retries=0, hedge=True)
        transport.run(late, "read y", num_bytes=10, hedge=True)
    finally:
        second.set()
        transport.close()
    assert counts["throttled"] == refused
    assert counts["hedges"] - before == (not refused)
    assert num_calls == (1 if refused else 2)
