from __future__ import annotations

import heapq
import random
from collections.abc import Callable

import pytest

from dalipipe.storage.hedging import Flight, HedgePolicy

KB, MB = 1 << 10, 1 << 20


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def answered(policy: HedgePolicy, clock: Clock, num_bytes: int, latency_s: float) -> bool:
    """One request that takes so long when nobody hedges it, alone; whether a hedge was asked for (it loses)."""
    flight, hedged, end_s = policy.started(num_bytes), False, clock.now_s + latency_s
    while (wait_s := policy.hedge_in_s(flight) if not hedged else float("inf")) < end_s - clock.now_s:
        hedged = hedged or wait_s == 0
        clock.now_s += wait_s + 1e-6
    clock.now_s = end_s
    policy.finished(flight)
    return hedged


def learned(clock: Clock, latency_s: float = 0.1, num_bytes: int = MB) -> HedgePolicy:
    policy = HedgePolicy(clock=clock)
    for _ in range(100):
        answered(policy, clock, num_bytes, latency_s)
    return policy


def due_after_s(policy: HedgePolicy, clock: Clock, flight: Flight, at_most_s: float = 60.0) -> float | None:
    """How long after now the hedge of `flight` is sent, when it never ends; None: not within `at_most_s`."""
    began_s = clock.now_s
    while (wait_s := policy.hedge_in_s(flight)) > 0:
        if clock.now_s + wait_s > began_s + at_most_s:
            return None
        clock.now_s += wait_s + 1e-6
    return clock.now_s - began_s


def test_nothing_is_hedged_before_enough_is_known() -> None:
    clock = Clock()
    policy = HedgePolicy(clock=clock)
    hanging = policy.started(MB)
    for _ in range(23):
        answered(policy, clock, MB, 0.1)
    assert policy.hedge_in_s(hanging) > 0
    answered(policy, clock, MB, 0.1)
    assert policy.hedge_in_s(hanging) == 0


def test_the_threshold_is_the_p95_of_requests_of_that_size() -> None:
    clock, source = Clock(), random.Random(3)
    policy = HedgePolicy(clock=clock)
    for _ in range(1000):
        answered(policy, clock, MB, source.uniform(0.0, 1.0))
        answered(policy, clock, 8 * MB, 5.0)
    clock.now_s += 20
    due = {}
    for num_bytes in (KB, MB, 8 * MB, 64 * MB):
        flight = policy.started(num_bytes)
        due[num_bytes] = due_after_s(policy, clock, flight)
        policy.failed(flight)
        for _ in range(40):  # earns the next hedge
            answered(policy, clock, MB, 0.1)
    assert due[MB] == pytest.approx(0.95, rel=0.15)
    # A smaller size that was never seen takes no longer than the next larger one; a larger one at most in proportion.
    assert due[KB] == pytest.approx(0.95, rel=0.15)
    assert due[8 * MB] == pytest.approx(5.0, rel=0.15)
    assert due[64 * MB] == pytest.approx(40.0, rel=0.15)


def test_hedges_are_at_most_five_percent_of_requests() -> None:
    clock = Clock()
    policy, hedges = learned(clock), 0
    for _ in range(2000):
        flight = policy.started(MB)
        clock.now_s += 1
        hedges += policy.hedge_in_s(flight) == 0
        policy.failed(flight)
    assert 95 <= hedges <= 104  # four may have been saved before


def test_off_is_off() -> None:
    clock = Clock()
    policy = HedgePolicy(enabled=False, clock=clock)
    hedges = [answered(policy, clock, MB, latency_s) for latency_s in [0.1] * 100 + [30.0]]
    assert not any(hedges)


def test_a_throttling_store_is_not_hedged_for_ten_seconds_and_then_what_still_hangs() -> None:
    clock = Clock()
    policy = learned(clock)
    hanging = policy.started(MB)
    policy.throttled()
    found = due_after_s(policy, clock, hanging)
    assert found is not None
    assert 10.0 <= found <= 13.0


def test_in_a_storm_of_refusals_nothing_is_hedged() -> None:
    clock = Clock()
    policy = learned(clock)
    policy.throttled()
    for _ in range(200):
        flight = policy.started(MB)
        assert due_after_s(policy, clock, flight, at_most_s=1.0) is None
        policy.throttled()
        policy.failed(flight)


