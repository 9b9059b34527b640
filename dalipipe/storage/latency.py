"""How long things take lately: a histogram that forgets."""

from __future__ import annotations

from bisect import bisect_right

_LOWEST_S = 1e-4
_GROWTH = 2 ** (1 / 8)  # eight buckets an octave: a quantile is read within 9 %
_NUM_BUCKETS = 8 * 21  # 0.1 ms to 200 s
_EDGES = [_LOWEST_S * _GROWTH**i for i in range(_NUM_BUCKETS)]


class LatencyHistogram:
    """Counts by logarithmic bucket, each new one weighing a little more than the one before (exponential decay).

    Not thread-safe: the owner's lock guards it.

    Args:
        half_life: observations after which one counts half.
    """

    def __init__(self, half_life: int = 500) -> None:
        self._growth = 2 ** (1 / half_life)
        self._weight = 1.0
        self._counts = [0.0] * (_NUM_BUCKETS + 1)
        self._total = 0.0
        self._sum_s = 0.0
        self.num_observed = 0

    def add(self, latency_s: float) -> None:
        """Takes one observation into account."""
        # Growing weights instead of shrinking counts: an observation costs one addition.
        self._counts[bisect_right(_EDGES, latency_s)] += self._weight
        self._total += self._weight
        self._sum_s += self._weight * latency_s
        self.num_observed += 1
        self._weight *= self._growth
        if self._weight > 1e12:
            self._rescale()

    def mean_s(self) -> float:
        """The mean; 0 before the first observation."""
        return self._sum_s / self._total if self._total else 0.0

    def quantile_s(self, share: float) -> float:
        """The latency that `share` of the observations stay below (upper edge of the bucket); 0 before the first."""
        if not self._total:
            return 0.0
        wanted, seen = share * self._total, 0.0
        for i, count in enumerate(self._counts):
            seen += count
            if count and seen >= wanted * (1 - 1e-6):
                return _EDGES[min(i, _NUM_BUCKETS - 1)]
        return _EDGES[-1]

    def _rescale(self) -> None:
        self._counts = [count / self._weight for count in self._counts]
        self._total /= self._weight
        self._sum_s /= self._weight
        self._weight = 1.0
