"""Locks among the processes of a node that die with their holder, and the right of the last one to clean up.

Open-file-description locks (Linux) belong to one `open` of a file: the kernel drops them when the holder is killed, and
two threads exclude each other as long as each opens the file for itself.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import logging
import os
import random
import struct
import time
from pathlib import Path

_FIRST_PAUSE_S = 0.0005
_LONGEST_PAUSE_S = 0.02
_HELD = (errno.EAGAIN, errno.EACCES)
_UNSUPPORTED = (errno.EINVAL, errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)

_log = logging.getLogger(__name__)


class FileLock:
    """One lock on a file that was opened for it, held until `release`."""

    __slots__ = ("_descriptor",)

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def is_of(self, path: Path) -> bool:
        """Whether the file that was locked is still the one at `path`."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), path.stat())
        except FileNotFoundError:
            return False

    def add(self, offset: int) -> bool:
        """Locks another byte of the same file, without waiting; False while another holder excludes it."""
        return try_lock(self._descriptor, offset)

    def give(self, offset: int) -> None:
        """Gives one byte back before the rest."""
        if self._descriptor >= 0:
            unlock(self._descriptor, offset)

    def release(self) -> None:
        """Gives the lock back, with all bytes that were added. Idempotent."""
        if self._descriptor < 0:
            return
        descriptor, self._descriptor = self._descriptor, -1
        try:
            # Said to the kernel, not left to close: a child forked meanwhile shares the open file and keeps it open.
            unlock(descriptor, 0, 0)
        finally:
            os.close(descriptor)


def open_file(path: Path, mode: int = 0o666) -> int:
    """A descriptor of the file at `path`, made with its folder when missing. Raises OSError as the file system does."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    for _ in range(100):
        try:
            return os.open(path, flags, mode)
        except FileNotFoundError:
            # Somebody took the folder away, and may do so once more meanwhile: even between the two looks that `mkdir`
            # has at it, of which the first says that it is there.
            with contextlib.suppress(FileNotFoundError, FileExistsError):
                path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, flags, mode)


def try_lock(descriptor: int, offset: int, kind: int = fcntl.F_WRLCK) -> bool:
    """Locks the byte at `offset`; False while another holder excludes it. True where there are no such locks."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _flock(kind, offset, 1))
    except OSError as error:
        if error.errno in _HELD:
            return False
        if error.errno not in _UNSUPPORTED:
            raise
        _say_no_locks()
    return True


def unlock(descriptor: int, offset: int, num_bytes: int = 1) -> None:
    """Gives back what was locked of the bytes from `offset` on (0 bytes: all of them)."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _flock(fcntl.F_UNLCK, offset, num_bytes))
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise


def wait_for(path: Path, offset: int, kind: int, wait_s: float, *, mode: int = 0o666) -> FileLock | None:
    """The lock of one byte, or None when it was not had within `wait_s` seconds; `mode` is that of a file it makes."""
    lock = FileLock(descriptor := open_file(path, mode))
    deadline_s = time.monotonic() + wait_s
    pause_s = _FIRST_PAUSE_S
    try:
        while not try_lock(descriptor, offset, kind):
            if time.monotonic() >= deadline_s:
                lock.release()
                return None
            time.sleep(random.uniform(pause_s / 2, pause_s))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    except BaseException:
        lock.release()
        raise
    return lock


def enter(path: Path, offset: int, wait_s: float = 2.0, *, mode: int = 0o666) -> FileLock | None:
    """A mark of one user at the file, shared with others, until it is released or the process dies.

    The file is the one at `path`: where the last user before took it away between its opening and its locking, a new
    one is made. None where somebody has it alone all the while.
    """
    deadline_s = time.monotonic() + wait_s
    while True:
        lock = wait_for(path, offset, fcntl.F_RDLCK, max(0.0, deadline_s - time.monotonic()), mode=mode)
        if lock is None or lock.is_of(path):
            return lock
        lock.release()
        if time.monotonic() >= deadline_s:
            return None


def alone(path: Path, offset: int) -> FileLock | None:
    """The right of whoever is left alone to do away with the file; None while it has users, or when it is gone.

    Nobody can enter while it is held. Who leaves gives up its own mark first, then asks for this: of several that
    leave at once the last one gets it.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except (FileNotFoundError, NotADirectoryError):
        return None
    lock = FileLock(descriptor)
    try:
        if try_lock(descriptor, offset) and lock.is_of(path):
            return lock
    except BaseException:
        lock.release()
        raise
    lock.release()
    return None


def _flock(kind: int, start: int, num_bytes: int) -> bytes:
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, start, num_bytes, 0)


@functools.cache
def _say_no_locks() -> None:
    _log.warning(
        "the file system of cache.dir has no open-file-description locks: a block may be fetched more than once a node"
    )
