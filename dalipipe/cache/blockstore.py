"""The node tier on disk: one file per block, shared by all processes of a node.

A name means complete: a block is written without a name, checked, and linked. A killed process therefore leaves
neither a torn block nor a lock. Dropping a block is unlinking its name; whoever holds a view keeps its bytes.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

from dalipipe.cache.locks import BlockLock, lock_block
from dalipipe.cache.mapping import map_file
from dalipipe.cache.publish import Probe, Write, publish
from dalipipe.shards.digest import digest64

TRAILER_MAGIC = b"dpblock1"
TRAILER_BYTES = len(TRAILER_MAGIC) + 8
LOCKS_NAME = "locks"
_SET_BLOCKS = 512


def boot_time_s() -> float:
    """When this host started, in seconds since 1970."""
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


def trailer(data: memoryview) -> bytes:
    """The 16 bytes behind a block's bytes: a mark and the xxh3-64 of the block, so that a file can be checked alone."""
    return TRAILER_MAGIC + digest64(data).to_bytes(8, "little")


def is_whole(file: memoryview) -> bool:
    """Whether the bytes of a block file match its trailer."""
    return len(file) > TRAILER_BYTES and bytes(file[-TRAILER_BYTES:]) == trailer(file[:-TRAILER_BYTES])


class BlockStore:
    """The blocks of one data set in `<folder>/<set>/<block>`; thread-safe, and safe among processes.

    A file is trusted without reading it when it was linked since the host started (so no power loss tore it) and its
    modification time is still the one given at linking (so nobody wrote to it since). Any other file is compared with
    its digest on first touch.

    Args:
        folder: `<cache.dir>/<identity>`; made when missing.
        boot_s: when the host started; files changed before are checked.
        probe, write: for tests, see `publish`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        boot_s: float | None = None,
        probe: Probe = lambda _point: None,
        write: Write = os.write,
    ) -> None:
        self._folder = folder
        self._boot_s = boot_time_s() if boot_s is None else boot_s
        self._probe = probe
        self._write = write

    def path(self, block: int) -> Path:
        """Where the block lies when it is here."""
        return self._folder / str(block // _SET_BLOCKS) / str(block)

    def contains(self, block: int) -> bool:
        """Whether the block has a name here."""
        return self.path(block).exists()

    def open(self, block: int, num_bytes: int) -> memoryview | None:
        """Returns the block's bytes (read-only, in the page cache), or None when it is not here or not sound.

        An unsound file (wrong size, unreadable pages, wrong digest) is unlinked, so that it can be fetched again.
        """
        path = self.path(block)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            status = os.fstat(descriptor)
            if status.st_size != num_bytes + TRAILER_BYTES:
                self._drop(block)
                return None
            try:
                file = map_file(descriptor, status.st_size)
            except OSError:
                self._drop(block)
                return None
            if status.st_ctime < self._boot_s or status.st_mtime_ns % 10**9 != _seal_ns(block):
                if not is_whole(file):
                    self._drop(block)
                    return None
                self._seal(descriptor, block)
            return file[:num_bytes]
        finally:
            os.close(descriptor)

    def lock(self, block: int, wait_s: float) -> BlockLock | None:
        """The right to bring the block here, or None when it has come meanwhile. Raises CacheTimeoutError."""
        lock = lock_block(self._folder / LOCKS_NAME, block, wait_s=wait_s, done=lambda: self.contains(block))
        self._probe("locked")
        return lock

    def write(self, block: int, data: memoryview) -> None:
        """Keeps the block's bytes. Raises OSError as the file system does; nothing is left then."""
        path, pieces, mtime_ns = self.path(block), (data, trailer(data)), _now_sealed_ns(block)
        try:
            publish(path, pieces, mtime_ns=mtime_ns, probe=self._probe, write=self._write)
        except FileNotFoundError:
            # A `clear` removed the empty folder between its making and the linking.
            publish(path, pieces, mtime_ns=mtime_ns, probe=self._probe, write=self._write)

    def _drop(self, block: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.path(block).unlink()

    def _seal(self, descriptor: int, block: int) -> None:
        # Sets the change time to now as well: the whole node trusts the file from here on.
        mtime_ns = _now_sealed_ns(block)
        with contextlib.suppress(PermissionError):
            os.utime(descriptor, ns=(mtime_ns, mtime_ns))


def _seal_ns(block: int) -> int:
    # The nanoseconds of a sealed file's modification time are a function of its number, which a later write destroys.
    return (block * 0x9E3779B97F4A7C15 + 0x1CE4E5B9) % 999_999_937


def _now_sealed_ns(block: int, clock: Callable[[], float] = time.time) -> int:
    return int(clock()) * 10**9 + _seal_ns(block)