def test_a_hanging_request_that_could_not_be_hedged_is_looked_at_again() -> None:
    clock = Clock()
    policy = learned(clock)
    spent = [policy.started(MB) for _ in range(4)]
    assert all(due_after_s(policy, clock, flight) is not None for flight in spent)
    hanging = policy.started(MB)
    clock.now_s += 1.0
    assert policy.hedge_in_s(hanging) > 0  # the budget is spent
    for _ in range(40):
        answered(policy, clock, MB, 0.1)
    assert due_after_s(policy, clock, hanging, at_most_s=3.0) is not None


def test_two_of_the_saved_hedges_are_kept_for_requests_that_hang() -> None:
    clock = Clock()
    policy = learned(clock)
    assert sum(answered(policy, clock, MB, 0.18) for _ in range(6)) == 2  # of four
    hanging = [policy.started(MB) for _ in range(2)]
    assert all(due_after_s(policy, clock, flight, at_most_s=1.0) is not None for flight in hanging)


class Lake:
    """A store on a clock of its own: a first byte after `wait_s()`, and one link, shared evenly (processor sharing)."""

    def __init__(self, rate: float, wait_s: Callable[[], float]) -> None:
        self.clock = Clock()
        self.policy = HedgePolicy(clock=self.clock)
        self.hedges: list[float] = []
        self.wins = 0
        self.latencies_s: list[float] = []
        self._rate = rate
        self._wait_s = wait_s
        self._looks: list[tuple[float, int, Flight]] = []
        self._under_way: list[list[float | Flight | bool]] = []
        self._count = 0

    def ask(self, num_bytes: int) -> None:
        flight = self.policy.started(num_bytes)
        self._copy(flight, is_hedge=False)
        self._look(flight, self.clock.now_s)

    def _copy(self, flight: Flight, *, is_hedge: bool) -> None:
        self._under_way.append([self.clock.now_s + self._wait_s(), float(flight.num_bytes), flight, is_hedge])

    def _look(self, flight: Flight, at_s: float) -> None:
        self._count += 1
        heapq.heappush(self._looks, (at_s, self._count, flight))

    def run(self, seconds: float, every_s: float = 0.0, then: Callable[[], None] = lambda: None) -> None:
        """Goes on in steps of 2 ms; `then` is called every `every_s` seconds."""
        end_s, next_s = self.clock.now_s + seconds, self.clock.now_s
        while self.clock.now_s < end_s:
            if every_s and self.clock.now_s >= next_s:
                next_s += every_s
                then()
            self.clock.now_s += 0.002
            self._carry(0.002)
            while self._looks and self._looks[0][0] <= self.clock.now_s:
                flight = heapq.heappop(self._looks)[2]
                if not any(copy[2] is flight for copy in self._under_way):
                    continue
                wait_s = self.policy.hedge_in_s(flight)
                if wait_s > 0:
                    self._look(flight, self.clock.now_s + wait_s)
                else:
                    self.hedges.append(self.clock.now_s)
                    self._copy(flight, is_hedge=True)

    def _carry(self, seconds: float) -> None:
        sending = [copy for copy in self._under_way if copy[0] <= self.clock.now_s]
        for copy in sending:
            copy[1] -= seconds * self._rate / len(sending)
        for copy in sending:
            flight = copy[2]
            assert isinstance(flight, Flight)
            if copy[1] <= 0 and copy in self._under_way:
                self._under_way = [other for other in self._under_way if other[2] is not flight]
                self.policy.finished(flight, hedge_won=bool(copy[3]))
                self.wins += bool(copy[3])
                self.latencies_s.append(self.clock.now_s - flight.began_s)


def lognormal(seed: int, median_s: float = 0.06) -> Callable[[], float]:
    source = random.Random(seed)
    return lambda: source.lognormvariate(0.0, 0.6) * median_s


@pytest.mark.parametrize("seed", range(5))
def test_a_lump_of_large_requests_after_small_ones_is_a_queue_and_no_tail(seed: int) -> None:
    lake = Lake(100e6, lognormal(seed, 0.03))
    for _ in range(128):
        lake.ask(50 * KB)
    lake.run(1.0)
    before = len(lake.hedges)
    for _ in range(16):
        lake.ask(4 * MB)
    lake.run(3.0)
    assert len(lake.latencies_s) == 144
    assert max(lake.latencies_s) > 0.6  # the link needs that long, whatever is done
    assert len(lake.hedges) == before
    # Nor did it silence what comes next: 4 MiB that hang are hedged within a few times what the lump took.
    for _ in range(24):
        lake.ask(4 * MB)
        lake.run(0.2)
    lake.clock.now_s += 1
    hanging = lake.policy.started(4 * MB)
    found = due_after_s(lake.policy, lake.clock, hanging, at_most_s=3.0)
    assert found is not None
    assert found <= 1.5


