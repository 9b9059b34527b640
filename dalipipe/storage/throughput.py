"""How many bytes a second come at most, judged by when requests began and ended."""

from __future__ import annotations

_BUCKET_S = 0.1
_WINDOW = 4
_NUM_KEPT = 32
_FADE = 0.98


class PeakRate:
    """The highest rate of the last seconds: an estimate of what the way to the store carries.

    The bytes of an answer are spread evenly over the time that its request took. Requests that share a link end
    together, and bytes counted when they end would make every lump look like a faster link. The rate is taken over
    0.4 s, and the highest fades by 2 % with each tenth of a second in which something came. Not thread-safe: the
    owner's lock guards it. Times are those of a clock that does not go backwards; one that stands still while nothing
    is asked for keeps pauses out.
    """

    def __init__(self) -> None:
        self._buckets = [0.0] * _NUM_KEPT
        self._newest = -1
        self._first_s = 0.0
        self._peak = 0.0

    @property
    def bytes_per_s(self) -> float:
        """The estimate; 0 before the first answer."""
        return self._peak

    def add(self, began_s: float, ended_s: float, num_bytes: int) -> None:
        """An answer of `num_bytes` was asked for at `began_s` and is whole at `ended_s`, which is now."""
        first, last = int(began_s / _BUCKET_S), int(ended_s / _BUCKET_S)
        if self._newest < 0:
            self._first_s, self._newest = began_s, last
        self._move_on(last)
        share = num_bytes / (last - first + 1)
        first = max(first, last - _NUM_KEPT + _WINDOW)
        for bucket in range(first, last + 1):
            self._buckets[bucket % _NUM_KEPT] += share
        window_s = min(_WINDOW * _BUCKET_S, max(_BUCKET_S, ended_s - self._first_s))
        for stop in range(first + 1, last + 2):
            window_bytes = sum(self._buckets[bucket % _NUM_KEPT] for bucket in range(stop - _WINDOW, stop))
            self._peak = max(self._peak, window_bytes / window_s)

    def _move_on(self, newest: int) -> None:
        if newest > self._newest:
            for bucket in range(max(self._newest, newest - _NUM_KEPT) + 1, newest + 1):
                self._buckets[bucket % _NUM_KEPT] = 0.0
            self._newest = newest
            self._peak *= _FADE
