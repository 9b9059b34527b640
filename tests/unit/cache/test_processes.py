"""Processes that share a node's cache, also when one is killed in the middle."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from dalipipe.cache.blockstore import is_whole
from dalipipe.cache.config import CacheConfig
from dalipipe.cache.inspect import verify
from tests.support.lake import MemoryLake, image_set, open_folder
from tests.unit.cache.fetcher import node_cache

ROOT = Path(__file__).parents[3]
BLOCK = 4


def start(directory: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.unit.cache.fetcher", str(directory), *arguments],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate(timeout=10)


@pytest.mark.parametrize("point", ["locked", "writing", "written", "linked"])
def test_a_reader_that_waits_for_a_killed_process_gets_the_right_bytes(point: str, tmp_path: Path) -> None:
    folder = image_set()
    manifest, lake = open_folder(folder), MemoryLake(folder)
    holder = start(tmp_path, point, str(BLOCK))
    got: list[bytes] = []
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline().strip() == point

        def read() -> None:
            with node_cache(str(tmp_path), lake).get(BLOCK) as view:
                got.append(bytes(view.memory))

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        reader.join(0.1)
        if point != "linked":
            assert reader.is_alive(), "the reader must wait while the holder lives"
            assert not lake.reads
    finally:
        killed_s = time.monotonic()
        end(holder)
    reader.join(2)
    assert not reader.is_alive(), f"no bytes {time.monotonic() - killed_s:.1f} s after the kill"
    assert got == [folder.block(manifest, BLOCK)]
    files = sorted(path.name for path in (tmp_path / manifest.identity).rglob("*") if path.is_file())
    assert files == [str(BLOCK), "locks"]
    assert verify(CacheConfig(dir=str(tmp_path))).corrupt == 0


@pytest.mark.parametrize("point", ["locked", "writing", "linked"])
def test_a_process_killed_with_a_run_in_its_hands_leaves_whole_blocks_to_the_others(point: str, tmp_path: Path) -> None:
    folder = image_set()
    manifest, lake = open_folder(folder), MemoryLake(folder)
    holder = start(tmp_path, point, "1", "6")
    got: dict[int, bytes] = {}
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline().strip() == point
        cache = node_cache(str(tmp_path), lake)

        def read(block: int) -> None:
            with cache.get(block) as view:
                got[block] = bytes(view.memory)

        readers = [threading.Thread(target=read, args=[block], daemon=True) for block in range(1, 6)]
        for reader in readers:
            reader.start()
        readers[-1].join(0.1)
        if point != "locked":  # then all blocks of the run are locked, and are waited for
            assert not lake.reads
    finally:
        end(holder)
    for reader in readers:
        reader.join(5)
        assert not reader.is_alive()
    assert got == {block: folder.block(manifest, block) for block in range(1, 6)}
    files = sorted(path.name for path in (tmp_path / manifest.identity).rglob("*") if path.is_file())
    assert files == [*map(str, range(1, 6)), "locks"]
    assert verify(CacheConfig(dir=str(tmp_path))).corrupt == 0
    cache.close()


@pytest.mark.parametrize("what", ["all", "runs"])
def test_two_processes_read_each_block_from_the_lake_once(tmp_path: Path, what: str) -> None:
    processes = [start(tmp_path, what) for _ in range(2)]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline().strip() == "ready"
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        reads: Counter[tuple[str, int, int]] = Counter()
        shares = []
        for process in processes:
            output, _ = process.communicate(timeout=60)
            assert process.returncode == 0
            mine = json.loads(output)
            shares.append(len(mine))
            for key, first, stop, count in mine:
                reads[key, first, stop] += count
    finally:
        for process in processes:
            process.kill()
            process.communicate(timeout=10)
    manifest = open_folder(image_set())
    extents = [extent for block in range(manifest.num_blocks) for extent in manifest.extents(block)]
    both = MemoryLake(image_set())
    both.reads = reads
    assert {n for extent in extents for n in both.times_read(extent)} == {1}
    alone = reads.keys() == {(extent.shard, extent.start, extent.stop) for extent in extents}
    assert alone is (what == "all")
    assert all(
        is_whole(memoryview(path.read_bytes()))
        for path in tmp_path.rglob("*")
        if path.name.isdigit() and path.is_file()
    )
