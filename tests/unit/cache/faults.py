"""One process that forks the processes of a fault: `python -m tests.unit.cache.faults FAULT DIR [ARGUMENTS]`.

It has no threads when it forks, and prints what it saw as one JSON object.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from dalipipe.cache.blockstore import BlockStore
from dalipipe.cache.config import CacheConfig, TierConfig, TiersConfig
from dalipipe.cache.inspect import stat, verify
from dalipipe.cache.open import open_cache
from dalipipe.cache.tiered import TieredCache
from dalipipe.shards.manifest import Manifest
from dalipipe.telemetry import Recorder
from tests.support.lake import MemoryLake, image_set, open_folder
from tests.support.shards import Folder

FOLDER = image_set()
MANIFEST = open_folder(FOLDER)
NUM_WAITERS = 2


def open_node(
    directory: str,
    lake: MemoryLake,
    *,
    policy: str = "pin",
    capacity: int | float | str = 0.8,
    manifest: Manifest = MANIFEST,
    stop: Callable[[str], None] = lambda _point: None,
) -> tuple[TieredCache, Recorder]:
    recorder = Recorder()
    config = CacheConfig(dir=directory, policy=policy, tiers=TiersConfig(node=TierConfig(capacity=capacity)))
    cache = open_cache(manifest, lake, config, recorder, open_blocks=partial(BlockStore, probe=stop))
    return cache, recorder


def start(work: Callable[[], object]) -> tuple[int, int]:
    """Forks a child that does `work` and writes its result as JSON. Returns (process id, where to read it)."""
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        return child, reading
    code = 1
    try:
        result = json.dumps(work()).encode()
        os.write(writing, result)
        code = 0
    finally:
        os._exit(code)


def finish(child: int, reading: int, timeout_s: float = 20.0) -> tuple[object, float]:
    """The child's result (None when it died) and when it came."""
    ready, _, _ = select.select([reading], [], [], timeout_s)
    came_s = time.monotonic()
    if not ready:
        os.kill(child, signal.SIGKILL)
    data = os.read(reading, 1 << 16)
    os.close(reading)
    os.waitpid(child, 0)
    return (json.loads(data) if data else None), came_s


def kill_at(directory: str, policy: str, point: str) -> dict[str, object]:
    """Kills a holder at a point of its work on each block, while two others wait for the block."""
    waits_s, wrong, reads = [], 0, []
    for block in range(MANIFEST.num_blocks):
        told, telling = os.pipe()

        def hold(block: int = block, telling: int = telling) -> None:
            def stop(passed: str) -> None:
                if passed == point:
                    os.write(telling, b"!")
                    signal.pause()

            open_node(directory, MemoryLake(FOLDER), policy=policy, stop=stop)[0].get(block)

        def wait(block: int = block) -> tuple[bool, int]:
            cache, recorder = open_node(directory, MemoryLake(FOLDER), policy=policy)
            with cache.get(block) as view:
                right = bytes(view.memory) == FOLDER.block(MANIFEST, block)
            return right, int(recorder.snapshot().get("blocks_missed", 0))

        holder, held = start(hold)
        assert os.read(told, 1) == b"!"
        waiters = [start(wait) for _ in range(NUM_WAITERS)]
        # None may come before the kill where the block is not there yet; that they wait is what the time is for.
        early, _, _ = select.select([reading for _, reading in waiters], [], [], 0.03)
        wrong += bool(early) and point != "linked"
        os.kill(holder, signal.SIGKILL)
        killed_s = time.monotonic()
        os.waitpid(holder, 0)
        for end in (held, told, telling):
            os.close(end)
        results = [finish(*waiter) for waiter in waiters]
        waits_s.append(max(came_s - killed_s for _, came_s in results))
        wrong += sum(not (result and result[0]) for result, _ in results)  # type: ignore[index]
        reads.append(sum(result[1] for result, _ in results if result))  # type: ignore[index]
    names = [path.name for path in Path(directory).rglob("*") if path.is_file() and not path.name.isdigit()]
    return {
        "kills": MANIFEST.num_blocks,
        "longest_wait_s": max(waits_s),
        "wrong": wrong,
        "reads": sorted(set(reads)),
        "corrupt": verify(CacheConfig(dir=directory)).corrupt,
        "names": sorted(set(names)),
    }


