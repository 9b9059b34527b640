"""Blocks in memory that live only while somebody holds them."""

from __future__ import annotations

import threading
from collections.abc import Callable

from dalipipe.cache.lake import Fetched
from dalipipe.errors import CacheTimeoutError


class _Flight:
    __slots__ = ("data", "error", "holders", "landed")

    def __init__(self) -> None:
        self.landed = threading.Event()
        self.data: Fetched | None = None
        self.error: Exception | None = None
        self.holders = 1


class Flights:
    """One read for all threads that ask for a block while it is being read or held.

    Args:
        wait_s: how long a thread waits for another's read.
        on_last: called with a block when its last holder has let it go; a new `get` of it waits until then.
    """

    def __init__(self, wait_s: float, on_last: Callable[[int], None]) -> None:
        self._wait_s = wait_s
        self._on_last = on_last
        self._lock = threading.Lock()
        self._flights: dict[int, _Flight] = {}

    def contains(self, block: int) -> bool:
        """Whether the block is held in memory just now."""
        with self._lock:
            flight = self._flights.get(block)
            return flight is not None and flight.data is not None

    def get(self, block: int, read: Callable[[int], Fetched]) -> tuple[Fetched, bool]:
        """Returns the block's bytes and whether somebody else had read them. Each `get` needs one `release`.

        Raises what the read raises, for all that wait for it, and CacheTimeoutError when another thread's read takes
        longer than the deadline.
        """
        while True:
            with self._lock:
                flight = self._flights.get(block)
                leads = flight is None
                if flight is None:
                    flight = self._flights[block] = _Flight()
                else:
                    flight.holders += 1
            if leads:
                return self._lead(block, flight, read), False
            if not flight.landed.wait(self._wait_s):
                self.release(block)
                raise CacheTimeoutError(
                    f"waited {self._wait_s:g} s for block {block}, which another thread of this process is reading "
                    "from the lake; raise cache.wait_s, or lower storage.request_timeout_s"
                )
            if flight.data is not None:
                return flight.data, True
            if flight.error is not None:
                raise flight.error
            # Whoever read it with others gave it up.

    def begin(self, block: int) -> bool:
        """Whether this thread is to read the block, since nobody reads or holds it; ends by `land` or `abandon`."""
        with self._lock:
            if block in self._flights:
                return False
            self._flights[block] = _Flight()
            return True

    def land(self, block: int, data: Fetched) -> None:
        """The bytes of a block that was begun; it needs one `release`, as after `get`."""
        with self._lock:
            flight = self._flights[block]
        flight.data = data
        flight.landed.set()

    def abandon(self, block: int) -> None:
        """A block that was begun did not come; whoever waits for it reads it alone."""
        with self._lock:
            flight = self._flights.pop(block)
        flight.landed.set()

    def release(self, block: int) -> None:
        """Ends one hold; with the last one the bytes are let go."""
        with self._lock:
            flight = self._flights.get(block)
            if flight is None:
                return
            flight.holders -= 1
            if flight.holders <= 0:
                del self._flights[block]
                self._on_last(block)

    def _lead(self, block: int, flight: _Flight, read: Callable[[int], Fetched]) -> Fetched:
        try:
            flight.data = read(block)
            return flight.data
        except Exception as error:
            flight.error = error
            raise
        finally:
            if flight.data is None:
                with self._lock:
                    self._flights.pop(block, None)
            flight.landed.set()
