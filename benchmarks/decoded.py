"""What do decoded samples kept in shared memory save a later epoch and a second job?

Run: python benchmarks/decoded.py [--quick] [--only decoded,kept]

JPEGs are crops of real photographs; `decoded` decodes by PIL and reads all bytes, `kept` is the whole of image_train on
the CPU. Jobs are processes of their own.
"""

from __future__ import annotations

import argparse
import io
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dalipipe.cache.config import CacheConfig, MemoryConfig, TiersConfig
from dalipipe.cache.decoded import DecodedBlocks, DecodedSamples
from dalipipe.demo.lake import shipped_photos
from dalipipe.graphs.config import GraphConfig, QuarantineConfig
from dalipipe.graphs.source import open_source
from dalipipe.telemetry import Recorder
from tests.unit.graphs.steps import MemoryPrefetcher

BATCH_SIZE = 64
JPEG_SIZE = (500, 375)


def make_jpegs(num: int) -> list[bytes]:
    """Crops of real photographs, 500 x 375 pixels."""
    photos, random = [Image.open(path).convert("RGB") for path in shipped_photos()], np.random.default_rng(0)
    photos = [photo for photo in photos if photo.width >= JPEG_SIZE[0] and photo.height >= JPEG_SIZE[1]]
    jpegs = []
    for number in range(num):
        photo = photos[number % len(photos)]
        left = int(random.integers(0, photo.width - JPEG_SIZE[0] + 1))
        top = int(random.integers(0, photo.height - JPEG_SIZE[1] + 1))
        stream = io.BytesIO()
        photo.crop((left, top, left + JPEG_SIZE[0], top + JPEG_SIZE[1])).save(stream, "JPEG", quality=90)
        jpegs.append(stream.getvalue())
    return jpegs


def decoded_job(out: object, root: Path, jpegs: list[bytes]) -> None:
    """Reads all blocks twice, decoding what is not there; puts (decoded blocks, seconds of the two epochs)."""
    recorder = Recorder()
    config = CacheConfig(dir=str(root), tiers=TiersConfig(memory=MemoryConfig(dir=str(root / "memory"))))
    decoded = DecodedBlocks(config, "0" * 32, recipe="rgb8", capacity="2G", recorder=recorder)
    per_block, epochs_s = 32, []

    def decode(block: int) -> tuple[np.ndarray, list[np.ndarray]]:
        ids = np.arange(block * per_block, (block + 1) * per_block)
        return ids, [np.asarray(Image.open(io.BytesIO(jpegs[i]))) for i in ids]

    for _ in range(2):
        begun_s = time.perf_counter()
        for block in range(len(jpegs) // per_block):
            found = decoded.get(block, partial(decode, block))
            for i in range(len(found)):
                int(found.image(i).reshape(-1)[::64].sum())  # every cache line
        epochs_s.append(time.perf_counter() - begun_s)
    decoded.close()
    out.put((int(recorder.snapshot().get("blocks_decoded", 0)), epochs_s))  # type: ignore[attr-defined]


def show_decoded(quick: bool) -> None:
    """What decoded samples in shared memory save a later epoch and a second job."""
    jpegs = make_jpegs(256 if quick else 2048)
    # Shared memory is what is measured, whatever file system the rest lies on.
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        context, jobs = multiprocessing.get_context("spawn"), []
        for _ in range(2):
            out = context.Queue()
            job = context.Process(target=decoded_job, args=(out, Path(memory), jpegs))
            job.start()
            jobs.append(out.get(timeout=60))
            job.join(30)
        kept = sum(path.stat().st_size for path in Path(memory).rglob("*") if path.name.isdigit() and path.is_file())
    (num_decoded, first), (num_again, second) = jobs
    encoded = sum(map(len, jpegs))
    print(
        f"decoded samples: {len(jpegs)} JPEGs of {JPEG_SIZE[0]} x {JPEG_SIZE[1]}, decoded by PIL, all bytes read; "
        f"{kept / encoded:.1f} times the bytes of the JPEGs"
    )
    for name, wall_s in (("job 1, epoch 1", first[0]), ("job 1, epoch 2", first[1]), ("job 2, epoch 1", second[0])):
        print(f"  {name}: {len(jpegs) / wall_s:8.0f} images/s ({first[0] / wall_s:.1f} x epoch 1 of job 1)")
    print(f"  blocks decoded by job 1: {num_decoded}, by job 2: {num_again}")


def kept_job(out: object, root: Path | None, jpegs: list[bytes], num_epochs: int) -> None:
    """Makes batches of `num_epochs`, decoded images kept below `root` (None = not kept); puts the seconds of each."""
    memory = MemoryConfig(dir=str(root), decoded="8G", keep=True)
    config = CacheConfig(dir=str(root), tiers=TiersConfig(memory=memory))
    recorder, epochs_s = Recorder(), []
    kept = None if root is None else DecodedSamples(config, "0" * 32, recorder=recorder)
    source = open_source(
        MemoryPrefetcher(jpegs, BATCH_SIZE),
        graph=GraphConfig(),
        quarantine=QuarantineConfig(),
        fields=["image", "label"],
        seed=0,
        device="cpu",
        queue_depth=2,
        num_samples=len(jpegs),
        run_dir=None,
        recorder=recorder,
        kept=kept,
    )
    for _ in range(num_epochs):
        begun_s = time.perf_counter()
        for _ in range(len(jpegs) // BATCH_SIZE):
            next(source)
        epochs_s.append(time.perf_counter() - begun_s)
    source.close()
    if kept is not None:
        kept.close()
    out.put(epochs_s)  # type: ignore[attr-defined]


def show_kept(quick: bool) -> None:
    """What `cache.tiers.memory.decoded` saves image_train on the CPU."""
    jpegs = make_jpegs(512 if quick else 2048)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        context = multiprocessing.get_context("spawn")

        def job(root: Path | None, num_epochs: int) -> list[float]:
            out = context.Queue()
            process = context.Process(target=kept_job, args=(out, root, jpegs, num_epochs))
            process.start()
            epochs_s: list[float] = out.get(timeout=600)
            process.join(30)
            return epochs_s

        (*_, plain), (first, second), (other,) = job(None, 2), job(Path(memory), 2), job(Path(memory), 1)
    print(f"image_train at 224 from {len(jpegs)} JPEGs of {JPEG_SIZE[0]} x {JPEG_SIZE[1]}, {os.cpu_count()} CPUs")
    rows = (("not kept", plain), ("job 1, epoch 1", first), ("job 1, epoch 2", second), ("job 2, epoch 1", other))
    for name, wall_s in rows:
        print(f"  {name}: {len(jpegs) / wall_s:8.0f} images/s ({plain / wall_s:.2f} x not kept)")


SHOWS: dict[str, Callable[[bool], None]] = {"decoded": show_decoded, "kept": show_kept}


def main() -> None:
    """Runs the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes, under 20 s")
    parser.add_argument("--only", default=",".join(SHOWS), help="parts, comma-separated")
    args = parser.parse_args()
    for name in args.only.split(","):
        SHOWS[name](args.quick)


if __name__ == "__main__":
    main()
