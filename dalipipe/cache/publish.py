"""Files that appear under their name whole, or not at all."""

from __future__ import annotations

import errno
import functools
import logging
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Buffer

Probe = Callable[[str], None]
"""Called with the name of each point that a writer passes; tests kill the process there."""

Write = Callable[[int, memoryview], int]
"""`os.write`, or a test's stand-in that fails as a full disk does."""

_UNSUPPORTED = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT)
_MODE = 0o644

_log = logging.getLogger(__name__)


def publish(
    path: Path,
    pieces: Sequence[Buffer],
    *,
    mtime_ns: int,
    probe: Probe,
    write: Write = os.write,
    reserve: bool = False,
) -> None:
    """Writes `pieces` one after the other and gives them the name `path` in one step; keeps a file that is there.

    A process that is killed leaves nothing behind, where the file system has O_TMPFILE. Elsewhere a hidden temporary
    name beside `path` is renamed, and the kill may leave that one.

    Args:
        mtime_ns: the modification time that the file gets.
        probe, write: for tests.
        reserve: take the space of the whole file before the first byte.

    Raises:
        OSError: as the file system says; nothing is left under any name.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = os.open(path.parent, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, _MODE)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        _say_no_tmpfile()
        _publish_by_rename(path, pieces, mtime_ns, probe, write)
        return
    try:
        if reserve:
            os.posix_fallocate(descriptor, 0, sum(memoryview(piece).nbytes for piece in pieces))
        _fill(descriptor, pieces, mtime_ns, probe, write)
        probe("written")
        _link(descriptor, path)
        probe("linked")
    finally:
        os.close(descriptor)


def _fill(descriptor: int, pieces: Sequence[Buffer], mtime_ns: int, probe: Probe, write: Write) -> None:
    for piece in pieces:
        rest = memoryview(piece).cast("B")
        half = len(rest) // 2
        for part in (rest[:half], rest[half:]):
            while len(part):
                part = part[write(descriptor, part) :]  # noqa: PLW2901
            probe("writing")
    os.utime(descriptor, ns=(mtime_ns, mtime_ns))


def _link(descriptor: int, path: Path) -> None:
    # The kernel follows the /proc link only when linkat gets AT_SYMLINK_FOLLOW, and Python calls plain link() unless
    # a directory descriptor is given.
    root = os.open("/", os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.link(f"/proc/self/fd/{descriptor}", path, src_dir_fd=root, follow_symlinks=True)
    except FileExistsError:
        pass
    finally:
        os.close(root)


def _publish_by_rename(path: Path, pieces: Sequence[Buffer], mtime_ns: int, probe: Probe, write: Write) -> None:
    for left in path.parent.glob(f".{path.name}.*"):
        # A killed writer's: whoever writes this name now has the right to alone.
        left.unlink(missing_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _MODE)
    try:
        try:
            _fill(descriptor, pieces, mtime_ns, probe, write)
        finally:
            os.close(descriptor)
        probe("written")
        temporary.rename(path)
        probe("linked")
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@functools.cache
def _say_no_tmpfile() -> None:
    _log.warning("the file system of cache.dir has no O_TMPFILE: a killed process may leave a hidden file behind")
