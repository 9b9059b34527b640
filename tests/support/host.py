"""How fast this host is just now, for deadlines that a loaded one must keep too."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


def slowness(cpu_s: float = 0.05) -> float:
    """How many times longer than its CPU time some work takes just now; at least 1."""
    began_s, used_s = time.perf_counter(), time.thread_time()
    while time.thread_time() - used_s < cpu_s:
        sum(range(1000))
    return max(1.0, (time.perf_counter() - began_s) / (time.thread_time() - used_s))


@contextmanager
def within(limit_s: float) -> Iterator[None]:
    """The block must take less than `limit_s`; on a loaded host, as many times longer as that is slow just now."""
    before, began_s = slowness(), time.monotonic()
    yield
    took_s = time.monotonic() - began_s
    if took_s >= limit_s:
        slow = max(before, slowness())
        told = f"{took_s:.2f} s, not the {limit_s:g} s of an idle host; this one is {slow:.1f} times slower"
        assert took_s < limit_s * slow, told
