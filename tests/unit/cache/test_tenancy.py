"""Shared memory is left as it was found, whoever of several processes is killed, and in whichever order they end."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from dalipipe.cache.blockstore import LOCKS_NAME
from dalipipe.cache.config import CacheConfig, MemoryConfig, TierConfig, TiersConfig
from dalipipe.cache.folders import memory_folder
from dalipipe.cache.inspect import clear, remove_set, stat
from dalipipe.cache.locks import lock_unused
from dalipipe.cache.open import make_folder, open_cache
from dalipipe.cache.readers import Readers
from dalipipe.cache.tenancy import Tenancy, sweep
from dalipipe.cache.tiered import TieredCache
from dalipipe.errors import ConfigError
from dalipipe.storage import StorageConfig, open_store
from dalipipe.telemetry import Recorder
from tests.support.lake import MemoryLake, image_set, open_folder

ROOT = Path(__file__).parents[3]
NUM_SAMPLES = 200

# A job: reads all blocks, says so, and ends when its input is closed.
JOB = """
import sys
from pathlib import Path
from tests.unit.cache.test_tenancy import scanned
cache = scanned(Path(sys.argv[1]), memory=sys.argv[2], keep=sys.argv[3] == "keep", policy=sys.argv[4])
print("ready", flush=True)
sys.stdin.read()
cache.close()
"""


def configure(root: Path, *, memory: str = "0", keep: bool = False, policy: str = "pin") -> CacheConfig:
    tiers = TiersConfig(
        memory=MemoryConfig(capacity=memory, dir=str(root / "memory"), keep=keep), node=TierConfig(capacity=0)
    )
    return CacheConfig(dir=str(root / "node"), policy=policy, tiers=tiers)


def scanned(root: Path, *, seed: int = 0, **options: object) -> TieredCache:
    """An open cache of the data set, read once, and with one view still held."""
    folder = image_set(NUM_SAMPLES + seed, num_bytes=60)
    manifest = open_folder(folder)
    config = configure(root, **options)  # type: ignore[arg-type]
    cache = open_cache(manifest, MemoryLake(folder), config, Recorder(), readers=Readers(local_ranks=2))
    for block in range(manifest.num_blocks):
        view = cache.get(block)
        if block:
            view.release()
    return cache


@contextmanager
def job(root: Path, memory: str, keep: str = "", policy: str = "pin") -> Iterator[subprocess.Popen[bytes]]:
    words = [sys.executable, "-c", JOB, str(root), memory, keep, policy]
    with subprocess.Popen(words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield process
        finally:
            process.kill()


def end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(60) == 0


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "memory").mkdir()
    return tmp_path


@pytest.mark.parametrize(("memory", "policy"), [("1MB", "lru"), ("0", "stream")])
def test_of_two_jobs_one_is_killed_and_the_other_leaves_nothing(root: Path, memory: str, policy: str) -> None:
    with job(root, memory, policy=policy) as one, job(root, memory, policy=policy) as other:
        assert list((root / "memory").iterdir())
        os.kill(one.pid, signal.SIGKILL)
        one.wait(60)
        assert list((root / "memory").rglob("[0-9]*")), "the survivor's blocks are there"
        end(other)
    assert not list((root / "memory").iterdir())


def test_what_killed_jobs_left_goes_with_the_next_job_of_any_data_set(root: Path) -> None:
    with job(root, "1MB") as one, job(root, "0", policy="stream") as other:
        for process in (one, other):
            os.kill(process.pid, signal.SIGKILL)
            process.wait(60)
    assert stat(configure(root)).blocks > 0
    stranger = root / "memory" / "photos"
    (stranger / "0").mkdir(parents=True)
    (stranger / "0" / "1").write_text("somebody's own")
    scanned(root, seed=1, policy="stream").close()
    assert sorted(path.name for path in (root / "memory").rglob("*")) == ["0", "1", "photos"]


def test_a_job_of_the_same_data_set_finds_the_blocks_of_a_killed_one(root: Path) -> None:
    with job(root, "1MB") as one:
        os.kill(one.pid, signal.SIGKILL)
        one.wait(60)
    blocks = stat(configure(root)).blocks
    assert blocks > 0
    lake = MemoryLake(folder := image_set(NUM_SAMPLES, num_bytes=60))
    manifest = open_folder(folder)
    cache = open_cache(manifest, lake, configure(root, memory="1MB"), Recorder())
    for block in range(manifest.num_blocks):
        cache.get(block).release()
    assert len(lake.reads) == manifest.num_blocks - blocks
    cache.close()
    assert not list((root / "memory").iterdir())


def test_blocks_that_a_job_wanted_kept_stay_until_they_are_cleared(root: Path) -> None:
    with job(root, "1MB", "keep") as one, job(root, "1MB") as other:
        end(one)
        end(other)  # did not ask for it itself
    scanned(root, seed=1, memory="1MB").close()
    assert stat(configure(root)).blocks > 0
    assert not list((root / "memory").rglob("passing"))
    clear(configure(root))
    assert not list((root / "memory").iterdir())


def test_in_the_default_place_the_folders_above_go_too(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dalipipe.cache.folders.SHARED_MEMORY", root)
    config, other = (CacheConfig(dir=str(root / name)) for name in "ab")
    first, second = Tenancy(config, "x", keep=False), Tenancy(other, "x", keep=False)
    assert len({memory_folder(config).parent, memory_folder(other).parent}) == 1
    first.leave()
    assert [path.name for path in root.rglob("x")] == ["x"]
    second.leave()
    second.leave()
    assert sorted(path.name for path in root.iterdir()) == ["memory"]
    (memory_folder(config) / "unmarked" / "passing").mkdir(parents=True)  # of a job killed as it began
    sweep(other)
    assert sorted(path.name for path in root.iterdir()) == ["memory"]


def test_who_enters_while_an_unmarked_folder_is_swept_keeps_its_mark(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dalipipe.cache.folders.SHARED_MEMORY", root)
    config = CacheConfig(dir=str(root / "node"))
    folder = memory_folder(config) / "x"
    folder.mkdir(parents=True)  # a job that has made its folder and not yet its mark
    entered: list[Tenancy] = []
    thread = threading.Thread(target=lambda: entered.append(Tenancy(config, "x", keep=False)))

    def remove_slowly(path: Path) -> None:
        thread.start()
        thread.join(0.3)
        remove_set(path)

    monkeypatch.setattr("dalipipe.cache.tenancy.remove_set", remove_slowly)
    sweep(config)
    thread.join(10)
    monkeypatch.undo()
    monkeypatch.setattr("dalipipe.cache.folders.SHARED_MEMORY", root)
    assert lock_unused(folder / LOCKS_NAME) is None, "who comes later sees the one who is there"
    assert (folder / LOCKS_NAME).exists()
    entered[0].leave()
    assert not folder.exists()


def test_a_folder_can_be_made_while_jobs_that_end_take_it_away(root: Path) -> None:
    folder, ended = root / "memory" / "x" / "y", threading.Event()

    def take_away() -> None:
        while not ended.is_set():
            shutil.rmtree(folder.parent, ignore_errors=True)

    thread = threading.Thread(target=take_away)
    thread.start()
    try:
        assert all(make_folder(folder) for _ in range(1000))
    finally:
        ended.set()
        thread.join(10)


def test_a_cache_that_cannot_be_opened_leaves_nothing(root: Path) -> None:
    folder = image_set(NUM_SAMPLES, num_bytes=60)
    with pytest.raises(ConfigError):
        open_cache(
            open_folder(folder),
            MemoryLake(folder),
            configure(root, memory="2kB", policy="lru"),
            Recorder(),
            readers=Readers(working_blocks=10),
        )
    assert not list((root / "memory").iterdir())


@pytest.mark.parametrize("config", [CacheConfig(policy="nope"), CacheConfig(policy="lru", dir="memory")])
def test_a_cache_that_cannot_be_opened_closes_its_pool(config: CacheConfig, root: Path) -> None:
    manifest = open_folder(folder := image_set(NUM_SAMPLES, num_bytes=60))
    (root / "node").mkdir()
    config = replace(config, dir=config.dir and str(root / "node"), tiers=TiersConfig(node=TierConfig(capacity=1)))
    pool = open_store("memory://pool", StorageConfig(budget_dir=str(root / "memory")))
    assert list((root / "memory").iterdir()), "the node's ledger"
    with pytest.raises(ConfigError):
        open_cache(manifest, MemoryLake(folder), config, Recorder(), pool=pool, readers=Readers(working_blocks=10))
    assert not list((root / "memory").iterdir())


CROWD = """
import random, sys
from pathlib import Path
from dalipipe.cache.blockstore import BlockStore
from dalipipe.cache.tenancy import Tenancy
from tests.unit.cache.test_tenancy import configure
config, chance = configure(Path(sys.argv[1])), random.Random(int(sys.argv[2]))
print("ready", flush=True)
sys.stdin.readline()
for _ in range(60):
    tenancy = Tenancy(config, "x", keep=False)
    blocks, block = BlockStore(tenancy.folder), chance.randrange(3)
    blocks.write(block, memoryview(b"bytes"))
    # Whoever uses a folder still has what it put there: nobody else took it for the last one's.
    assert blocks.open(block, 5) == b"bytes"
    tenancy.leave()
"""


def test_jobs_that_come_and_go_all_the_time_never_lose_a_folder_in_use(root: Path) -> None:
    crowd = [
        subprocess.Popen(
            [sys.executable, "-c", CROWD, str(root), str(seed)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for seed in range(4)
    ]
    try:
        for process in crowd:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
        for process in crowd:
            assert process.stdin is not None
            process.stdin.write(b"go\n")
            process.stdin.flush()
        victim = random.Random(0).choice(crowd)
        os.kill(victim.pid, signal.SIGKILL)
        assert [process.wait(60) for process in crowd if process is not victim] == [0, 0, 0]
    finally:
        for process in crowd:
            process.kill()
            process.communicate()
    Tenancy(configure(root), "x", keep=False).leave()
    assert not list((root / "memory").iterdir())
