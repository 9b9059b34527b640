"""What a node read first, kept in a sparse file that processes share."""

from __future__ import annotations

import multiprocessing
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from dalipipe.cache.firstread import FirstReads, first_reads_path
from dalipipe.shards.digest import NO_DIGEST, digest64


@dataclass(frozen=True)
class Part:
    """As `Manifest` gives extents."""

    shard: str
    start: int
    stop: int
    digest: int
    part: int


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return first_reads_path(str(tmp_path / "cache"), "identity")


def test_the_first_digest_of_a_part_holds_also_after_it_is_opened_again(path: Path) -> None:
    first = FirstReads(path)
    assert first.get(7) == NO_DIGEST
    assert first.keep(7, 70) == 70
    assert first.keep(7, 71) == 70
    assert (first.get(6), first.get(8), first.get(10**9)) == (NO_DIGEST,) * 3
    first.close()
    first.close()
    again = FirstReads(path)
    assert (again.get(7), again.keep(7, 72)) == (70, 70)
    again.keep(10**9, 2**64 - 1)
    assert again.get(10**9) == 2**64 - 1
    assert path.stat().st_blocks * 512 < 2**20, "sparse"
    again.close()


@pytest.mark.parametrize("at", [0, 7, 8, 15])
def test_a_record_that_rotted_or_was_torn_counts_as_none(path: Path, at: int) -> None:
    first = FirstReads(path)
    for part in (0, 1, 2):
        first.keep(part, 100 + part)
    data = bytearray(path.read_bytes())
    data[16 + at] ^= 1
    path.write_bytes(data)
    assert [first.get(part) for part in (0, 1, 2)] == [100, NO_DIGEST, 102]
    os.truncate(path, 40)
    assert [first.get(part) for part in (0, 1, 2)] == [100, NO_DIGEST, NO_DIGEST]
    first.close()


def test_a_folder_that_cannot_be_made_costs_what_is_kept_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    first = FirstReads(tmp_path / "file" / "identity" / "first-reads")
    assert (first.keep(1, 10), first.get(1)) == (10, NO_DIGEST)
    first.close()


def test_a_block_of_two_parts_is_held_to_both(path: Path) -> None:
    first = FirstReads(path)
    data = memoryview(b"one part" + b"and another")
    extents = [Part("a", 0, 8, NO_DIGEST, 3), Part("b", 0, 11, NO_DIGEST, 4)]
    assert first.agrees(extents, data)
    assert [first.get(part) for part in (3, 4)] == [digest64(b"one part"), digest64(b"and another")]
    assert first.agrees(extents, data)
    assert not first.agrees(extents, memoryview(b"one part" + b"and anothex"))
    known = [Part("a", 0, 8, 123, 3), Part("b", 0, 11, 456, 4)]
    assert first.agrees(known, memoryview(b"x" * 19)), "the manifest's digests are the reader's to check"
    first.close()


def test_processes_share_it(path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    with context.Pool(2) as pool:
        held = pool.starmap(_keep, [(path, 1000), (path, 2000)])
    first = FirstReads(path)
    kept = [first.get(part) for part in range(50)]
    first.close()
    assert NO_DIGEST not in kept
    assert all(one[part] in (kept[part], 1000 + part, 2000 + part) for one in held for part in range(50))
    assert set(kept) <= {base + part for base in (1000, 2000) for part in range(50)}


def _keep(path: Path, base: int) -> list[int]:
    first = FirstReads(path)
    try:
        return [first.keep(part, base + part) for part in range(50)]
    finally:
        first.close()


def test_a_late_thread_keeps_nothing_and_opens_nothing_after_close(tmp_path: Path) -> None:
    first = FirstReads(tmp_path / "first-reads")
    assert first.keep(3, 7) == 7
    first.close()
    open_files = len(list(Path("/proc/self/fd").iterdir()))
    assert first.keep(4, 8) == 8
    assert first.get(3) == NO_DIGEST
    assert len(list(Path("/proc/self/fd").iterdir())) <= open_files
    again = FirstReads(tmp_path / "first-reads")
    assert (again.get(3), again.get(4)) == (7, NO_DIGEST)
    again.close()
