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

from dalipipe.cache.locks import lock_block
from dalipipe.cache.mapping import map_file
from dalipipe.cache.publish import Probe, Write, publish
from dalipipe.filelocks import FileLock
from dalipipe.shards.digest import digest64

TRAILER_MAGIC = b"dpblock1"
TRAILER_BYTES = len(TRAILER_MAGIC) + 8
LOCKS_NAME = "locks"
SET_BLOCKS = 512


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
        locks: the lock file, where several tiers share one; `<folder>/locks` by default.
        fallocate: reserve the file's blocks before it is written, so that a file system of huge pages uses them.
        boot_s: when the host started; files changed before are checked.
        probe, write: for tests, see `publish`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        locks: Path | None = None,
        fallocate: bool = False,
        boot_s: float | None = None,
        probe: Probe = lambda _point: None,
        write: Write = os.write,
    ) -> None:
        self.folder = folder
        self.locks = locks or folder / LOCKS_NAME
        self._fallocate = fallocate
        self._checked: set[tuple[int, int]] = set()
        self._boot_s = boot_time_s() if boot_s is None else boot_s
        self._probe = probe
        self._write = write

    def path(self, block: int) -> Path:
        """Where the block lies when it is here."""
        return self.folder / str(block // SET_BLOCKS) / str(block)

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
                self.drop(block)
                return None
            try:
                file = map_file(descriptor, status.st_size)
            except OSError:
                self.drop(block)
                return None
            trusted = status.st_ctime >= self._boot_s and status.st_mtime_ns % 10**9 == _seal_ns(block)
            if not trusted and (status.st_ino, status.st_ctime_ns) not in self._checked:
                if not is_whole(file):
                    self.drop(block)
                    return None
                self._seal(descriptor, block, status)
            return file[:num_bytes]
        finally:
            os.close(descriptor)

    def lock(self, block: int, wait_s: float) -> FileLock | None:
        """The right to bring the block here, or None when it has come meanwhile. Raises CacheTimeoutError."""
        lock = lock_block(self.locks, block, wait_s=wait_s, done=lambda: self.contains(block))
        self._probe("locked")
        return lock

    def write(self, block: int, data: memoryview) -> None:
        """Keeps the block's bytes. Raises OSError as the file system does; nothing is left then."""
        pieces = (data, trailer(data))
        for attempt in range(2):
            try:
                publish(
                    self.path(block),
                    pieces,
                    mtime_ns=_now_sealed_ns(block),
                    probe=self._probe,
                    write=self._write,
                    reserve=self._fallocate,
                )
                return
            except FileNotFoundError:
                # A `clear` removed the empty folder between its making and the linking.
                if attempt:
                    raise

    def drop(self, block: int) -> None:
        """Takes the block's name away; views that are held keep their bytes. No error where that cannot be done."""
        with contextlib.suppress(OSError):
            self.path(block).unlink()

    def sizes(self, number: int) -> list[tuple[int, int]]:
        """(block, bytes on disk) of what set `number` holds: blocks [512 number, 512 (number + 1))."""
        found = []
        with contextlib.suppress(FileNotFoundError), os.scandir(self.folder / str(number)) as entries:
            for entry in entries:
                if entry.name.isdigit():
                    with contextlib.suppress(FileNotFoundError):
                        found.append((int(entry.name), entry.stat(follow_symlinks=False).st_size))
        return found

    def _seal(self, descriptor: int, block: int, status: os.stat_result) -> None:
        # Sets the change time to now as well: the whole node trusts the file from here on.
        mtime_ns = _now_sealed_ns(block)
        try:
            os.utime(descriptor, ns=(mtime_ns, mtime_ns))
        except OSError:  # a read-only folder: this process remembers, the others check for themselves
            self._checked.add((status.st_ino, status.st_ctime_ns))


def _seal_ns(block: int) -> int:
    # The nanoseconds of a sealed file's modification time are a function of its number, which a later write destroys.
    return (block * 0x9E3779B97F4A7C15 + 0x1CE4E5B9) % 999_999_937


def _now_sealed_ns(block: int, clock: Callable[[], float] = time.time) -> int:
    return int(clock()) * 10**9 + _seal_ns(block)
