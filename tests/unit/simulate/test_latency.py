"""Distributions of latencies."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dalipipe.simulate.latency import Latency, LognormalLatency, MeasuredLatency
from dalipipe.telemetry import LATENCY_BOUNDS_S, Recorder

SHARES = st.floats(0, 1)


def test_a_lognormal_has_the_quantiles_that_were_declared() -> None:
    latency = LognormalLatency(0.05, 0.3)
    assert latency.at(0.5) == pytest.approx(0.05)
    assert latency.at(0.99) == pytest.approx(0.3)
    assert LognormalLatency(0.0, 0.0).at(0.7) == 0.0
    assert LognormalLatency(0.2, 0.2).at(0.999) == 0.2


def test_a_measured_histogram_keeps_its_buckets_and_its_mean() -> None:
    recorder = Recorder()
    seen = [0.011, 0.013, 0.02, 0.022, 0.03, 0.04, 0.06, 0.07, 0.2, 3.0] * 20
    for seconds in seen:
        recorder.observe("x", seconds)
    *counts, sum_s = recorder.histograms()["x"]
    latency = MeasuredLatency(LATENCY_BOUNDS_S, counts, sum_s)
    drawn = [latency.at((i + 0.5) / 4000) for i in range(4000)]
    assert sum(drawn) / len(drawn) == pytest.approx(sum(seen) / len(seen), rel=0.01)
    for share in (0.2, 0.55, 0.75, 0.85):
        true = sorted(seen)[int(share * len(seen))]
        assert true / 3 < latency.at(share) < 3 * true
    assert latency.at(0.95) > 1.5


@pytest.mark.parametrize(
    "latency",
    [
        LognormalLatency(0.05, 0.3),
        MeasuredLatency((0.1, 0.2, 0.5), (3, 0, 4, 1), 2.0),
        MeasuredLatency((1.0,), (0, 5), 9),
    ],
)
@given(low=SHARES, high=SHARES)
def test_a_larger_share_takes_no_less(latency: Latency, low: float, high: float) -> None:
    low, high = sorted((low, high))
    assert 0 < latency.at(low) <= latency.at(high)


def test_an_empty_histogram_is_none() -> None:
    with pytest.raises(ValueError, match="a histogram of latencies needs a count"):
        MeasuredLatency((1.0,), (0, 0), 0.0)
