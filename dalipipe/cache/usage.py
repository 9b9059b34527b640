"""When and how often blocks were used, shared by all processes of a node."""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

USAGE_NAME = "usage"
_RECORD = struct.Struct("<dII")  # seconds since 1970, uses, unused
_RECORDS = np.dtype([("last_s", "<f8"), ("uses", "<u4"), ("unused", "<u4")])
_AGE_AT_MEAN_USES = 8


class UsageTable:
    """One record of 16 bytes a block in a sparse file. A hint, not an account: a use that two processes count at the
    same instant may be counted once, and what a power cut does to it costs a few hits.

    Args:
        path: the file; made when missing.
        clock: seconds since 1970.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def used(self, block: int) -> None:
        """Counts a use just now: two system calls on 16 bytes in the page cache."""
        with self._lock:  # against `close`: a number of a closed file may be another file's by now
            if self._descriptor < 0:
                return
            data = os.pread(self._descriptor, _RECORD.size, block * _RECORD.size).ljust(_RECORD.size, b"\0")
            uses = _RECORD.unpack(data)[1]
            record = _RECORD.pack(self._clock(), min(uses + 1, 2**32 - 1), 0)
            os.pwrite(self._descriptor, record, block * _RECORD.size)

    def read(self, blocks: range) -> npt.NDArray[np.void]:
        """[len(blocks)] with `last_s` (float64, time of last use) and `uses` (uint32); zeros where there was none."""
        num_bytes = len(blocks) * _RECORD.size
        with self._lock:
            data = b""
            if self._descriptor >= 0:
                data = os.pread(self._descriptor, num_bytes, blocks.start * _RECORD.size)
        return np.frombuffer(data.ljust(num_bytes, b"\0"), _RECORDS)

    def age(self, blocks: range) -> None:
        """Halves the counts of a set once its blocks were used eight times each on average, so that what was hot long
        ago does not stay for ever (as in Einziger et al., "TinyLFU", 2017). The set's lock must be held."""
        records = self.read(blocks)
        known = int(np.count_nonzero(records["last_s"]))
        if records["uses"].sum(dtype=np.int64) < _AGE_AT_MEAN_USES * max(known, 1):
            return
        halved = records.copy()
        halved["uses"] //= 2
        with self._lock:
            if self._descriptor >= 0:
                os.pwrite(self._descriptor, halved.tobytes(), blocks.start * _RECORD.size)

    def close(self) -> None:
        """Idempotent; later uses are not counted."""
        with self._lock:
            descriptor, self._descriptor = self._descriptor, -1
            if descriptor >= 0:
                os.close(descriptor)
