"""Made-up time, and what takes time in it."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count


class Events:
    """What happens when, in order of time and, at one time, of being planned."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def at(self, at_s: float, action: Callable[[], None]) -> None:
        """`action` happens at `at_s`, or now where that is past."""
        heapq.heappush(self._heap, (max(at_s, self.now_s), next(self._numbers), action))

    def step(self) -> bool:
        """Lets the next thing happen; False when there is none."""
        if not self._heap:
            return False
        self.now_s, _, action = heapq.heappop(self._heap)
        action()
        return True


class Pipe:
    """A link or disk that all transfers under way share equally, as connections over one network do.

    Args:
        rate: bytes a second; None: no limit.
        crowd: how many alike send through it for each one that is simulated, itself included, and at about the same
            time.
    """

    def __init__(self, events: Events, rate: float | None, crowd: float = 1.0) -> None:
        self._events = events
        self._rate = rate
        self._crowd = crowd
        self._served_bytes = 0.0  # what each transfer has got that has been under way since the start
        self._at_s = 0.0
        self._ends: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._version = 0

    def serve(self, num_bytes: int, done: Callable[[], None]) -> None:
        """A transfer begins now; `done` is called when it is through."""
        if self._rate is None:
            self._events.at(self._events.now_s, done)
            return
        self._advance()
        heapq.heappush(self._ends, (self._served_bytes + num_bytes, next(self._numbers), done))
        self._plan()

    def _advance(self) -> None:
        if self._ends:
            self._served_bytes += (self._events.now_s - self._at_s) * self._share()
        self._at_s = self._events.now_s

    def _share(self) -> float:
        assert self._rate is not None
        return self._rate / (len(self._ends) * self._crowd)

    def _plan(self) -> None:
        """The end of the transfer that is through first is an event, until another one begins or ends."""
        self._version += 1
        version, left_bytes = self._version, max(0.0, self._ends[0][0] - self._served_bytes)

        def ended() -> None:
            if version != self._version:
                return
            self._advance()
            end_bytes, _, done = heapq.heappop(self._ends)
            self._served_bytes = max(self._served_bytes, end_bytes)
            if self._ends:
                self._plan()
            done()

        self._events.at(self._events.now_s + left_bytes / self._share(), ended)
