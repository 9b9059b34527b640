from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dalipipe.storage.latency import LatencyHistogram


@given(st.lists(st.floats(2e-4, 100), min_size=1, max_size=200), st.floats(0.01, 1))
def test_a_quantile_is_right_within_a_bucket(latencies_s: list[float], share: float) -> None:
    histogram = LatencyHistogram(half_life=10**9)
    for latency_s in latencies_s:
        histogram.add(latency_s)
    ordered = np.sort(latencies_s)
    exact = ordered[max(0, int(np.ceil(share * len(ordered) - 1e-6)) - 1)]
    assert exact * 0.999 <= histogram.quantile_s(share) <= exact * 2 ** (1 / 8) * 1.001
    assert abs(histogram.mean_s() - np.mean(latencies_s)) <= 1e-6 * np.mean(latencies_s)


def test_old_observations_fade() -> None:
    histogram = LatencyHistogram(half_life=50)
    for latency_s in [1.0] * 500 + [0.01] * 500:
        histogram.add(latency_s)
    assert histogram.quantile_s(0.95) < 0.02


def test_nothing_seen_is_zero() -> None:
    assert (LatencyHistogram().quantile_s(0.95), LatencyHistogram().mean_s()) == (0.0, 0.0)


def test_long_runs_do_not_overflow() -> None:
    histogram = LatencyHistogram(half_life=5)
    for _ in range(20_000):
        histogram.add(0.5)
    assert 0.5 <= histogram.quantile_s(0.5) < 0.55
