"""What the host says about this process: CPU time by thread, memory, what the page cache holds."""

from __future__ import annotations

import ctypes
import ctypes.util
import mmap
import os
import threading
from collections.abc import Sequence
from pathlib import Path

_DECODE_NAMES = ("dalipipe-resize", "dalipipe-assemble", "dalipipe-batches", "[DALI]")
_FETCH_NAMES = ("dalipipe-fetch",)
_MOST_BYTES = 64 * 2**20


class ThreadCpu:
    """CPU seconds of this process's threads by kind: `decode`, `fetch` and `other`, ended ones as last seen."""

    def __init__(self) -> None:
        self._last_s: dict[int, float] = {}
        self._seconds = {"decode": 0.0, "fetch": 0.0, "other": 0.0}

    def read(self, names: dict[int, str]) -> dict[str, float]:
        """The cumulative seconds.

        Args:
            names: by native thread id, the names that Python knows; others have the kernel's.
        """
        tick_s = 1.0 / os.sysconf("SC_CLK_TCK")
        for task in Path("/proc/self/task").iterdir():
            try:
                head, _, rest = (task / "stat").read_text().rpartition(")")
            except OSError:  # it ended meanwhile
                continue
            number = int(task.name)
            name = names.get(number, head.partition("(")[2])
            fields = rest.split()
            seconds = (int(fields[11]) + int(fields[12])) * tick_s
            kind = "fetch" if name.startswith(_FETCH_NAMES) else "decode" if name.startswith(_DECODE_NAMES) else "other"
            # A number that is used again starts from 0.
            self._seconds[kind] += seconds - min(seconds, self._last_s.get(number, 0.0))
            self._last_s[number] = seconds
        return dict(self._seconds)


def python_threads() -> dict[int, str]:
    """Names of Python's threads by native id."""
    return {thread.native_id: thread.name for thread in threading.enumerate() if thread.native_id is not None}


def memory_bytes(*, root: Path = Path("/")) -> int:
    """Memory that this process may use: that of the host, or the limit of its control group."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for name in ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limits.append(int((root / name).read_text()))
        except (OSError, ValueError):
            continue
    return min(limits)


def resident_share(paths: Sequence[Path]) -> float:
    """The share of the bytes of these files (64 MiB of each at most) that lies in the page cache; 0 when unknown."""
    libc = ctypes.CDLL(ctypes.util.find_library("c"), use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    resident = pages = 0
    for path in paths:
        try:
            with path.open("rb") as file:
                num_bytes = min(os.fstat(file.fileno()).st_size, _MOST_BYTES)
                if num_bytes == 0:
                    continue
                address = libc.mmap(None, num_bytes, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
        except OSError:
            continue
        if address in (None, ctypes.c_void_p(-1).value):
            continue
        num_pages = -(-num_bytes // mmap.PAGESIZE)
        found = ctypes.create_string_buffer(num_pages)
        if libc.mincore(address, num_bytes, found) == 0:
            resident += sum(byte & 1 for byte in found.raw)
            pages += num_pages
        libc.munmap(address, num_bytes)
    return resident / pages if pages else 0.0
