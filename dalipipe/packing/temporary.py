"""Files without a name: whatever kills this process, nothing is left behind."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from typing import BinaryIO, cast

from dalipipe.packing.done import FOLDER
from dalipipe.storage.url import FILE_SCHEMES, file_path, scheme_of

_BUFFER_BYTES = 2**20
_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT)


def temporary_file(target: str) -> BinaryIO:
    """An unnamed file that can be opened again by its descriptor (/proc/self/fd), on the target's own disk where it has
    one (the folder for temporary files may be small)."""
    folder: Path | None = None
    scheme = scheme_of(target)
    if scheme == "" or scheme in FILE_SCHEMES:
        folder = Path(file_path(target) if scheme else target).expanduser() / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
    if folder is None:
        return _unnamed(None)
    file = _linkable(folder) or _unnamed(folder)
    if not _opens_again(file):
        # FUSE mounts forget a file with its name; the folder for temporary files is a disk of this host.
        file.close()
        file = _unnamed(None)
    return file


def _linkable(folder: Path) -> BinaryIO | None:
    """A file that can be given a name, so that the store makes it the object without a copy (the files of `tempfile`
    never can); None where the disk has no such files."""
    try:
        descriptor = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno not in _NO_TMPFILE:
            raise
        return None
    return os.fdopen(descriptor, "w+b", buffering=_BUFFER_BYTES)


def _unnamed(folder: Path | None) -> BinaryIO:
    return cast(BinaryIO, tempfile.TemporaryFile(dir=folder, buffering=_BUFFER_BYTES))


def _opens_again(file: BinaryIO) -> bool:
    try:
        os.close(os.open(f"/proc/self/fd/{file.fileno()}", os.O_RDONLY))
    except FileNotFoundError:
        return False
    return True
