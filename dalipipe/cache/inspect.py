"""What lies in the cache folders of a node: measuring, checking and clearing them, without their data sets."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from dalipipe.cache.blockstore import LOCKS_NAME, TRAILER_BYTES, is_whole
from dalipipe.cache.config import CacheConfig
from dalipipe.cache.firstread import FIRST_READS_NAME
from dalipipe.cache.folders import KEEP_NAME, PASSING_NAME, free_bytes, memory_folder
from dalipipe.cache.locks import lock_unused
from dalipipe.cache.mapping import map_path, resident_bytes
from dalipipe.cache.usage import USAGE_NAME
from dalipipe.errors import CacheError
from dalipipe.units import parse_capacity


@dataclass(frozen=True, slots=True, kw_only=True)
class SetReport:
    """One data set in one tier: what it holds there, and whether a job of this node uses it."""

    tier: str
    identity: str
    bytes: int
    blocks: int
    in_use: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheReport:
    """The blocks of all data sets in the folders of the node.

    bytes, blocks: what has a name. corrupt: of those, known not to match their digest. budget_bytes: what the
    configuration gives to the node's tiers on these disks. resident_bytes: the part of `bytes` in the page cache.
    held_bytes: what processes have mapped; of that, held_unnamed_bytes was dropped already and comes back to the disk
    when the last view dies (both as far as this user may see the processes). skipped: data sets left alone since a job
    uses them.
    """

    bytes: int
    blocks: int
    corrupt: int
    budget_bytes: int
    resident_bytes: int = 0
    held_bytes: int = 0
    held_unnamed_bytes: int = 0
    skipped: int = 0
    sets: list[SetReport] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Block:
    path: Path
    num_bytes: int


def stat(config: CacheConfig) -> CacheReport:
    """Counts what lies in `cache.dir` and in the memory tier, without reading it. An absent folder is empty.

    Raises:
        CacheError: `cache.dir` is empty or cannot be listed.
    """
    sets, resident = [], 0
    for tier, folder in _data_sets(config):
        blocks = list(_blocks_of_set(folder))
        for block in blocks:
            with contextlib.suppress(OSError):
                resident += max(0, resident_bytes(block.path) - TRAILER_BYTES)
        sets.append(_set_report(tier, folder, blocks, in_use=_is_in_use(folder)))
    held, unnamed = _mapped_bytes([folder for _, folder in _roots(config)])
    return _report(config, sets, resident_bytes=resident, held_bytes=held, held_unnamed_bytes=unnamed)


def verify(
    config: CacheConfig, *, drop: bool = False, progress: Callable[[int], None] = lambda _num_bytes: None
) -> CacheReport:
    """Reads every block and compares it with its digest; `bytes` and `blocks` count the corrupt ones too.

    Args:
        drop: unlink corrupt blocks, so that the next reader fetches them again. Safe while jobs run.
        progress: called with the bytes of each block that was read.
    """
    corrupt, sets = 0, []
    for tier, folder in _data_sets(config):
        blocks = list(_blocks_of_set(folder))
        for block in blocks:
            sound = _is_sound(block)
            progress(block.num_bytes)
            if not sound:
                corrupt += 1
                if drop:
                    block.path.unlink(missing_ok=True)
        sets.append(_set_report(tier, folder, blocks, in_use=_is_in_use(folder)))
    return _report(config, sets, corrupt=corrupt)


def clear(config: CacheConfig, *, force: bool = False, first_reads: bool = False) -> CacheReport:
    """Drops the blocks of all data sets that no job of the node uses, and reports what was dropped.

    Args:
        force: those in use too. Their jobs go on: views that are held keep their bytes, and dropped blocks are fetched
            again.
        first_reads: also forget the checksums of what was read first, as when a data set was replaced on purpose.
    """
    sets, skipped = [], 0
    kept = set()
    for tier, folder in _data_sets(config):
        unused = lock_unused(folder / LOCKS_NAME)
        try:
            if unused is None and not force:
                skipped += 1
                kept.add(folder.name)
                continue
            sets.append(_set_report(tier, folder, drop_blocks(folder), in_use=unused is None))
            if tier == "memory" and unused is not None:
                remove_set(folder)
        finally:
            if unused is not None:
                unused.release()
    for folder in _folders(Path(config.dir)) if first_reads else ():
        if folder.name not in kept:
            (folder / FIRST_READS_NAME).unlink(missing_ok=True)
    return _report(config, sets, skipped=skipped)


def drop_blocks(folder: Path) -> list[_Block]:
    """Unlinks all blocks of the data set in `folder` and says which. Whoever holds a view keeps its bytes."""
    dropped = []
    for block in _blocks_of_set(folder):
        block.path.unlink(missing_ok=True)
        dropped.append(block)
    for group in _folders(folder):
        if not group.name.isdigit():
            continue
        for left in group.glob(".[0-9]*.*"):  # of a killed writer, where the file system has no O_TMPFILE
            left.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # another process has just put a block there
            group.rmdir()
    with contextlib.suppress(OSError):
        (folder / USAGE_NAME).unlink()
    return dropped


def remove_passing(folder: Path) -> None:
    """Takes away what processes shared in passing of the data set in `folder`, which nobody may be using."""
    _remove(folder / PASSING_NAME, (LOCKS_NAME,))


def remove_set(folder: Path) -> None:
    """Takes the folder of a data set in shared memory away, with its blocks; `lock_unused` must be held.

    Files that are not the cache's stay, and their folder with them.
    """
    remove_passing(folder)
    _remove(folder, (KEEP_NAME, LOCKS_NAME))


def _remove(folder: Path, names: tuple[str, ...]) -> None:
    if folder.is_dir():
        drop_blocks(folder)
        with contextlib.suppress(OSError):  # somebody else's, or a new user has made it anew
            for name in names:
                (folder / name).unlink(missing_ok=True)
            folder.rmdir()


def measure_folder(folder: Path) -> tuple[int, int]:
    """Bytes and number of the blocks of one data set."""
    sizes = [block.num_bytes for block in _blocks_of_set(folder)]
    return sum(sizes), len(sizes)


def _roots(config: CacheConfig) -> list[tuple[str, Path]]:
    if not config.dir:
        raise CacheError("cache.dir is empty: name the folder to look at")
    return [("memory", memory_folder(config)), ("node", Path(config.dir))]


def _data_sets(config: CacheConfig) -> Iterator[tuple[str, Path]]:
    """(tier, folder) of each data set that dalipipe keeps: a lock file marks its folder, so that files of others, be
    their names numbers or not, are never taken for blocks."""
    for tier, root in _roots(config):
        for folder in _folders(root):
            if (folder / LOCKS_NAME).is_file():
                yield tier, folder


def _set_report(tier: str, folder: Path, blocks: list[_Block], *, in_use: bool) -> SetReport:
    num_bytes = sum(block.num_bytes for block in blocks)
    return SetReport(tier=tier, identity=folder.name, bytes=num_bytes, blocks=len(blocks), in_use=in_use)


def _report(
    config: CacheConfig,
    sets: list[SetReport],
    *,
    corrupt: int = 0,
    resident_bytes: int = 0,
    held_bytes: int = 0,
    held_unnamed_bytes: int = 0,
    skipped: int = 0,
) -> CacheReport:
    budget_bytes = 0
    capacities = {"memory": config.tiers.memory.capacity, "node": config.tiers.node.capacity}
    for tier, root in _roots(config):
        room_bytes = free_bytes(root, tier) + sum(each.bytes for each in sets if each.tier == tier)
        wanted_bytes = parse_capacity(capacities[tier], room_bytes, f"cache.tiers.{tier}.capacity")
        budget_bytes += min(wanted_bytes, room_bytes)
    return CacheReport(
        bytes=sum(each.bytes for each in sets),
        blocks=sum(each.blocks for each in sets),
        corrupt=corrupt,
        budget_bytes=budget_bytes,
        resident_bytes=resident_bytes,
        held_bytes=held_bytes,
        held_unnamed_bytes=held_unnamed_bytes,
        skipped=skipped,
        sets=sets,
    )


def _is_in_use(folder: Path) -> bool:
    try:
        unused = lock_unused(folder / LOCKS_NAME)
    except OSError:
        return False
    if unused is None:
        return True
    unused.release()
    return False


def _is_sound(block: _Block) -> bool:
    try:
        return block.num_bytes > 0 and is_whole(map_path(block.path))
    except FileNotFoundError:
        return True
    except OSError:
        return False


def _mapped_bytes(roots: list[Path]) -> tuple[int, int]:
    """Bytes of block files that processes have mapped, and of those whose name is gone. Each file counts once."""
    prefixes = tuple(f"{root.resolve()}/" for root in roots)
    mapped: dict[tuple[str, str], tuple[int, bool]] = {}
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # ended meanwhile, or another user's
            for line in maps.read_text().splitlines():
                words = line.split(maxsplit=5)
                if len(words) < 6 or not words[5].startswith(prefixes):
                    continue
                name = words[5].removesuffix(" (deleted)")
                if not Path(name).name.isdigit():
                    continue
                begin, end = (int(bound, 16) for bound in words[0].split("-"))
                mapped[words[3], words[4]] = (end - begin, words[5] != name)
    return sum(size for size, _ in mapped.values()), sum(size for size, gone in mapped.values() if gone)


def _blocks_of_set(folder: Path) -> Iterator[_Block]:
    for group in _folders(folder):
        for entry in _entries(group):
            # Names that are no block numbers are not ours to count, check or unlink.
            if group.name.isdigit() and entry.name.isdigit():
                with contextlib.suppress(FileNotFoundError):
                    size = entry.stat(follow_symlinks=False).st_size
                    yield _Block(Path(entry.path), max(0, size - TRAILER_BYTES))


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
