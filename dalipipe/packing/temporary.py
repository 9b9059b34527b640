"""Files without a name: whatever kills this process, nothing is left behind."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import BinaryIO, cast

from dalipipe.packing.done import FOLDER
from dalipipe.storage.url import FILE_SCHEMES, file_path, scheme_of


def temporary_file(target: str) -> BinaryIO:
    """An unnamed file, on the target's own disk where it has one (the folder for temporary files may be small)."""
    folder: Path | None = None
    scheme = scheme_of(target)
    if scheme == "" or scheme in FILE_SCHEMES:
        folder = Path(file_path(target) if scheme else target).expanduser() / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
    return cast(BinaryIO, tempfile.TemporaryFile(dir=folder))
