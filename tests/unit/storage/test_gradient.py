"""The limit against simulated stores: what latency does as a function of the requests in flight."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from dalipipe.storage.gradient import GradientLimit

MB = 1 << 20


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def run(limit: GradientLimit, clock: Clock, latency_s: Callable[[int], float], num_requests: int) -> None:
    """Keeps the limit full; each request takes `latency_s(in flight)`."""
    done = 0
    while done < num_requests:
        in_flight = limit.limit
        for _ in range(in_flight):
            assert limit.acquire(0)
        took_s = latency_s(in_flight)
        clock.now_s += took_s
        for _ in range(in_flight):
            limit.release()
            limit.finished(MB, took_s)
        done += in_flight


def queueing(capacity: int) -> Callable[[int], float]:
    """A store that serves `capacity` requests at once in 50 ms; more of them queue."""
    return lambda in_flight: 0.05 * max(1.0, in_flight / capacity)


def test_it_grows_while_a_store_scales() -> None:
    clock = Clock()
    limit = GradientLimit(256, clock=clock)
    run(limit, clock, lambda in_flight: 0.05, 20_000)
    assert limit.limit == 256


def test_it_stays_near_what_the_store_can_take() -> None:
    clock = Clock()
    limit = GradientLimit(256, clock=clock)
    sizes = []
    for _ in range(60):
        run(limit, clock, queueing(64), 2000)
        sizes.append(limit.limit)
    assert 32 <= sorted(sizes)[len(sizes) // 2] <= 128


def test_it_shrinks_to_a_store_that_became_smaller() -> None:
    clock = Clock()
    limit = GradientLimit(256, clock=clock)
    run(limit, clock, lambda in_flight: 0.05, 20_000)
    sizes = []
    for _ in range(100):
        run(limit, clock, queueing(8), 2000)
        sizes.append(limit.limit)
    assert min(sizes) <= 32


def test_a_store_that_is_slow_for_reasons_of_its_own_keeps_its_requests() -> None:
    clock = Clock()
    limit = GradientLimit(64, clock=clock)
    run(limit, clock, lambda in_flight: 0.05, 10_000)
    run(limit, clock, lambda in_flight: 0.25, 10_000)
    assert limit.limit >= 32


def test_throttling_halves_it_once_a_second() -> None:
    clock = Clock()
    limit = GradientLimit(64, clock=clock)
    before = limit.limit
    for _ in range(10):
        limit.throttled()
    assert limit.limit == before // 2
    for _ in range(20):
        clock.now_s += 1.1
        limit.throttled()
    assert limit.limit == 2


def test_a_place_is_waited_for_until_the_deadline_and_close_wakes() -> None:
    limit = GradientLimit(1)
    assert limit.acquire(0)
    assert not limit.acquire(0.01)
    outcome: list[bool] = []
    waiter = threading.Thread(target=lambda: outcome.append(limit.acquire(30)))
    waiter.start()
    began_s = time.monotonic()
    limit.close()
    waiter.join(10)
    assert outcome == [False]
    assert time.monotonic() - began_s < 5
