"""How long a request to the lake takes: declared by two quantiles, or as a run measured it."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from statistics import NormalDist
from typing import Protocol

_Z99 = NormalDist().inv_cdf(0.99)
_SMALLEST = 1e-12
_STEPS_A_BUCKET = 16


class Latency(Protocol):
    """A distribution of latencies."""

    def at(self, share: float) -> float:
        """Seconds that `share` in [0, 1] of the requests stay below."""

    def describe(self) -> str:
        """For people."""


class LognormalLatency:
    """Lognormal between a median and a 99th percentile; 0 and 0 is no latency at all. `source`: who says so."""

    def __init__(self, median_s: float, p99_s: float, source: str = "declared") -> None:
        self._source = source
        self._median_s = median_s
        self._p99_s = p99_s
        self._sigma = math.log(p99_s / median_s) / _Z99 if median_s > 0 else 0.0

    def at(self, share: float) -> float:
        """As `Latency.at`; the last of 10^12 requests is as long as it gets."""
        if not self._sigma:
            return self._median_s
        share = min(max(share, _SMALLEST), 1 - _SMALLEST)
        return self._median_s * math.exp(self._sigma * NormalDist().inv_cdf(share))

    def describe(self) -> str:
        """As `Latency.describe`."""
        return f"median {1000 * self._median_s:.3g} ms, 99 % below {1000 * self._p99_s:.3g} ms ({self._source})"


class MeasuredLatency:
    """The histogram of a run; inside a bucket the logarithm of the latency is uniform.

    Buckets are coarse, so all of it is stretched until its mean is the one that was measured.

    Args:
        bounds_s: ascending upper bounds.
        counts: one a bound, and one for what is slower than the last.
        sum_s: of all latencies.
    """

    def __init__(self, bounds_s: Sequence[float], counts: Sequence[float], sum_s: float) -> None:
        if not sum(counts) > 0 or len(counts) != len(bounds_s) + 1:
            raise ValueError("a histogram of latencies needs a count, one a bound and one beyond the last")
        self._edges = [bounds_s[0] / 2, *bounds_s, bounds_s[-1] * 2]
        self._counts = list(counts)
        self._below = list(accumulate(counts))
        self._stretch = 1.0
        num = int(self._below[-1]) * _STEPS_A_BUCKET
        num = min(max(num, 1_000), 20_000)
        mean_s = sum(self.at((i + 0.5) / num) for i in range(num)) / num
        self._stretch = sum_s / self._below[-1] / mean_s if sum_s > 0 else 1.0

    def at(self, share: float) -> float:
        """As `Latency.at`."""
        wanted = share * self._below[-1]
        place = min(bisect_left(self._below, wanted), len(self._counts) - 1)
        while place and not self._counts[place]:
            place -= 1
        low, high = self._edges[place], self._edges[place + 1]
        before = self._below[place] - self._counts[place]
        inside = (wanted - before) / self._counts[place] if self._counts[place] else 1.0
        return float(self._stretch * low * (high / low) ** min(max(inside, 0.0), 1.0))

    def describe(self) -> str:
        """As `Latency.describe`."""
        median_ms, p99_ms = 1000 * self.at(0.5), 1000 * self.at(0.99)
        return f"median {median_ms:.3g} ms, 99 % below {p99_ms:.3g} ms ({self._below[-1]:,.0f} blocks of the run)"
