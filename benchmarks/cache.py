"""What do the cache's policies and its read path cost and save?

Run: python benchmarks/cache.py [--quick] [--only hits,hot,path]

Everything is real: shards in a folder, the order, the prefetcher's threads, the cache on the disk of --dir. Decode
and training are left out. "lake" counts blocks that were read from the shards; a hit is a block visit that did not.
"""

from __future__ import annotations

import argparse
import math
import mmap
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import lru_cache
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dalipipe.cache.config import CacheConfig, TierConfig, TiersConfig
from dalipipe.cache.open import open_cache
from dalipipe.cache.tiered import TieredCache
from dalipipe.cache.warm import warm
from dalipipe.order import EpochOrder, ShuffleConfig, epoch_order
from dalipipe.order.repeat import Repeat
from dalipipe.prefetch.config import PrefetchConfig
from dalipipe.prefetch.open import open_prefetcher
from dalipipe.shards.assembly import ManifestBuilder
from dalipipe.shards.index import Rows, part_rows
from dalipipe.shards.manifest import Manifest
from dalipipe.shards.tar import TarWriter
from dalipipe.storage.local import LocalStore
from dalipipe.storage.store import StorageConfig
from dalipipe.telemetry import Recorder

BLOCK_SAMPLES, BATCH_SIZE = 8, 64
SHARES = (0.1, 0.25, 0.5, 0.75, 0.9)
HOT = ((0.1, 8), (0.02, 40))  # share of the blocks that are hot, times that they come in an epoch


