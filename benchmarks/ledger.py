"""What does it cost a step to be watched? Time of the ledger and its marks, and CPU time of a whole watched run.

python benchmarks/ledger.py [--quick]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

import dalipipe as dp
from dalipipe.telemetry import Recorder, Stage, StepBook

STEP_S = 0.05
MARKS = ("forward", "backward", "collective", "optimiser")
SPANS, BUMPS = 12, 60  # of one step of 256 samples: blocks read, batches decoded, counters


def books_s(num_steps: int) -> float:
    """Seconds a step for the ledger, four marks, and the spans and counters of the pipeline."""
    recorder = Recorder()
    book = StepBook(lambda: recorder.total("bytes_read.lake"))
    began_s = time.perf_counter()
    for number in range(num_steps):
        book.ask()
        book.got(epoch=0, step=number, samples=256, waits={"lake": 0.0, "decode": 0.0})
        for mark in MARKS:
            with dp.step(mark):
                pass
        for _ in range(SPANS):
            with recorder.span(Stage.LAKE):
                pass
        for _ in range(BUMPS):
            recorder.add("bytes_read.lake", 1)
    book.leave()
    return (time.perf_counter() - began_s) / num_steps


def floor_s(num_steps: int) -> float:
    """Seconds a step for the same loops with nothing in them."""
    began_s = time.perf_counter()
    for _ in range(num_steps):
        for _mark in MARKS:
            pass
        for _ in range(SPANS + BUMPS):
            pass
    return (time.perf_counter() - began_s) / num_steps


def run_cpu_s(url: Path, root: Path, num_steps: int, *, watched: bool) -> float:
    """CPU seconds a step of a real loader, with a run folder and a port, or with neither."""
    words = [f"data.url={url}", f"cache.dir={root / 'cache'}", "graph.size=64", "device=cpu"]
    words += ["loader.batch_size=16", "data.fields=[image]"]
    if watched:
        words += [f"run_dir={root / 'run'}", "metrics.port=19411", "metrics.host=127.0.0.1", "metrics.every_s=1"]
    with dp.load("train", words) as loader:
        endless = (batch for _ in range(10**6) for batch in loader)
        for _ in range(20):
            next(endless)
        began_s = time.process_time()
        for _ in range(num_steps):
            next(endless)
            if watched:
                for mark in MARKS:
                    with dp.step(mark):
                        pass
            time.sleep(0.002)
        spent_s = time.process_time() - began_s
        endless.close()
    return spent_s / num_steps


def make_set(root: Path) -> Path:
    """A small packed set of noise JPEGs."""
    from PIL import Image

    from dalipipe.packing.config import PackConfig
    from dalipipe.packing.run import pack
    from dalipipe.storage.store import StorageConfig

    lake = root / "lake"
    lake.mkdir()
    rng = np.random.default_rng(0)
    for number in range(256):
        pixels = rng.integers(0, 256, (96, 96, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(lake / f"{number:05d}.jpg", quality=80)
    pack(str(lake), str(root / "set"), PackConfig(shard_bytes="1MiB", workers=1), StorageConfig())
    return root / "set"


def main() -> None:
    """Prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer steps, for `make bench`")
    quick = parser.parse_args().quick
    num_steps, rounds, run_steps = (2_000, 3, 150) if quick else (20_000, 9, 600)
    books = statistics.median(books_s(num_steps) for _ in range(rounds))
    floor = statistics.median(floor_s(num_steps) for _ in range(rounds))
    recorder = Recorder()
    began_s = time.perf_counter()
    for _ in range(200_000):
        recorder.add("bytes_read.lake", 1)
    bump_s = (time.perf_counter() - began_s) / 200_000
    pairs = 1 if quick else 5
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        url = make_set(root)
        run_cpu_s(url, root, 20, watched=False)
        alone, watched = [], []
        for _ in range(pairs):  # in turn, so that a change of the host's load meets both
            alone.append(run_cpu_s(url, root, run_steps, watched=False))
            watched.append(run_cpu_s(url, root, run_steps, watched=True))
    extra_s = statistics.median(b - a for a, b in zip(alone, watched, strict=True))
    print(
        json.dumps(
            {
                "books_us_a_step": round(1e6 * (books - floor), 1),
                "books_share_of_50_ms": round((books - floor) / STEP_S, 5),
                "bump_us": round(1e6 * bump_s, 3),
                "cpu_ms_a_step_alone": round(1e3 * statistics.median(alone), 3),
                "cpu_ms_a_step_watched": round(1e3 * statistics.median(watched), 3),
                "watched_share_of_50_ms": round(extra_s / STEP_S, 5),
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
