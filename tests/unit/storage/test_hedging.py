from __future__ import annotations

import random

import pytest

from dalipipe.storage.hedging import HedgePolicy

MB = 1 << 20


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def learned(clock: Clock | None = None, latency_s: float = 0.1) -> HedgePolicy:
    policy = HedgePolicy(clock=clock or Clock())
    for _ in range(100):
        policy.started()
        policy.finished(MB, latency_s)
    return policy


def test_nothing_is_hedged_before_enough_is_known() -> None:
    policy = HedgePolicy()
    for _ in range(10):
        policy.finished(MB, 0.1)
    assert policy.threshold_s(MB) is None


def test_the_threshold_is_the_p95_of_requests_of_that_size() -> None:
    policy, source = HedgePolicy(), random.Random(3)
    for _ in range(1000):
        policy.finished(MB, source.uniform(0.0, 1.0))
        policy.finished(8 * MB, 5.0)
    assert policy.threshold_s(MB) == pytest.approx(0.95, rel=0.15)
    assert (policy.threshold_s(8 * MB) or 0) >= 5.0
    # A size that was never seen: three times the p95 of all.
    assert (policy.threshold_s(1000) or 0) >= 15.0


def test_hedges_are_at_most_five_percent_of_requests() -> None:
    policy, hedges = learned(), 0
    for _ in range(2000):
        policy.started()
        hedges += policy.may_hedge()
    assert 90 <= hedges <= 102


def test_off_is_off() -> None:
    policy = HedgePolicy(enabled=False)
    for _ in range(100):
        policy.started()
        policy.finished(MB, 0.1)
    assert policy.threshold_s(MB) is None
    assert not policy.may_hedge()


def test_a_throttling_store_is_not_hedged_for_ten_seconds() -> None:
    clock = Clock()
    policy = learned(clock)
    policy.throttled()
    clock.now_s = 9.9
    assert not policy.may_hedge()
    clock.now_s = 10.1
    assert policy.may_hedge()


def test_hedges_stop_when_every_request_is_slow() -> None:
    policy, hedges = learned(), 0
    for _ in range(1000):
        policy.started()
        threshold_s = policy.threshold_s(MB)
        if threshold_s is not None and threshold_s < 0.5:
            hedges += policy.may_hedge()
        policy.finished(MB, 0.5)
    assert hedges <= 3


def test_hedges_pause_when_they_do_not_come_first() -> None:
    clock = Clock()
    policy = learned(clock)
    for _ in range(8):
        policy.hedged(won=False)
    for _ in range(100):
        policy.started()
    assert not policy.may_hedge()
    clock.now_s = 11.0
    assert policy.may_hedge()


def test_hedges_that_win_go_on() -> None:
    policy = learned()
    for i in range(50):
        policy.hedged(won=i % 2 == 0)
    for _ in range(100):
        policy.started()
    assert policy.may_hedge()