def evict_held(directory: str) -> dict[str, object]:
    """One process holds views; another evicts their blocks; the first reads them afterwards."""
    told, telling = os.pipe()
    going, go = os.pipe()
    budget = MANIFEST.num_bytes // 4
    held_blocks = range(4)

    def hold() -> bool:
        cache, _ = open_node(directory, MemoryLake(FOLDER), policy="lru", capacity=budget)
        views = [cache.get(block) for block in held_blocks]
        os.write(telling, b"!")
        os.read(going, 1)
        return all(
            bytes(view.memory) == FOLDER.block(MANIFEST, block) for block, view in zip(held_blocks, views, strict=True)
        )

    holder = start(hold)
    os.read(told, 1)
    cache, recorder = open_node(directory, MemoryLake(FOLDER), policy="lru", capacity=budget)
    for block in range(4, MANIFEST.num_blocks):
        cache.get(block).release()
    named = [block for block in held_blocks if cache.is_kept(block)]
    report = stat(CacheConfig(dir=directory))
    os.write(go, b"!")
    intact, _ = finish(*holder)
    return {
        "intact": intact,
        "named": named,
        "evicted": recorder.snapshot()["blocks_evicted.node"],
        "held_unnamed_bytes": report.held_unnamed_bytes,
        "bytes": report.bytes,
        "budget": budget,
    }


def fill_up(directory: str) -> dict[str, object]:
    """Somebody else fills the disk after the cache was opened."""
    lake = MemoryLake(FOLDER)
    cache, recorder = open_node(directory, lake, capacity=0.9)
    disk = os.statvfs(directory)
    room = disk.f_bavail * disk.f_frsize
    (Path(directory) / "theirs").write_bytes(bytes(room - MANIFEST.num_bytes // 2))
    return {
        "tiers": _scan(cache),
        "again": _scan(cache),
        "counts": recorder.snapshot(),
        "reads": sum(lake.reads.values()),
    }


def read_only(directory: str) -> dict[str, object]:
    """A folder that was filled by half and is mounted read-only."""
    cache, _ = open_node(directory, MemoryLake(FOLDER))
    for block in range(0, MANIFEST.num_blocks, 2):
        cache.get(block).release()
    cache.close()
    subprocess.run(["mount", "-o", "remount,ro", directory], check=True, timeout=20)
    cache, recorder = open_node(directory, MemoryLake(FOLDER))
    first = {"tiers": _scan(cache), "counts": recorder.snapshot()}
    other = open_node(directory, MemoryLake(image_set(40)), manifest=open_folder(image_set(40)))[0]
    return {**first, "other": _scan(other, image_set(40))}


def equal_names(directory: str) -> dict[str, object]:
    """Two jobs at once, whose data sets have shards of the same names."""
    folders = [image_set(num_bytes=size) for size in (300, 500)]
    assert folders[0].files.keys() == folders[1].files.keys()

    def scan(folder: Folder) -> bool:
        cache = open_node(directory, MemoryLake(folder), manifest=open_folder(folder))[0]
        return _scan(cache, folder) == ["lake"] * open_folder(folder).num_blocks == ["lake"] * len(_scan(cache, folder))

    jobs = [start(partial(scan, folder)) for folder in folders]
    return {"right": [finish(*job)[0] for job in jobs], "sets": len(stat(CacheConfig(dir=directory)).sets)}


def _scan(cache: TieredCache, folder: Folder = FOLDER) -> list[str]:
    tiers, manifest = [], open_folder(folder)
    for block in range(manifest.num_blocks):
        with cache.get(block) as view:
            assert bytes(view.memory) == folder.block(manifest, block)
            tiers.append(view.tier)
    return tiers


FAULTS: dict[str, Callable[..., dict[str, object]]] = {
    "kill": kill_at,
    "evict": evict_held,
    "full": fill_up,
    "read-only": read_only,
    "names": equal_names,
}

if __name__ == "__main__":
    print(json.dumps(FAULTS[sys.argv[1]](*sys.argv[2:])))
