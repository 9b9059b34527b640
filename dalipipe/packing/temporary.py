"""Files without a name: whatever kills this process, nothing is left behind."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import BinaryIO, cast

from dalipipe.packing.done import FOLDER
from dalipipe.storage.url import FILE_SCHEMES, file_path, scheme_of

_BUFFER_BYTES = 2**20


def temporary_file(target: str) -> BinaryIO:
    """An unnamed file that can be opened again by its descriptor (/proc/self/fd), on the target's own disk where it has
    one (the folder for temporary files may be small)."""
    folder: Path | None = None
    scheme = scheme_of(target)
    if scheme == "" or scheme in FILE_SCHEMES:
        folder = Path(file_path(target) if scheme else target).expanduser() / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
    # The caller closes it.
    file = cast(BinaryIO, tempfile.TemporaryFile(dir=folder, buffering=_BUFFER_BYTES))  # noqa: SIM115
    if folder is not None and not _opens_again(file):
        # FUSE mounts forget a file with its name; the folder for temporary files is a disk of this host.
        file.close()
        file = cast(BinaryIO, tempfile.TemporaryFile(buffering=_BUFFER_BYTES))  # noqa: SIM115
    return file


def _opens_again(file: BinaryIO) -> bool:
    try:
        os.close(os.open(f"/proc/self/fd/{file.fileno()}", os.O_RDONLY))
    except FileNotFoundError:
        return False
    return True