def write_lake(folder: Path, *, num_blocks: int, block_samples: int, sample_bytes: int, num_shards: int = 4) -> None:
    """A data set of random bytes that stand for images."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    builder = ManifestBuilder(kind="images", classes=["only"], block_samples=block_samples)
    per_shard = num_blocks // num_shards * block_samples
    for number in range(num_shards):
        name = f"s{number}.tar"
        with (folder / name).open("wb") as stream:
            writer, extents, digests = TarWriter(stream), [], []
            for start, stop in part_rows(builder.num_samples, per_shard, block_samples):
                for row in range(start, stop):
                    members = {"jpg": random.bytes(sample_bytes), "cls": b"0"}
                    extents.append(writer.add(f"{builder.num_samples + row:08d}", members))
                digests.append(writer.cut())
            writer.finish()
        index = builder.add(
            name=name,
            num_bytes=writer.offset,
            digest=writer.digest,
            rows=Rows.of([f"{i:08d}" for i in range(per_shard)], extents, np.ones((per_shard, 2), np.int64)),
            part_digests=digests,
            extensions={"jpg", "cls"},
        )
        (folder / f"{name}.idx").write_bytes(index)
    files = builder.finish()
    (folder / "shards.arrow").write_bytes(files.shards)
    (folder / "manifest.json").write_bytes(files.header)


@contextmanager
def opened(
    lake: Path, cache_dir: Path, *, policy: str = "pin", capacity: int | float | str = 0.9
) -> Iterator[tuple[TieredCache, Manifest, Recorder]]:
    """The data set behind a cache of its own."""
    store, recorder = LocalStore(lake, StorageConfig()), Recorder()
    manifest = Manifest.open(store.read)
    config = CacheConfig(dir=str(cache_dir), policy=policy, tiers=TiersConfig(node=TierConfig(capacity=capacity)))
    with closing(open_cache(manifest, store, config, recorder)) as cache:
        yield cache, manifest, recorder


def run_epochs(
    lake: Path, cache_dir: Path, *, policy: str, capacity: int, repeats: Sequence[Repeat] = (), num_epochs: int = 6
) -> tuple[list[float], list[float], int]:
    """Reads epochs through the prefetcher. Returns (lake blocks, written bytes) of each epoch, and its block visits.

    The prefetcher gets memory for 16 blocks and no more, so that it is the cache that remembers.
    """
    with opened(lake, cache_dir, policy=policy, capacity=capacity) as (cache, manifest, recorder):

        @lru_cache(maxsize=4)
        def order(epoch: int) -> EpochOrder:
            return epoch_order(
                manifest.shape,
                epoch=epoch,
                batch_size=BATCH_SIZE,
                shuffle=ShuffleConfig(window=0, lanes=8),
                last_batch="partial",
                repeats=repeats,
            )

        memory_bytes = 16 * manifest.num_bytes // manifest.num_blocks
        prefetcher = open_prefetcher(
            orders=order,
            start=(0, 0),
            slots=np.arange(BATCH_SIZE, dtype=np.int64),
            manifest=manifest,
            cache=cache,
            fields=["image"],
            config=PrefetchConfig(threads=4, depth=2, cold_steps=0, memory_cap=memory_bytes),
            recorder=recorder,
        )
        lakes, writes = [0.0], [0.0]
        with closing(prefetcher):
            for _ in range(num_epochs):
                for _ in range(order(0).num_steps):
                    prefetcher.next().release()
                counts = recorder.snapshot()
                lakes.append(counts.get("blocks_missed", 0))
                writes.append(counts.get("bytes_written.node", 0))
        num_visits = order(0).num_steps * BATCH_SIZE // BLOCK_SAMPLES
    shutil.rmtree(cache_dir)
    return np.diff(lakes).tolist(), np.diff(writes).tolist(), num_visits


def show_hits(root: Path, quick: bool) -> None:
    """Hit rates of plain epochs at several capacities."""
    num_blocks = 256 if quick else 1536
    lake = root / "hits"
    write_lake(lake, num_blocks=num_blocks, block_samples=BLOCK_SAMPLES, sample_bytes=500)
    total = sum(path.stat().st_size for path in lake.glob("*.tar"))
    print(f"plain epochs: {num_blocks} blocks of {total / num_blocks / 1e3:.0f} kB; epochs 2 to 6, by capacity c")
    print("  policy    c   hit    bound   lake MB/epoch   written MB/epoch")
    for share in (0.5,) if quick else SHARES:
        for policy in ("pin", "lru", "lfu"):
            lakes, writes, num_visits = run_epochs(lake, root / "cache", policy=policy, capacity=int(share * total))
            hit = 1 - np.mean(lakes[1:]) / num_visits
            bound = share + (1 - share) * math.log(1 - share) if policy == "lru" else share
            lake_mb = np.mean(lakes[1:]) * total / num_blocks / 1e6
            print(
                f"  {policy:<6} {share:5.2f}  {hit:.3f}  {bound:.3f}  {lake_mb:10.2f}  "
                f"{np.mean(writes[1:]) / 1e6:15.2f}"
            )


def show_hot(root: Path, quick: bool) -> None:
    """Hit rates where a few blocks come many times an epoch."""
    num_blocks = 256 if quick else 1536
    lake = root / "hot"
    write_lake(lake, num_blocks=num_blocks, block_samples=BLOCK_SAMPLES, sample_bytes=500)
    total = sum(path.stat().st_size for path in lake.glob("*.tar"))
    print(f"hot samples: {num_blocks} blocks, a share of them several times an epoch; epochs 3 to 6")
    print("  hot        policy    c   hit    lake MB/epoch   written MB/epoch")
    for hot_share, factor in HOT:
        hot = Repeat(start=0, stop=int(hot_share * num_blocks), factor=factor)
        for share in (0.25,) if quick else (0.1, 0.25, 0.5):
            for policy in ("pin", "lru", "lfu"):
                lakes, writes, num_visits = run_epochs(
                    lake, root / "cache", policy=policy, capacity=int(share * total), repeats=[hot]
                )
                hit = 1 - np.mean(lakes[2:]) / num_visits
                lake_mb = np.mean(lakes[2:]) * total / num_blocks / 1e6
                print(
                    f"  {hot_share:4.0%} x {factor:<3} {policy:<6} {share:5.2f}  {hit:.3f}  {lake_mb:10.2f}  "
                    f"{np.mean(writes[2:]) / 1e6:15.2f}"
                )


def best_s(work: Callable[[], None], rounds: int, barrier: object = None) -> float:
    """The shortest of several runs; the mean where others run at the same time, as from `barrier` on."""
    if barrier is not None:
        barrier.wait(60)  # type: ignore[attr-defined]
        begun_s = time.perf_counter()
        for _ in range(rounds):
            work()
        return (time.perf_counter() - begun_s) / rounds
    times = []
    for _ in range(rounds):
        begun_s = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun_s)
    return min(times)


def touch(data: np.ndarray) -> int:
    """Reads every cache line."""
    return int(data[::64].sum())


def read_cached(lake: Path, cache_dir: Path, rounds: int, barrier: object = None) -> float:
    """Seconds for all blocks through the cache, their bytes touched."""
    with opened(lake, cache_dir) as (cache, manifest, _):

        def work() -> None:
            for block in range(manifest.num_blocks):
                with cache.get(block) as view:
                    touch(np.frombuffer(view.memory, np.uint8))

        work()
        return best_s(work, rounds, barrier)


def read_bare(_lake: Path, cache_dir: Path, rounds: int, barrier: object = None) -> float:
    """The same through plain mmap of the files."""
    files = [path for path in cache_dir.rglob("*") if path.name.isdigit() and path.is_file()]

    def work() -> None:
        for path in files:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
                data = np.frombuffer(mapped, np.uint8)
                touch(data)
                del data

    work()
    return best_s(work, rounds, barrier)


def _report(out: object, read: Callable[..., float], *arguments: object) -> None:
    out.put(read(*arguments))  # type: ignore[attr-defined]


def in_processes(read: Callable[..., float], lake: Path, cache_dir: Path, rounds: int, num: int) -> float:
    """The slowest of `num` processes that read at once."""
    context = multiprocessing.get_context("spawn")
    barrier, out = context.Barrier(num), context.Queue()
    workers = [context.Process(target=_report, args=(out, read, lake, cache_dir, rounds, barrier)) for _ in range(num)]
    for worker in workers:
        worker.start()
    slowest = float(max(out.get(timeout=120) for _ in workers))
    for worker in workers:
        worker.join(30)
    return slowest


def show_path(root: Path, quick: bool) -> None:
    """What a warm read costs over a bare mapping."""
    num_blocks, block_samples, sample_bytes = (16 if quick else 128), 32, 110_000
    lake, cache_dir = root / "path", root / "path-cache"
    write_lake(lake, num_blocks=num_blocks, block_samples=block_samples, sample_bytes=sample_bytes)
    with opened(lake, cache_dir) as (cache, manifest, _):
        warm(cache, manifest)
        num_samples, total = manifest.num_samples, sum(map(manifest.block_bytes, range(manifest.num_blocks)))
    rounds = 3 if quick else 7
    print(
        f"warm read path: {num_blocks} blocks of {total / num_blocks / 1e6:.1f} MB, {block_samples} samples each, in "
        "the page cache"
    )
    cached_s, bare_s = (read(lake, cache_dir, rounds) for read in (read_cached, read_bare))
    print(
        f"  one process: cache {total / cached_s / 1e9:.2f} GB/s, bare mmap {total / bare_s / 1e9:.2f} GB/s "
        f"(ratio {bare_s / cached_s:.2f}); the cache adds {(cached_s - bare_s) / num_samples * 1e6:+.1f} µs a sample"
    )
    opening_s, bare_opening_s = _opening_s(lake, cache_dir, rounds), _bare_opening_s(cache_dir, rounds)
    print(
        f"  bytes mapped but not read: {opening_s / num_samples * 1e6:.2f} µs a sample for get and release, "
        f"{bare_opening_s / num_samples * 1e6:.2f} µs for open, mmap, populate and close"
    )
    num = 4
    cached_s, bare_s = (in_processes(read, lake, cache_dir, rounds, num) for read in (read_cached, read_bare))
    print(
        f"  {num} processes on {len(os.sched_getaffinity(0))} CPUs: cache {num * total / cached_s / 1e9:.2f} GB/s, "
        f"bare mmap {num * total / bare_s / 1e9:.2f} GB/s (ratio {bare_s / cached_s:.2f})"
    )


def _opening_s(lake: Path, cache_dir: Path, rounds: int) -> float:
    with opened(lake, cache_dir) as (cache, manifest, _):

        def work() -> None:
            for block in range(manifest.num_blocks):
                cache.get(block).release()

        return best_s(work, rounds)


def _bare_opening_s(cache_dir: Path, rounds: int) -> float:
    files = [path for path in cache_dir.rglob("*") if path.name.isdigit() and path.is_file()]

    def work() -> None:
        for path in files:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
                mapped.madvise(22)  # MADV_POPULATE_READ

    return best_s(work, rounds)


SHOWS: dict[str, Callable[[Path, bool], None]] = {
    "hits": show_hits,
    "hot": show_hot,
    "path": show_path,
}


def main() -> None:
    """Runs the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes, under 20 s")
    parser.add_argument("--only", default=",".join(SHOWS), help="parts, comma-separated")
    parser.add_argument("--dir", default=None, help="where lake and cache are made (a temporary folder by default)")
    args = parser.parse_args()
    for name in args.only.split(","):
        with tempfile.TemporaryDirectory(dir=args.dir) as root:
            SHOWS[name](Path(root), args.quick)


if __name__ == "__main__":
    main()
