"""What does it cost the CPU to have the blocks of a step near, without decoding them?

    python benchmarks/feeding.py [--quick] [--rounds N] [--steps N]

An epoch of batches of 64 photographs (about 3.7 MB a step, in blocks of 4 MiB, 16 lanes) at a step of 50 ms goes
through order, prefetcher and cache, and its samples are handed out as views. CPU milliseconds a step of this process,
servers not counted, after the first eight steps:

    lake     over HTTP from a lake of 30 ms and 100 MB/s, kept on the node's disk.
    files    from files in a memory file system, kept on the node's disk.
    stream   from the same files, used and dropped (`cache.policy=stream`).
    mapped   every block lies in the node's cache already, as in epoch 2.
    floor    what no code can leave out, in one thread: read a block of a file into memory that is warm, take its xxh3,
             write it to a file without a name, map that.

The runs take turns, and of each the median over the rounds is told, with its share of `floor`. `lake_mb` is what came
from the store in a step that was measured: a run that is further ahead at its end has read more than it handed out, and
one that was far ahead before the first of them less (with `--quick` perhaps nothing: that only shows that it runs).
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import xxhash

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.lake import BATCH_SIZE, make_data
from dalipipe.cache.config import CacheConfig
from dalipipe.cache.open import open_cache
from dalipipe.order.config import ShuffleConfig
from dalipipe.order.epoch import epoch_order
from dalipipe.order.step import Step
from dalipipe.prefetch.config import PrefetchConfig
from dalipipe.prefetch.open import open_prefetcher
from dalipipe.shards.manifest import Manifest
from dalipipe.storage import StorageConfig, open_store
from dalipipe.telemetry import Recorder
from tests.support.emulation import lake

_STEP_S = 0.05
_NUM_FIRST = 8
_NUM_HELD = 3
_NUM_AHEAD = 40
_LANES = 16


def epoch(url: str, cache_dir: Path, policy: str, num_steps: int, *, step_s: float = _STEP_S) -> tuple[float, float]:
    """CPU milliseconds and MB from the lake, a step."""
    recorder = Recorder()
    store = open_store(url, StorageConfig(), record=recorder.add)
    manifest = Manifest.open(store.read)
    cache = open_cache(manifest, store, CacheConfig(policy=policy, dir=str(cache_dir)), recorder)
    prefetcher = open_prefetcher(
        orders=lambda number: epoch_order(
            manifest.shape, epoch=number, batch_size=BATCH_SIZE, shuffle=ShuffleConfig(lanes=_LANES), last_batch="drop"
        ),
        start=(0, 0),
        slots=np.arange(BATCH_SIZE),
        manifest=manifest,
        cache=cache,
        fields=["image", "label"],
        config=PrefetchConfig(cold_steps=0),
        recorder=recorder,
        store=store,
    )
    held: list[Step] = []
    began_s, began_bytes = 0.0, 0.0
    for number in range(_NUM_FIRST + num_steps):
        if number == _NUM_FIRST:
            began_s, began_bytes = time.process_time(), recorder.total("bytes_read.lake")
        held.append(prefetcher.next())
        time.sleep(step_s)  # the trainer's step
        if len(held) > _NUM_HELD:
            held.pop(0).release()
    cpu_s, num_bytes = time.process_time() - began_s, recorder.total("bytes_read.lake") - began_bytes
    for step in held:
        step.release()
    prefetcher.close()
    cache.close()
    store.close()
    return 1000 * cpu_s / num_steps, num_bytes / 1e6 / num_steps


def floor(files: list[Path], work: Path, block_bytes: int, num_blocks: int) -> float:
    """CPU milliseconds a block."""
    warm = memoryview(bytearray(block_bytes))
    descriptors = [os.open(file, os.O_RDONLY) for file in files]
    began_s = time.process_time()
    for number in range(num_blocks):
        start = number // len(files) * block_bytes
        os.preadv(descriptors[number % len(files)], [warm], start)
        xxhash.xxh3_64_intdigest(warm)
        nameless = os.open(work, os.O_TMPFILE | os.O_RDWR)
        os.write(nameless, warm)
        with mmap.mmap(nameless, block_bytes, mmap.MAP_SHARED, mmap.PROT_READ) as mapped:
            mapped.madvise(22)  # MADV_POPULATE_READ
        os.close(nameless)
    cpu_s = time.process_time() - began_s
    for descriptor in descriptors:
        os.close(descriptor)
    return 1000 * cpu_s / num_blocks


@contextmanager
def folder_in(root: Path) -> Iterator[Path]:
    """An empty folder for the block."""
    with tempfile.TemporaryDirectory(dir=root) as name:
        yield Path(name)


def compare(work: Path, shared: Path, *, num_rounds: int, num_steps: int) -> dict[str, object]:
    """All runs in turn; `shared` lies in memory."""
    num_batches = _NUM_FIRST + num_steps + _NUM_AHEAD
    packed = make_data(work, BATCH_SIZE * num_batches, "4MiB", height=768, width=1024, quality=60)
    near = shutil.copytree(packed, shared / "set")
    files = sorted(near.glob("*.tar"))
    batch_bytes = sum(file.stat().st_size for file in files) // num_batches
    num_blocks = min(num_steps, sum(file.stat().st_size // batch_bytes for file in files[:-1]) or 1)
    kept = work / "kept"
    epoch(str(near), kept, "pin", num_batches - _NUM_FIRST - _NUM_HELD, step_s=0.0)
    found: dict[str, list[float]] = defaultdict(list)
    lake_mb: dict[str, list[float]] = defaultdict(list)
    for _ in range(num_rounds):
        with lake(packed) as server, folder_in(work) as empty:
            runs = [("lake", server.url, empty, "pin")]
            runs += [("files", str(near), empty / "files", "pin"), ("stream", str(near), empty / "stream", "stream")]
            runs += [("mapped", str(near), kept, "pin")]
            for name, url, folder, policy in runs:
                cpu_ms, num_mb = epoch(url, folder, policy, num_steps)
                found[name].append(cpu_ms)
                lake_mb[name].append(num_mb)
                print(name, f"{cpu_ms:.2f} ms, {num_mb:.2f} MB", file=sys.stderr)
            found["floor"].append(floor(files[:-1] or files, work, batch_bytes, num_blocks))
    medians = {name: statistics.median(values) for name, values in found.items()}
    return {
        "steps": num_steps,
        "rounds": num_rounds,
        "mb_a_step": round(batch_bytes / 1e6, 2),
        "cpu_ms_a_step": {name: round(value, 2) for name, value in medians.items()},
        "of_floor": {name: round(value / medians["floor"], 2) for name, value in medians.items()},
        "lake_mb": {name: round(statistics.median(values), 2) for name, values in lake_mb.items()},
        "lake_more_than_files_ms": round(medians["lake"] - medians["files"], 2),
    }


def main() -> int:
    """Prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=120)
    args = parser.parse_args()
    rounds, steps = (1, 12) if args.quick else (args.rounds, args.steps)
    with tempfile.TemporaryDirectory() as work, tempfile.TemporaryDirectory(dir="/dev/shm") as shared:
        print(json.dumps(compare(Path(work), Path(shared), num_rounds=rounds, num_steps=steps)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
