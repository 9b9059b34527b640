"""When a second request for the same bytes is worth sending.

After J. Dean and L. Barroso, "The Tail at Scale" (CACM 2013): a request that takes longer than the running 95th
percentile is sent again, and the first answer counts. That helps where slowness is a matter of luck. Where it is
not (a throttling store, a slow link, a queue of our own making) it would only add load, so hedges are bounded, wait for
what a queue explains, and need ever more reason when they do not help.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from dalipipe.storage.latency import LatencyHistogram
from dalipipe.storage.throughput import PeakRate

_QUANTILE = 0.95
_BUDGET = 0.05
_MAX_SAVED = 4.0
_RESERVE = 2.0
_FAR = 2.0
_MIN_OBSERVED = 24
_RECENT = 32
_SLOW_SHARE = 0.25
_RECENT_HEDGES = 8
_MIN_WIN_SHARE = 0.25
_PAUSE_S = 10.0
_HALF_LIFE = 200
_FLOOR_S = 0.002
_NEW_SIZE_MARGIN = 3.0
_QUEUE_MARGIN = 1.5
_MORE_PATIENCE = 2.0
_MOST_PATIENCE = 8.0
_LOOK_AGAIN_S = 0.1
_LATER = 1.25


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Flight:
    """A request that is under way.

    Attributes:
        num_bytes: what its answer will hold.
        began_s: when it was sent.
        began_busy_s: the same in seconds in which any request was under way.
        queue_bytes: what was under way when it was sent, itself included.
    """

    num_bytes: int
    began_s: float
    began_busy_s: float
    queue_bytes: int


class HedgePolicy:
    """Decides on hedges from what was seen; sends nothing itself. Thread-safe.

    A request is due for a hedge when it has taken longer than

    - the running p95 of requests of its size. While a size is new, that of the next larger one known, else of the next
      smaller one in proportion to the bytes (at least three times): what is part latency and part transfer grows no
      faster than that;
    - one and a half times what the bytes under way need at the highest rate seen of late, as long as answers still
      come. By J. Little's law (1961) requests take that long on average however the link is shared, so that is a queue
      of our own and no accident.

    Then it is hedged, unless hedges are at 5 % of requests, the store asked to slow down within the last 10 s, or of
    the last 32 requests more than a quarter took longer than their p95, those under way included (slowness is then no
    accident). If so it stays due and is looked at again. Of what the budget has saved, two hedges are kept for requests
    that are twice as late: while training waits for one that hangs, no others are sent that could earn one. After eight
    hedges of which less than a quarter came first, the p95 counts twice for 10 s, after the next eight four times:
    those that lose are for requests just past it, and one that hangs must not suffer for them.
    """

    def __init__(self, *, enabled: bool = True, clock: Callable[[], float] = time.monotonic) -> None:
        self._enabled = enabled
        self._clock = clock
        self._lock = threading.Lock()
        self._latency: dict[int, LatencyHistogram] = {}
        self._rate = PeakRate()
        self._flights: dict[Flight, bool] = {}
        self._queue_bytes = 0
        self._idle_s = 0.0
        self._idle_since_s = self._answered_at_s = clock()
        self._recent_slow: deque[bool] = deque(maxlen=_RECENT)
        self._recent_won: deque[bool] = deque(maxlen=_RECENT_HEDGES)
        self._saved = _RESERVE
        self._patience = 1.0
        self._patient_until_s = self._paused_until_s = float("-inf")

    def started(self, num_bytes: int) -> Flight:
        """A request is sent; it earns 5 % of a hedge. `finished` or `failed` must follow."""
        if not self._enabled:
            return Flight(num_bytes=num_bytes, began_s=0.0, began_busy_s=0.0, queue_bytes=0)
        with self._lock:
            now_s = self._clock()
            self._saved = min(_MAX_SAVED, self._saved + _BUDGET)
            if not self._flights:
                self._idle_s += now_s - self._idle_since_s
            self._queue_bytes += num_bytes
            flight = Flight(
                num_bytes=num_bytes,
                began_s=now_s,
                began_busy_s=now_s - self._idle_s,
                queue_bytes=self._queue_bytes,
            )
            self._flights[flight] = False
            return flight

    def hedge_in_s(self, flight: Flight) -> float:
        """In how many seconds to ask again; 0 when the hedge is to be sent now, which is then paid for and counted."""
        if not self._enabled:
            return float("inf")
        with self._lock:
            now_s = self._clock()
            threshold_s = self._threshold_s(flight.num_bytes)
            if threshold_s is None:
                return _LOOK_AGAIN_S
            queueing_s, waited_s = self._queueing_s(flight), now_s - flight.began_s
            due_s = max(self._patience_at(now_s) * threshold_s, queueing_s)
            if waited_s < due_s:
                return due_s - waited_s
            far = waited_s >= max(_FAR * threshold_s, queueing_s)
            enough = self._saved >= (1.0 if far else 1.0 + _RESERVE)
            if now_s < self._paused_until_s or not enough or self._is_slow_everywhere(flight, now_s):
                return max(_LOOK_AGAIN_S, (_LATER - 1) * waited_s)
            self._saved -= 1.0
            self._flights[flight] = True
            return 0.0

    def finished(self, flight: Flight, *, hedge_won: bool = False) -> None:
        """The request was answered, by itself or by its hedge (it alone would have taken longer)."""
        if not self._enabled:
            return
        with self._lock:
            now_s = self._clock()
            if self._ended(flight, now_s):
                self._recent_won.append(hedge_won)
                if len(self._recent_won) == _RECENT_HEDGES and sum(self._recent_won) < _MIN_WIN_SHARE * _RECENT_HEDGES:
                    self._patience = min(_MOST_PATIENCE, _MORE_PATIENCE * self._patience_at(now_s))
                    self._patient_until_s = now_s + _PAUSE_S
                    self._recent_won.clear()
            self._answered_at_s = now_s
            latency_s = now_s - flight.began_s
            threshold_s = self._threshold_s(flight.num_bytes)
            if threshold_s is not None:
                self._recent_slow.append(latency_s > threshold_s)
            key = flight.num_bytes.bit_length()
            self._latency.setdefault(key, LatencyHistogram(_HALF_LIFE)).add(latency_s)
            if flight.num_bytes:
                self._rate.add(flight.began_busy_s, now_s - self._idle_s, flight.num_bytes)

    def failed(self, flight: Flight) -> None:
        """The request and its hedge, if any, came to nothing, or nobody waits for them any more."""
        if not self._enabled:
            return
        with self._lock:
            self._ended(flight, self._clock())

    def throttled(self) -> None:
        """The store asked to slow down (503 or 429)."""
        with self._lock:
            self._paused_until_s = self._clock() + _PAUSE_S

    def _ended(self, flight: Flight, now_s: float) -> bool:
        """Takes the request out of what is under way; whether it was hedged."""
        was_hedged = self._flights.pop(flight)
        self._queue_bytes -= flight.num_bytes
        if not self._flights:
            self._idle_since_s = now_s
        return was_hedged

    def _patience_at(self, now_s: float) -> float:
        return self._patience if now_s < self._patient_until_s else 1.0

    def _queueing_s(self, flight: Flight) -> float:
        """How long after its start `flight` may be waiting in a queue of our own."""
        rate = self._rate.bytes_per_s
        if not rate:
            return 0.0
        queue_s = _QUEUE_MARGIN * max(flight.queue_bytes, self._queue_bytes) / rate
        # A queue moves: in the time that all of what is under way needs, something of it is answered.
        still_s = max(0.0, self._answered_at_s - flight.began_s) + _QUEUE_MARGIN * self._queue_bytes / rate
        return min(queue_s, still_s)

    def _is_slow_everywhere(self, asking: Flight, now_s: float) -> bool:
        slow = sum(self._recent_slow)
        thresholds_s: dict[int, float | None] = {}
        for flight, is_hedged in self._flights.items():
            if flight is asking or is_hedged:
                continue
            key = flight.num_bytes.bit_length()
            if key not in thresholds_s:
                thresholds_s[key] = self._threshold_s(flight.num_bytes)
            threshold_s = thresholds_s[key]
            slow += threshold_s is not None and now_s - flight.began_s > threshold_s
        return slow > _SLOW_SHARE * _RECENT

    def _threshold_s(self, num_bytes: int) -> float | None:
        key = num_bytes.bit_length()
        known = [size for size, seen in self._latency.items() if seen.num_observed >= _MIN_OBSERVED]
        if not known:
            return None
        size = min((size for size in known if size >= key), default=max(known))
        if not key and size:  # how much will come is not known before it does
            size = max(known)
        margin = 1.0 if size >= key > 0 or size == key else max(_NEW_SIZE_MARGIN, 2.0 ** (key - size))
        return max(_FLOOR_S, margin * self._latency[size].quantile_s(_QUANTILE))
