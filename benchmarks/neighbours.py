"""What does it save that neighbouring blocks of a shard which are wanted together are read by one request?

    python benchmarks/neighbours.py [--quick]

Epochs through order, prefetcher and cache from a server on loopback that answers after 30 ms and counts; decode and
training are left out, and nothing is kept. `alone` is `cache.request_bytes=0`, `joined` the default (8 MiB). First a
set of 256 KiB blocks: in the order of the manifest (`none`), where each block's neighbour is wanted next, and shuffled
(`block`). Then one of about 100 blocks, where chance makes neighbours. The trainer takes steps as they come, or one
each 50 ms (`paced`).

Last by arithmetic, for a data set as large as ImageNet: of the blocks that the shipped order newly needs in a window of
steps, those whose neighbour is among them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.cache import write_lake
from dalipipe.cache.config import CacheConfig
from dalipipe.cache.open import open_cache
from dalipipe.order.config import ShuffleConfig
from dalipipe.order.recipe import orders
from dalipipe.prefetch.config import PrefetchConfig
from dalipipe.prefetch.open import open_prefetcher
from dalipipe.shards.manifest import Manifest
from dalipipe.shards.shape import DataShape
from dalipipe.storage.open import open_store
from dalipipe.storage.store import StorageConfig
from dalipipe.telemetry import Recorder
from tests.support.faultproxy import FolderServer

Ids = npt.NDArray[np.int64]

LATENCY_S = 0.03
PACE_S = 0.05
BATCH_SIZE, BLOCK_SAMPLES, SAMPLE_BYTES = 64, 8, 31_700  # blocks of 256 KiB with the headers of a tar


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One epoch."""

    requests: int
    num_bytes: int
    wall_s: float
    waited_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    print(f"{'blocks':>7}{'order':>8}{'trainer':>9}{'':>8}{'requests':>10}", end="")
    print(f"{'MB':>8}{'MB each':>9}{'wall s':>9}{'waited s':>10}")
    with tempfile.TemporaryDirectory() as folder:
        for num_blocks in (128 if quick else 1024, 96):
            lake = Path(folder) / str(num_blocks)
            write_lake(lake, num_blocks=num_blocks, block_samples=BLOCK_SAMPLES, sample_bytes=SAMPLE_BYTES)
            for mode in ("none", "block"):
                for pace_s in (0.0,) if quick else (0.0, PACE_S):
                    _compare(lake, num_blocks, mode, pace_s)
    _print_arithmetic()


def _compare(lake: Path, num_blocks: int, mode: str, pace_s: float) -> None:
    found = {}
    for name, request_bytes in (("alone", 0), ("joined", 8 << 20)):
        one = found[name] = _epoch(lake, mode, pace_s, request_bytes)
        trainer = "paced" if pace_s else "eager"
        print(
            f"{num_blocks:>7}{mode:>8}{trainer:>9}{name:>8}{one.requests:>10}{one.num_bytes / 1e6:>8.1f}"
            f"{one.num_bytes / 1e6 / one.requests:>9.2f}{one.wall_s:>9.2f}{one.waited_s:>10.2f}"
        )
    alone, joined = found["alone"], found["joined"]
    print(
        f"{'':>32}{joined.requests / alone.requests:>10.1%} of the requests, {joined.wall_s / alone.wall_s:.2f} of the "
        "time"
    )


def _epoch(lake: Path, mode: str, pace_s: float, request_bytes: int) -> Measured:
    """Reads an epoch; blocks that the window has begun for the next one count, as they do in a run."""
    server, recorder = FolderServer(lake, latency_s=LATENCY_S), Recorder()
    store = open_store(server.url, StorageConfig(hedge=False))
    try:
        manifest = Manifest.open(store.read)
        cache = open_cache(manifest, store, CacheConfig(policy="stream", request_bytes=request_bytes), recorder)
        shuffle = ShuffleConfig(mode=mode, lanes="auto" if mode == "none" else 8, window=0.05)
        prefetcher = open_prefetcher(
            orders=orders({"": manifest.shape}, batch_size=BATCH_SIZE, shuffle=shuffle, last_batch="drop"),
            start=(0, 0),
            slots=np.arange(BATCH_SIZE, dtype=np.int64),
            manifest=manifest,
            cache=cache,
            fields=["image"],
            config=PrefetchConfig(cold_steps=0),
            recorder=recorder,
        )
        with closing(cache), closing(prefetcher):
            server.requests.clear()
            began_s, waited_s = time.perf_counter(), 0.0
            for number in range(manifest.num_samples // BATCH_SIZE):
                asked_s = time.perf_counter()
                prefetcher.next().release()
                waited_s += time.perf_counter() - asked_s
                time.sleep(max(0.0, began_s + (number + 1) * pace_s - time.perf_counter()))
            wall_s = time.perf_counter() - began_s
            reads = [one for one in server.requests if one.method == "GET" and one.target.endswith(".tar")]
            num_bytes = int(recorder.snapshot()["bytes_read.lake"])
    finally:
        store.close()
        server.stop()
    return Measured(requests=len(reads), num_bytes=num_bytes, wall_s=wall_s, waited_s=waited_s)


def _print_arithmetic() -> None:
    """1,281,167 samples of 110 kB in blocks of 32 (3.5 MB), global batch 256, 20 windows an order."""
    shape = DataShape(num_samples=1_281_167, block_samples=32, num_bytes=1_281_167 * 110_000)
    print(f"\n{'order':<8}{'window':>8}{'new blocks':>14}{'with a neighbour':>20}")
    for mode in ("block", "none"):
        order = orders({"": shape}, batch_size=256, shuffle=ShuffleConfig(mode=mode), last_batch="drop")(0)
        for steps in (2, 16):
            starts = np.random.default_rng(0).integers(steps, order.num_steps - steps, size=20).tolist()
            found = [_new_blocks(order.ids(at, steps), order.ids(at - steps, steps), 32) for at in starts]
            total = sum(len(blocks) for blocks in found)
            beside = sum(int((np.diff(blocks) == 1).sum()) for blocks in found)
            print(f"{mode:<8}{steps:>8}{total / 20:>14.0f}{beside / total:>20.1%}")


def _new_blocks(ids: Ids, before: Ids, block_samples: int) -> Ids:
    return np.setdiff1d(ids // block_samples, before // block_samples)


if __name__ == "__main__":
    main()
