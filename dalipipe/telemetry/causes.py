"""What a thread was busy with, moment by moment, so that a wait for it can be charged to what was lacking."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

# Several hundred steps of changes; a wait that is longer than the memory is charged to the oldest cause known.
_REMEMBERED = 16_384


class Causes:
    """A timeline of causes, written by one thread and read by the one that waits for it.

    Args:
        cause: what the thread is busy with at first.
    """

    def __init__(self, cause: str, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._cause = cause
        self._changes: deque[tuple[float, str]] = deque([(clock(), cause)], maxlen=_REMEMBERED)

    def enter(self, cause: str) -> str:
        """From now on the thread is busy with `cause`; returns what it was busy with before."""
        before = self._cause
        if cause != before:
            with self._lock:
                self._changes.append((self._clock(), cause))
            self._cause = cause
        return before

    def fill(self, cause: str, since_s: float) -> None:
        """From `since_s`, no earlier than the last change, until now the thread was busy with `cause`; now it goes on
        with what it was busy with before."""
        if cause == self._cause:
            return
        with self._lock:
            self._changes.append((max(since_s, self._changes[-1][0]), cause))
            self._changes.append((self._clock(), self._cause))

    def charge(self, start_s: float, stop_s: float) -> dict[str, float]:
        """Splits [start_s, stop_s) by cause; the parts sum to its length. Forgets what came before `start_s`."""
        charged: dict[str, float] = {}
        if stop_s <= start_s:
            return charged
        with self._lock:
            until_s = stop_s
            for since_s, cause in reversed(self._changes):
                if since_s >= until_s:
                    continue
                begin_s = max(since_s, start_s)
                charged[cause] = charged.get(cause, 0.0) + until_s - begin_s
                until_s = begin_s
                if since_s <= start_s:
                    break
            if until_s > start_s:
                oldest = self._changes[0][1]
                charged[oldest] = charged.get(oldest, 0.0) + until_s - start_s
            while len(self._changes) > 1 and self._changes[1][0] <= start_s:
                self._changes.popleft()
        return charged
