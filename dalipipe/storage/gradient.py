"""How many requests at once: as many as make the store faster, no more."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

_START = 32
_MIN_WINDOW = 16
_MIN_WINDOW_S = 0.25
_LATENCY_RISE = 1.5
_THROUGHPUT_GAIN = 1.2
_THROUGHPUT_KEPT = 0.9
_QUEUE_RISE = 2.0
_MAX_REST = 64
_THROTTLE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    """The limit was changed; these were the figures before."""

    limit: int
    latency_s: float
    throughput: float


class GradientLimit:
    """A limit of requests in flight that follows latency and throughput. Thread-safe.

    Hill climbing on the gradient of latency: when the limit binds, it is doubled for a window of requests; when the
    median latency rose by more than half and throughput by less than a fifth, the requests only queued, and the old
    limit comes back. While latency is above twice the best seen, half the limit is tried the same way and kept when
    throughput does not suffer. Each failed trial doubles the windows until the next. A store that asks to slow down
    halves the limit at once, at most once a second. Slowness that does not depend on the limit leaves it alone, as a
    slower store needs more requests in flight (Little's law), not fewer.
    """

    def __init__(self, maximum: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._maximum = maximum
        self._minimum = min(2, maximum)
        self._limit = min(_START, maximum)
        self._clock = clock
        self._free = threading.Condition()
        self._in_flight = self._peak = 0
        self._latencies_s: list[float] = []
        self._bytes = 0
        self._window_at_s = clock()
        self._best_s = float("inf")
        self._trial: _Trial | None = None
        self._rest = self._next_rest = 1
        self._throttled_s = float("-inf")
        self._closed = False

    @property
    def limit(self) -> int:
        """Requests that may be in flight just now."""
        return self._limit

    def acquire(self, timeout_s: float) -> bool:
        """Waits for a free place; False when there was none in time or `close` was called."""
        with self._free:
            if not self._free.wait_for(lambda: self._in_flight < self._limit or self._closed, timeout_s):
                return False
            self._in_flight += 1
            self._peak = max(self._peak, self._in_flight)
            return not self._closed

    def release(self) -> None:
        """Gives the place back."""
        with self._free:
            self._in_flight -= 1
            self._free.notify()

    def close(self) -> None:
        """Wakes everybody who waits."""
        with self._free:
            self._closed = True
            self._free.notify_all()

    def finished(self, num_bytes: int, latency_s: float) -> None:
        """A request of `num_bytes` was answered."""
        with self._free:
            self._latencies_s.append(latency_s)
            self._bytes += num_bytes
            now_s = self._clock()
            elapsed_s = now_s - self._window_at_s
            if len(self._latencies_s) < max(_MIN_WINDOW, 2 * self._limit) or elapsed_s < _MIN_WINDOW_S:
                return
            self._decide(statistics.median(self._latencies_s), self._bytes / elapsed_s)
            self._latencies_s, self._bytes, self._window_at_s = [], 0, now_s
            self._peak = self._in_flight
            self._free.notify_all()

    def throttled(self) -> None:
        """The store asked to slow down."""
        with self._free:
            now_s = self._clock()
            if now_s - self._throttled_s < _THROTTLE_S:
                return
            self._throttled_s = now_s
            self._limit = max(self._minimum, self._limit // 2)
            self._trial = None
            self._rest = self._next_rest = min(_MAX_REST, 2 * self._next_rest)

    def _decide(self, latency_s: float, throughput: float) -> None:
        # The best latency is forgotten slowly: the path to the store may have changed.
        self._best_s = min(self._best_s * 1.01, latency_s)
        trial, self._trial = self._trial, None
        if trial is not None:
            self._judge(trial, latency_s, throughput)
            return
        if self._peak < self._limit:
            return
        if self._rest > 0:
            self._rest -= 1
            return
        if latency_s > _QUEUE_RISE * self._best_s and self._limit > self._minimum:
            self._try(max(self._minimum, self._limit // 2), latency_s, throughput)
        elif self._limit < self._maximum:
            self._try(min(self._maximum, 2 * self._limit), latency_s, throughput)

    def _try(self, limit: int, latency_s: float, throughput: float) -> None:
        self._trial = _Trial(limit=self._limit, latency_s=latency_s, throughput=throughput)
        self._limit = limit

    def _judge(self, trial: _Trial, latency_s: float, throughput: float) -> None:
        if self._limit > trial.limit:
            queued = latency_s > _LATENCY_RISE * trial.latency_s and throughput < _THROUGHPUT_GAIN * trial.throughput
        else:
            queued = throughput < _THROUGHPUT_KEPT * trial.throughput
        if queued:
            self._limit = trial.limit
            self._rest = self._next_rest
            self._next_rest = min(_MAX_REST, 2 * self._next_rest)
        else:
            self._rest = self._next_rest = 1
