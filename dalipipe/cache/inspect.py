"""What lies in a cache folder: measuring, checking and clearing it, without its data sets."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dalipipe.cache.blockstore import TRAILER_BYTES, is_whole
from dalipipe.cache.config import CacheConfig
from dalipipe.cache.mapping import map_path
from dalipipe.errors import CacheError
from dalipipe.units import parse_capacity


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheReport:
    """The blocks of all data sets in a cache folder: their bytes and number, how many are known to be corrupt, and
    the budget that the configuration gives to the node tier on this disk."""

    bytes: int
    blocks: int
    corrupt: int
    budget_bytes: int


def stat(config: CacheConfig) -> CacheReport:
    """Counts what lies in `cache.dir`, without reading it. An absent folder is empty.

    Raises:
        CacheError: `cache.dir` is empty or cannot be listed.
    """
    return _report(config, [status.st_size for _, status in _blocks(_folder(config))], corrupt=0)


def verify(
    config: CacheConfig, *, drop: bool = False, progress: Callable[[int], None] = lambda _num_bytes: None
) -> CacheReport:
    """Reads every block and compares it with its digest; `bytes` and `blocks` count the corrupt ones too.

    Args:
        drop: unlink corrupt blocks, so that the next reader fetches them again. Safe while jobs run.
        progress: called with the bytes of each block that was read.
    """
    corrupt, sizes = 0, []
    for path, status in _blocks(_folder(config)):
        sound = _is_sound(path, status.st_size)
        sizes.append(status.st_size)
        progress(status.st_size)
        if not sound:
            corrupt += 1
            if drop:
                path.unlink(missing_ok=True)
    return _report(config, sizes, corrupt=corrupt)


def clear(config: CacheConfig) -> CacheReport:
    """Unlinks every block and reports what was dropped. Safe while jobs run: held views stay valid."""
    sizes = []
    folders: set[Path] = set()
    for path, status in _blocks(_folder(config)):
        path.unlink(missing_ok=True)
        sizes.append(status.st_size)
        folders.add(path.parent)
    for folder in folders:
        with contextlib.suppress(OSError):  # another process has just put a block there
            folder.rmdir()
    return _report(config, sizes, corrupt=0)


def measure_folder(folder: Path) -> tuple[int, int]:
    """Bytes and number of the blocks of one data set."""
    sizes = [status.st_size - TRAILER_BYTES for _, status in _blocks_of_set(folder)]
    return sum(sizes), len(sizes)


def _folder(config: CacheConfig) -> Path:
    if not config.dir:
        raise CacheError("cache.dir is empty: name the folder to look at")
    return Path(config.dir)


def _report(config: CacheConfig, sizes: list[int], *, corrupt: int) -> CacheReport:
    num_bytes = sum(size - TRAILER_BYTES for size in sizes)
    folder = Path(config.dir)
    while not folder.exists():
        folder = folder.parent
    disk = os.statvfs(folder)
    room_bytes = disk.f_bavail * disk.f_frsize + num_bytes
    budget_bytes = min(parse_capacity(config.tiers.node.capacity, room_bytes, "cache.tiers.node.capacity"), room_bytes)
    return CacheReport(bytes=num_bytes, blocks=len(sizes), corrupt=corrupt, budget_bytes=budget_bytes)


def _is_sound(path: Path, num_bytes: int) -> bool:
    try:
        return num_bytes > TRAILER_BYTES and is_whole(map_path(path))
    except FileNotFoundError:
        return True
    except OSError:
        return False


def _blocks(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for data_set in _folders(folder):
        yield from _blocks_of_set(data_set)


def _blocks_of_set(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for group in _folders(folder):
        for entry in _entries(group):
            # Names that are no block numbers are not ours to count, check or unlink.
            if entry.name.isdigit():
                with contextlib.suppress(FileNotFoundError):
                    yield Path(entry.path), entry.stat(follow_symlinks=False)


def _folders(folder: Path) -> Iterator[Path]:
    for entry in _entries(folder):
        if entry.is_dir(follow_symlinks=False):
            yield Path(entry.path)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CacheError(f"the cache folder {folder} cannot be listed: {error.strerror or error}") from error
