"""When a second request for the same bytes is worth sending.

After J. Dean and L. Barroso, "The Tail at Scale" (CACM 2013): a request that takes longer than the running 95th
percentile is sent again, and the first answer counts. That helps where slowness is a matter of luck. Where it is
not (a throttling store, a slow link) it would only add load, so hedges are bounded and stop when they do not help.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from dalipipe.storage.latency import LatencyHistogram

_QUANTILE = 0.95
_BUDGET = 0.05
_MAX_SAVED = 2.0
_MIN_OBSERVED = 24
_RECENT = 32
_SLOW_SHARE = 0.25
_RECENT_HEDGES = 8
_MIN_WIN_SHARE = 0.25
_PAUSE_S = 10.0
_HALF_LIFE = 200
_FLOOR_S = 0.002
_MARGIN = 3.0


class HedgePolicy:
    """Decides on hedges from what was seen; sends nothing itself. Thread-safe.

    Rules: the threshold is the running p95 of requests of similar size (three times that of all sizes while a size is
    new); hedges are at most 5 % of requests; none for
    10 s after the store asked to slow down; none while more than a quarter of the last 32 requests took longer than
    the threshold (then slowness is no accident); none for 10 s after a series of hedges that did not come first.
    """

    def __init__(self, *, enabled: bool = True, clock: Callable[[], float] = time.monotonic) -> None:
        self._enabled = enabled
        self._clock = clock
        self._lock = threading.Lock()
        self._latency: dict[int, LatencyHistogram] = {}
        self._all = LatencyHistogram(_HALF_LIFE)
        self._recent_slow: deque[bool] = deque(maxlen=_RECENT)
        self._recent_won: deque[bool] = deque(maxlen=_RECENT_HEDGES)
        self._saved = 1.0
        self._paused_until_s = float("-inf")

    def threshold_s(self, num_bytes: int) -> float | None:
        """How long to wait before a hedge; None while too little is known, or hedging is off."""
        with self._lock:
            return self._threshold_s(num_bytes) if self._enabled else None

    def started(self) -> None:
        """Counts a request: it earns 5 % of a hedge."""
        with self._lock:
            self._saved = min(_MAX_SAVED, self._saved + _BUDGET)

    def may_hedge(self) -> bool:
        """Whether to send the hedge now; True spends one of the budget."""
        with self._lock:
            if not self._enabled or self._clock() < self._paused_until_s or self._saved < 1.0:
                return False
            if sum(self._recent_slow) > _SLOW_SHARE * _RECENT:
                return False
            self._saved -= 1.0
            return True

    def finished(self, num_bytes: int, latency_s: float) -> None:
        """A request was answered, or beaten by its hedge after `latency_s` (its true latency is at least that)."""
        with self._lock:
            threshold_s = self._threshold_s(num_bytes)
            if threshold_s is not None:
                self._recent_slow.append(latency_s > threshold_s)
            key = num_bytes.bit_length()
            self._latency.setdefault(key, LatencyHistogram(_HALF_LIFE)).add(latency_s)
            self._all.add(latency_s)

    def hedged(self, *, won: bool) -> None:
        """How a hedge ended: whether it came first."""
        with self._lock:
            self._recent_won.append(won)
            if len(self._recent_won) == _RECENT_HEDGES and sum(self._recent_won) < _MIN_WIN_SHARE * _RECENT_HEDGES:
                self._pause()

    def throttled(self) -> None:
        """The store asked to slow down (503 or 429)."""
        with self._lock:
            self._pause()

    def _pause(self) -> None:
        self._paused_until_s = self._clock() + _PAUSE_S
        self._recent_won.clear()

    def _threshold_s(self, num_bytes: int) -> float | None:
        histogram = self._latency.get(num_bytes.bit_length())
        if histogram is not None and histogram.num_observed >= _MIN_OBSERVED:
            return max(_FLOOR_S, histogram.quantile_s(_QUANTILE))
        if self._all.num_observed >= _MIN_OBSERVED:
            # A size that is new: larger ones may take longer, so that the others' figures are taken with a margin.
            return max(_FLOOR_S, _MARGIN * self._all.quantile_s(_QUANTILE))
        return None
