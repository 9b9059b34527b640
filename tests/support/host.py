"""How fast this host is just now, for deadlines that a loaded one must keep too."""

from __future__ import annotations

import time


def slowness(cpu_s: float = 0.05) -> float:
    """How many times longer than its CPU time some work takes just now; at least 1."""
    began_s, used_s = time.perf_counter(), time.thread_time()
    while time.thread_time() - used_s < cpu_s:
        sum(range(1000))
    return max(1.0, (time.perf_counter() - began_s) / (time.thread_time() - used_s))
