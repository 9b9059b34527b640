"""One fetch of a block on a node: locks that die with their holder.

Open-file-description locks belong to one `open` of the lock file: the kernel drops them when the holder is killed, and
two threads exclude each other as long as each opens the file for itself.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import logging
import os
import random
import struct
import time
from collections.abc import Callable
from pathlib import Path

from dalipipe.errors import CacheTimeoutError

# What the bytes of a lock file stand for: blocks, sets of blocks, whoever is alive, and from 2**40 on one byte for
# each block that is held in passing.
_NUM_BYTES = 1 << 16
_SETS_AT = 1 << 16
_ALIVE_AT = 1 << 17
_HELD_AT = 1 << 40
_FIRST_PAUSE_S = 0.0005
_LONGEST_PAUSE_S = 0.02
_HELD = (errno.EAGAIN, errno.EACCES)
_UNSUPPORTED = (errno.EINVAL, errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)

_log = logging.getLogger(__name__)


class BlockLock:
    """One right (to bring a block, to change a set), held until `release`."""

    __slots__ = ("_descriptor",)

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def release(self) -> None:
        """Gives the right back. Idempotent."""
        if self._descriptor < 0:
            return
        descriptor, self._descriptor = self._descriptor, -1
        try:
            # Said to the kernel, not left to close: a child forked meanwhile shares the open file and keeps it open.
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _flock(fcntl.F_UNLCK, 0, 0))
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
        finally:
            os.close(descriptor)


def lock_block(
    path: Path,
    block: int,
    *,
    wait_s: float,
    done: Callable[[], bool],
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> BlockLock | None:
    """Waits for the lock of `block` (byte `block mod 2**16` of the file at `path`).

    Returns None as soon as `done()` says that the block is there, so that a waiter never needs the lock itself.

    Raises:
        CacheTimeoutError: another process held the lock for `wait_s` seconds.
        OSError: the lock file cannot be opened.
    """
    descriptor = _open(path)
    lock = BlockLock(descriptor)
    deadline = clock() + wait_s
    pause_s = _FIRST_PAUSE_S
    try:
        while not _try_lock(descriptor, block % _NUM_BYTES):
            if done():
                lock.release()
                return None
            if clock() >= deadline:
                raise CacheTimeoutError(
                    f"waited {wait_s:g} s for block {block}: another process holds its lock in {path} and has not "
                    "brought the block; look for a stopped process of this node, or raise cache.wait_s"
                )
            sleep(random.uniform(pause_s / 2, pause_s))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    except BaseException:
        lock.release()
        raise
    return lock


def _open(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    try:
        return os.open(path, flags, 0o666)
    except FileNotFoundError:
        # Somebody deleted the cache folder under a running job: it begins anew, empty.
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, flags, 0o666)


def lock_set(path: Path, number: int, *, wait_s: float) -> BlockLock | None:
    """The right to change which blocks of set `number` are kept; None when it was not had within `wait_s` seconds."""
    return _wait_for(path, _SETS_AT + number % _NUM_BYTES, fcntl.F_WRLCK, wait_s)


def stay_alive(path: Path, wait_s: float = 2.0) -> BlockLock | None:
    """A mark that this process uses the folder, shared with others; it dies with the process.

    None where somebody clears the folder all the while, or the file system has no such locks.
    """
    return _wait_for(path, _ALIVE_AT, fcntl.F_RDLCK, wait_s)


def lock_unused(path: Path) -> BlockLock | None:
    """The right to do away with the folder's blocks, or None while any process uses it."""
    return _wait_for(path, _ALIVE_AT, fcntl.F_WRLCK, 0.0)


class Holds:
    """Which blocks this process holds in passing, so that the last holder on the node can tell that it is the last.

    All marks are locks of one open file: a killed process holds nothing any more.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def add(self, block: int) -> bool:
        """Marks the block as held here. False while another process is dropping it."""
        return _try_lock(self._descriptor, _HELD_AT + block, fcntl.F_RDLCK)

    def remove(self, block: int) -> BlockLock | None:
        """Ends the hold; the last holder on the node gets the right to drop the block, all others None."""
        fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, _flock(fcntl.F_UNLCK, _HELD_AT + block, 1))
        return self.lock_unheld(block)

    def lock_unheld(self, block: int) -> BlockLock | None:
        """The right to drop a block that nobody on the node holds, else None."""
        return _wait_for(self._path, _HELD_AT + block, fcntl.F_WRLCK, 0.0)

    def close(self) -> None:
        """Ends all holds. Nothing else may be called at the same time or later."""
        os.close(self._descriptor)


def _wait_for(path: Path, offset: int, kind: int, wait_s: float) -> BlockLock | None:
    descriptor = _open(path)
    lock = BlockLock(descriptor)
    deadline = time.monotonic() + wait_s
    pause_s = _FIRST_PAUSE_S
    try:
        while not _try_lock(descriptor, offset, kind):
            if time.monotonic() >= deadline:
                lock.release()
                return None
            time.sleep(random.uniform(pause_s / 2, pause_s))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    except BaseException:
        lock.release()
        raise
    return lock


def _try_lock(descriptor: int, offset: int, kind: int = fcntl.F_WRLCK) -> bool:
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _flock(kind, offset, 1))
    except OSError as error:
        if error.errno in _HELD:
            return False
        if error.errno not in _UNSUPPORTED:
            raise
        _say_no_locks()
    return True


def _flock(kind: int, start: int, length: int) -> bytes:
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, start, length, 0)


@functools.cache
def _say_no_locks() -> None:
    _log.warning(
        "the file system of cache.dir has no open-file-description locks: a block may be fetched more than once a node"
    )
