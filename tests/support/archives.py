"""Tars as they come from other tools."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Sequence
from pathlib import Path


def write_tar(
    path: Path, members: Sequence[tuple[str, bytes]], *, mode: str = "w", form: int = tarfile.PAX_FORMAT
) -> Path:
    """A tar of regular files in the given order; names may repeat. mode: of `tarfile.open` (`w:gz`)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode, format=form) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path