@pytest.mark.parametrize("num_requests", [6, 16])
def test_a_lump_of_a_size_that_is_known_is_a_queue_and_no_tail_too(num_requests: int) -> None:
    lake = Lake(100e6, lambda: 0.03)
    for _ in range(100):
        lake.ask(4 * MB)
        lake.run(0.2)
    for _ in range(num_requests):
        lake.ask(4 * MB)
    lake.run(3.0)
    assert len(lake.latencies_s) == 100 + num_requests
    assert max(lake.latencies_s) > 0.04 * num_requests
    assert not lake.hedges


def test_requests_that_hang_all_at_once_are_not_hedged() -> None:
    clock = Clock()
    policy = learned(clock)
    hanging = [policy.started(1000) for _ in range(16)]
    clock.now_s += 1.0
    assert all(policy.hedge_in_s(flight) > 0 for flight in hanging)
    for flight in hanging[4:]:
        policy.failed(flight)
    assert policy.hedge_in_s(hanging[0]) == 0


@pytest.mark.parametrize("seed", range(5))
def test_an_accident_while_the_first_lump_fills_the_link_is_hedged_soon_after_it(seed: int) -> None:
    waits_s, wait_s = iter([0.02] * 60 + [25.0]), lognormal(seed)
    lake = Lake(100e6, lambda: next(waits_s, None) or wait_s())
    for _ in range(64):
        lake.ask(256 * KB)
    lake.run(4.0, 0.25, lambda: [lake.ask(256 * KB) for _ in range(17)] and None)
    lake.run(1.0)
    assert max(lake.latencies_s) < 2.0
    assert lake.wins >= 1
    assert len(lake.hedges) <= 0.05 * len(lake.latencies_s) + 3


@pytest.mark.parametrize("seed", range(5))
def test_hedges_fall_to_none_when_every_request_is_slow(seed: int) -> None:
    times, slower = lognormal(seed), 1.0
    lake = Lake(100e6, lambda: slower * times())

    def ask() -> None:
        for _ in range(17):
            lake.ask(256 * KB)

    lake.run(10.0, 0.25, ask)
    before, requests = len(lake.hedges), len(lake.latencies_s)
    slower = 10.0
    lake.run(2.0, 0.25, ask)
    assert len(lake.hedges) - before <= 4
    lake.run(20.0, 0.25, ask)
    assert len(lake.hedges) - before <= 0.05 * (len(lake.latencies_s) - requests) + 3


def test_hedges_that_lose_do_not_silence_those_of_requests_that_hang() -> None:
    clock = Clock()
    policy = learned(clock)
    for _ in range(8):
        for _ in range(25):  # earns a hedge, and what was slow is no longer recent
            answered(policy, clock, MB, 0.1)
        assert answered(policy, clock, MB, 0.2)
    for _ in range(25):
        answered(policy, clock, MB, 0.1)
    just_past = policy.started(MB)
    assert due_after_s(policy, clock, just_past, at_most_s=0.18) is None
    policy.failed(just_past)
    hanging = policy.started(MB)
    found = due_after_s(policy, clock, hanging)
    assert found is not None
    assert found <= 0.6
    policy.finished(hanging, hedge_won=True)
    # After 10 s the p95 counts once again.
    clock.now_s += 10
    for _ in range(25):
        answered(policy, clock, MB, 0.1)
    found = due_after_s(policy, clock, policy.started(MB))
    assert found is not None
    assert found <= 0.25


def test_hedges_that_win_go_on() -> None:
    lake = Lake(100e6, lognormal(1))
    source = random.Random(2)
    plain = lake._wait_s
    lake._wait_s = lambda: 5.0 if source.random() < 0.01 else plain()
    lake.run(60.0, 0.25, lambda: [lake.ask(256 * KB) for _ in range(17)] and None)
    assert lake.wins >= 0.4 * len(lake.hedges)
    assert len(lake.hedges) <= 0.05 * len(lake.latencies_s) + 3
    late = sum(latency_s > 1.0 for latency_s in lake.latencies_s)
    assert late <= 0.001 * len(lake.latencies_s)
