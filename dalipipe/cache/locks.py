"""One fetch of a block on a node: which bytes of a lock file stand for what, and who waits for whom."""

from __future__ import annotations

import fcntl
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

from dalipipe.errors import CacheTimeoutError
from dalipipe.filelocks import FileLock, alone, enter, open_file, try_lock, unlock, wait_for

# What the bytes of a lock file stand for: blocks, sets of blocks, whoever is alive, and from 2**40 on one byte for
# each block that is held in passing.
_NUM_BYTES = 1 << 16
_SETS_AT = 1 << 16
_ALIVE_AT = 1 << 17
_HELD_AT = 1 << 40
_FIRST_PAUSE_S = 0.0005
_LONGEST_PAUSE_S = 0.02


def lock_block(
    path: Path,
    block: int,
    *,
    wait_s: float,
    done: Callable[[], bool],
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> FileLock | None:
    """Waits for the lock of `block` (byte `block mod 2**16` of the file at `path`).

    Returns None as soon as `done()` says that the block is there, so that a waiter never needs the lock itself.

    Raises:
        CacheTimeoutError: another process held the lock for `wait_s` seconds.
        OSError: the lock file cannot be opened.
    """
    lock = FileLock(descriptor := open_file(path))
    deadline = clock() + wait_s
    pause_s = _FIRST_PAUSE_S
    try:
        while not try_lock(descriptor, block % _NUM_BYTES):
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


def lock_another(lock: FileLock, block: int) -> bool:
    """Adds the lock of `block` to one that is held, without waiting; False while somebody else has it."""
    return lock.add(block % _NUM_BYTES)


def unlock_block(lock: FileLock, block: int) -> None:
    """Gives back the lock of one block of several; what comes later releases the rest."""
    lock.give(block % _NUM_BYTES)


def lock_set(path: Path, number: int, *, wait_s: float) -> FileLock | None:
    """The right to change which blocks of set `number` are kept; None when it was not had within `wait_s` seconds."""
    return wait_for(path, _SETS_AT + number % _NUM_BYTES, fcntl.F_WRLCK, wait_s)


def stay_alive(path: Path) -> FileLock | None:
    """A mark that this process uses the folder, shared with others; it dies with the process.

    None where somebody clears the folder all the while.
    """
    return enter(path, _ALIVE_AT)


def lock_unused(path: Path) -> FileLock | None:
    """The right to do away with the folder's blocks, or None while any process uses it, or when it is gone."""
    return alone(path, _ALIVE_AT)


class Holds:
    """Which blocks this process holds in passing, so that the last holder on the node can tell that it is the last.

    All marks are locks of one open file: a killed process holds nothing any more.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = open_file(path)

    def add(self, block: int) -> bool:
        """Marks the block as held here. False while another process is dropping it."""
        return try_lock(self._descriptor, _HELD_AT + block, fcntl.F_RDLCK)

    def remove(self, block: int) -> FileLock | None:
        """Ends the hold; the last holder on the node gets the right to drop the block, all others None."""
        unlock(self._descriptor, _HELD_AT + block)
        return self.lock_unheld(block)

    def lock_unheld(self, block: int) -> FileLock | None:
        """The right to drop a block that nobody on the node holds, else None."""
        return wait_for(self._path, _HELD_AT + block, fcntl.F_WRLCK, 0.0)

    def close(self) -> None:
        """Ends all holds. Nothing else may be called at the same time or later."""
        os.close(self._descriptor)
