"""Checksums of what a node read first, where the manifest knows none."""

from __future__ import annotations

import contextlib
import os
import struct
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from dalipipe.shards.digest import NO_DIGEST, digest64

if TYPE_CHECKING:
    from dalipipe.cache.lake import Extent

FIRST_READS_NAME = "first-reads"
_RECORD = struct.Struct("<QQ")


class FirstReads:
    """The xxh3-64 of each block part as it was read first, in `<cache.dir>/<identity>/first-reads`: whoever reads the
    part later, in whichever tier, job or process of the node, is held to it.

    The file is sparse, 16 bytes a part at the part's number: its digest, and a hash over both, so that a record that
    was torn or rotted counts as none. It outlives `cache clear`. A folder that cannot be written is no error: nothing
    is kept then. Thread-safe, and safe among processes; where two read a part for the first time at once, one is kept.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None
        self._writable = True
        self._closed = False
        self._lock = threading.Lock()

    def get(self, part: int) -> int:
        """The digest that is kept of the part, or NO_DIGEST."""
        with self._lock:
            descriptor = self._open()
            record = b"" if descriptor is None else os.pread(descriptor, _RECORD.size, part * _RECORD.size)
        if len(record) < _RECORD.size:
            return NO_DIGEST
        digest, mark = _RECORD.unpack(record)
        return int(digest) if mark == _mark(part, digest) else NO_DIGEST

    def keep(self, part: int, digest: int) -> int:
        """Keeps the digest of a part that has none yet. Returns the one that holds from now on."""
        kept = self.get(part)
        if kept != NO_DIGEST:
            return kept
        # A late thread must not write into whatever file has the number of a descriptor that was closed meanwhile.
        with self._lock:
            descriptor = self._open()
            if descriptor is not None and self._writable:
                with contextlib.suppress(OSError):  # a full disk: the next read is the first again
                    os.pwrite(descriptor, _RECORD.pack(digest, _mark(part, digest)), part * _RECORD.size)
        return digest

    def agrees(self, extents: Iterable[Extent], data: memoryview) -> bool:
        """Whether the bytes of a block, its `extents` joined, are those that were read first; keeps what is new."""
        at = 0
        for extent in extents:
            num_bytes = extent.stop - extent.start
            if extent.digest == NO_DIGEST:
                found = digest64(data[at : at + num_bytes])
                if self.keep(extent.part, found) != found:
                    return False
            at += num_bytes
        return True

    def close(self) -> None:
        """Idempotent; what is kept stays, and nothing more is kept."""
        with self._lock:
            self._closed = True
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None

    def _open(self) -> int | None:
        """The file's descriptor, opened at the first use; the lock must be held as long as it is used."""
        if self._descriptor is None and not self._closed:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            except OSError:
                self._writable = False
                with contextlib.suppress(OSError):
                    self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        return self._descriptor


def first_reads_path(cache_dir: str, identity: str) -> Path:
    """Where the node keeps the checksums of the data set `identity`."""
    return Path(cache_dir) / identity / FIRST_READS_NAME


def _mark(part: int, digest: int) -> int:
    return digest64(_RECORD.pack(part, digest))
