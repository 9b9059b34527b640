"""Data sets in the shared memory of a node: who uses them, and who takes them away.

Shared memory outlives processes, so somebody has to clean up. Each job marks the data sets that it uses by a lock that
dies with it; the last one to leave takes the data set away, and whoever opens a cache takes away what was left by jobs
that were all killed. `cache.tiers.memory.keep` leaves a mark that keeps a data set until `cache clear`.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from dalipipe.cache.blockstore import LOCKS_NAME
from dalipipe.cache.config import CacheConfig
from dalipipe.cache.folders import KEEP_NAME, memory_folder, memory_root
from dalipipe.cache.inspect import remove_passing, remove_set
from dalipipe.cache.locks import lock_unused, stay_alive
from dalipipe.filelocks import open_file


class Tenancy:
    """One process's use of a data set's folder in shared memory.

    Args:
        name: of the folder, the identity of the data set.
        keep: leave the blocks there when the last process leaves.

    Raises:
        OSError: the folder cannot be made.
    """

    def __init__(self, config: CacheConfig, name: str, *, keep: bool) -> None:
        self.folder = memory_folder(config) / name
        self._config = config
        self._lease = stay_alive(self.folder / LOCKS_NAME)
        if keep:
            (self.folder / KEEP_NAME).touch()

    def leave(self) -> None:
        """Ends the use; views stay valid. The last one takes away what is not to be kept. Idempotent."""
        if self._lease is not None:
            self._lease.release()
            self._lease = None
            _take_away(self._config, self.folder)


def sweep(config: CacheConfig) -> None:
    """Takes away the data sets in shared memory that nobody uses and nobody wanted kept: of killed jobs."""
    root = memory_root(config)
    # A folder that the user named may hold others' things: there a lock file marks what is a data set's.
    if config.tiers.memory.dir:
        sets = [folder for folder in _folders(root) if (folder / LOCKS_NAME).is_file()]
    else:
        sets = [folder for mark in _folders(root) for folder in _folders(mark)]
    for folder in sets:
        if not (folder / KEEP_NAME).exists():
            with contextlib.suppress(OSError):  # another user's, in a folder that several share
                # Of a job that was killed before it had marked it, or of one that is about to: the lock tells.
                os.close(open_file(folder / LOCKS_NAME))
                _take_away(config, folder)


def _take_away(config: CacheConfig, folder: Path) -> None:
    unused = lock_unused(folder / LOCKS_NAME)
    if unused is not None:
        try:
            remove_passing(folder)
            if not (folder / KEEP_NAME).exists():
                remove_set(folder)
        finally:
            unused.release()
    if not config.tiers.memory.dir:
        with contextlib.suppress(OSError):  # others have data sets there
            folder.parent.rmdir()
            memory_root(config).rmdir()


def _folders(root: Path) -> list[Path]:
    try:
        return [path for path in root.iterdir() if path.is_dir() and not path.is_symlink()]
    except OSError:
        return []
