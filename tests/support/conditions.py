"""Runs that suffer from one thing each, made by making that thing true: what `doctor` must tell apart."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import dalipipe as dp
from dalipipe.packing.config import PackConfig
from dalipipe.packing.run import pack
from dalipipe.storage.store import StorageConfig
from tests.support.images import jpeg_bytes
from tests.support.webserver import WebServer

BATCH = 4
_BLOCK = "16KiB"  # a few samples of the small set: about one block a step
_RANKS = 4


@dataclass(frozen=True)
class Sets:
    """Packed data sets, by folder."""

    small: Path
    heavy: Path
    mixed: Path
    broken: Path


def make_sets(root: Path) -> Sets:
    """Writes and packs them: `heavy` decodes slowly, `mixed` only now and then, a tenth of `broken` is cut short."""

    def packed(name: str, images: Iterator[bytes]) -> Path:
        lake = root / f"{name}-lake"
        lake.mkdir(parents=True)
        for number, data in enumerate(images):
            (lake / f"{number:05d}.jpg").write_bytes(data)
        config = PackConfig(shard_bytes="1MiB", block_bytes=_BLOCK, workers=1, check="header", shuffle=name != "mixed")
        pack(str(lake), str(root / name), config, StorageConfig())
        return root / name

    def small(number: int) -> bytes:
        return jpeg_bytes(number, height=64, width=64)

    large = jpeg_bytes(1, height=1100, width=1100, quality=95)
    huge = jpeg_bytes(2, height=2200, width=2200, quality=95)
    return Sets(
        small=packed("small", (small(number) for number in range(128))),
        heavy=packed("heavy", (large for _ in range(64))),
        mixed=packed("mixed", (huge if number % 48 < BATCH else small(number) for number in range(192))),
        broken=packed("broken", (small(n) if n % 10 else _cut(small(n)) for n in range(120))),
    )


def _cut(data: bytes) -> bytes:
    """The size in the header stays, so that packing takes it; the picture is noise that no decoder reads."""
    start = data.index(b"\xff\xda")
    return data[:start] + b"\xff\xda" + b"\x00" * 40 + b"\xff\xd9"


class Job:
    """Loaders of `num_ranks` ranks over one data set behind a web server, each trained by a thread of its own."""

    def __init__(self, folder: Path, root: Path, seed: int) -> None:
        objects = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        self.server = WebServer(objects)
        self.url = self.server.url
        self.root = root
        self.run_dir = root / "run"
        self.seed = seed
        self.overrides: list[str] = []

    def close(self) -> None:
        self.server.stop()

    def open(self, *overrides: str, num_ranks: int = 1, record: bool = True) -> list[dp.Loader]:
        words = [
            f"data.url={self.url}",
            "data.fields=[image]",
            f"cache.dir={self.root / 'cache'}",
            f"loader.batch_size={BATCH}",
            f"shuffle.seed={self.seed}",
            "graph.size=32",
            "device=cpu",
            "metrics.every_s=0.2",
            *([f"run_dir={self.run_dir}"] if record else []),
            *overrides,
        ]
        worlds = [
            dp.World(rank=rank, world_size=num_ranks, local_rank=rank, local_world_size=num_ranks)
            for rank in range(num_ranks)
        ]
        return [dp.load("train", words, world=world) for world in worlds]

    def train(
        self,
        *overrides: str,
        forward_s: float = 0.015,
        unmarked_s: float = 0.0,
        epochs: int = 1,
        num_ranks: int = 1,
        most_steps: int = 20,
        slow_rank: int = -1,
        collective_s: float = 0.0,
        record: bool = True,
        after_start: Callable[[], None] = lambda: None,
    ) -> None:
        """Trains by sleeping; with several ranks each step ends at a barrier, as an all-reduce does."""
        loaders = self.open(*overrides, num_ranks=num_ranks, record=record)
        after_start()
        barrier = threading.Barrier(num_ranks)
        failures: list[BaseException] = []

        def rank(number: int, loader: dp.Loader) -> None:
            try:
                for _ in range(epochs):
                    for at, _batch in enumerate(loader):
                        with dp.step("forward"):
                            time.sleep(forward_s * (4 if number == slow_rank else 1))
                        with dp.step("backward"):
                            time.sleep(forward_s)
                        with dp.step("collective"):
                            barrier.wait(30)
                            time.sleep(collective_s)
                        time.sleep(unmarked_s)
                        if at + 1 == most_steps:
                            break
            except BaseException as error:  # noqa: BLE001 - raised by the test's thread
                failures.append(error)
                barrier.abort()

        threads = [threading.Thread(target=rank, args=pair) for pair in enumerate(loaders)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        for loader in loaders:
            loader.close()
        if failures:
            raise failures[0]


@contextmanager
def slow_calls(target: str, seconds: float) -> Iterator[list[float]]:
    """Each call of the function at the dotted path `target` takes `seconds` longer; gives what each delay came to, in
    seconds (a busy host wakes a sleeper late)."""
    owner, _, name = target.rpartition(".")
    module, _, inner = owner.rpartition(".")
    import importlib

    try:
        holder: Any = importlib.import_module(owner)
    except ModuleNotFoundError:
        holder = getattr(importlib.import_module(module), inner)
    real = getattr(holder, name)

    delays_s: list[float] = []

    def slow(*args: Any, **kwargs: Any) -> Any:
        began_s = time.perf_counter()
        time.sleep(seconds)
        delays_s.append(time.perf_counter() - began_s)
        return real(*args, **kwargs)

    with mock.patch.object(holder, name, slow):
        yield delays_s


def _healthy(job: Job) -> None:
    job.train()


def _lake(job: Job) -> None:
    job.server.delay_s = 0.06
    job.train("cache.policy=stream", "prefetch.threads=1")


def _nvme(job: Job) -> None:
    job.train(record=False, forward_s=0.0)
    with slow_calls("dalipipe.cache.blockstore.BlockStore.open", 0.06):
        job.train("prefetch.threads=1")


def _pool(job: Job) -> None:
    pool = f"cache.tiers.pool.url={job.root / 'pool'}"
    job.train(pool, record=False, forward_s=0.0)
    shutil.rmtree(job.root / "cache")  # another node: what it lacks is in the pool
    with slow_calls("dalipipe.cache.pool.Pool.read", 0.06):
        job.train(pool, "cache.policy=stream", "prefetch.threads=1")


def _decode(job: Job) -> None:
    job.train(forward_s=0.001, most_steps=16)


def _hand_over(job: Job) -> None:
    with slow_calls("dalipipe.graphs.handover.HandOver._fields", 0.05):
        job.train(forward_s=0.005)


def _trainer(job: Job) -> None:
    job.train(unmarked_s=0.02)


def _collective(job: Job) -> None:
    job.train(num_ranks=_RANKS, collective_s=0.03, most_steps=8, epochs=2)


def _straggler(job: Job) -> None:
    job.train(num_ranks=_RANKS, slow_rank=2, most_steps=8, epochs=2)


def _thrash(job: Job) -> None:
    job.server.delay_s = 0.04
    job.train(
        "cache.tiers.node.capacity=20KiB",
        "prefetch.threads=1",
        "prefetch.memory_cap=64KiB",
        epochs=2,
        most_steps=32,
        forward_s=0.005,
    )


def _quarantine(job: Job) -> None:
    job.train("quarantine.max_fraction=0.5")


def _double(job: Job) -> None:
    job.train(record=False, forward_s=0.0)
    with slow_calls("dalipipe.cache.blockstore.BlockStore.open", 0.06):
        job.train("prefetch.threads=1", most_steps=32)  # long enough for a look at the page cache


def _threads(job: Job) -> None:
    job.train("graph.num_threads=1", forward_s=0.001, most_steps=16)


def _queue(job: Job) -> None:
    job.train("shuffle.mode=none", "prefetch.device_batches=1", "prefetch.queue_depth=1", forward_s=0.01, most_steps=48)


# By the verdict that each must get: the data set, and the run.
CONDITIONS: dict[str, tuple[str, Callable[[Job], None]]] = {
    "healthy": ("small", _healthy),
    "lake-bound": ("small", _lake),
    "pool-bound": ("small", _pool),
    "nvme-bound": ("small", _nvme),
    "decode-bound": ("heavy", _decode),
    "hand-over-bound": ("small", _hand_over),
    "trainer-bound": ("small", _trainer),
    "collective-bound": ("small", _collective),
    "straggler": ("small", _straggler),
    "cache-thrash": ("small", _thrash),
    "quarantine-storm": ("broken", _quarantine),
    "double-caching": ("small", _double),
    "num-threads": ("heavy", _threads),
    "queue-depth": ("mixed", _queue),
}


def run_condition(kind: str, sets: Sets, root: Path, seed: int) -> Path:
    """Runs one condition in `root`; returns the run folder."""
    which, run = CONDITIONS[kind]
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    folder = getattr(sets, which)
    job = Job(folder, root, seed)
    if kind == "double-caching":
        job.url = str(folder)
    try:
        run(job)
    finally:
        job.close()
    return job.run_dir
