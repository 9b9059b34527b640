"""Memory for what is read, used again: a fresh page costs the kernel more than the bytes that are put into it."""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections import deque

_SMALLEST_BYTES = 256 << 10
_IDLE_BYTES = 64 << 20
_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


class BufferPool:
    """Lends memory that comes back by itself when nobody looks at it any more. Thread-safe.

    Sizes are powers of two from 256 KiB on, of which only the pages that were written to take memory.

    Args:
        idle_bytes: what may lie here unused; more goes back to the system.
    """

    def __init__(self, *, idle_bytes: int = _IDLE_BYTES) -> None:
        self._most_bytes = idle_bytes
        self._idle: dict[int, deque[mmap.mmap]] = {}

    @property
    def idle_bytes(self) -> int:
        """What lies here unused."""
        return sum(size_bytes * len(regions) for size_bytes, regions in list(self._idle.items()))

    def take(self, num_bytes: int) -> memoryview:
        """Writable memory, uint8 [num_bytes], with whatever was in it before. It is free again when the last view or
        array over it is dead, so nobody needs to give it back, and nobody can too early."""
        if num_bytes < _SMALLEST_BYTES:
            return memoryview(bytearray(num_bytes))
        size_bytes = 1 << (num_bytes - 1).bit_length()
        try:
            region = self._idle[size_bytes].pop()  # the one that was used last is the likeliest to be in a CPU's cache
        except (KeyError, IndexError):
            region = mmap.mmap(-1, size_bytes, flags=_FLAGS)
        lent = (ctypes.c_ubyte * num_bytes).from_buffer(region)
        weakref.finalize(lent, self._give_back, region).atexit = False
        return memoryview(lent).cast("B")

    def _give_back(self, region: mmap.mmap) -> None:
        # Without a lock: this runs wherever the last view dies, also in the midst of `take`.
        size_bytes = len(region)
        if self.idle_bytes + size_bytes <= self._most_bytes:
            self._idle.setdefault(size_bytes, deque()).append(region)
