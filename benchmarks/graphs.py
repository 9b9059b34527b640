"""How fast do bytes in memory become batches, against raw DALI on the same files?

    python benchmarks/graphs.py [FOLDER] [--rounds 5] [--batches 12] [--batch-size 64] [--threads 2] [--only PART]
        [--json] [--quick]

T1 = random resized crop 224, flip, float32 NCHW; T2 = short side 256, centre crop 224. Raw DALI is `readers.file` with
`DALIGenericIterator`, its decode fused with the random crop (T1) and its resize fused with the centre crop (T2). Both
run in this process in turn, round by round, so that whatever else the machine does hits both; a ratio is the median
over rounds. CPU is user + system time of the whole process. Two lines compare our two resize kernels, one has the time
of the resize alone (one thread, the middle of a 500 x 375 image to 224: to uint8 by torch, by each path of our kernel,
and by its best one to float32), the last two compare `graph.jpeg_scale=auto` with `off` on enlarged files. Without a
FOLDER of JPEGs, 500 x 375 crops of the photographs that scikit-image ships.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from dalipipe.demo.lake import shipped_photos
from dalipipe.graphs.config import GraphConfig, QuarantineConfig
from dalipipe.graphs.native import PATHS, Values, load_native, normalised
from dalipipe.graphs.resize import resize_into
from dalipipe.graphs.source import open_source
from dalipipe.order.step import Sample, Step
from dalipipe.shards.imageheader import parse_image_header
from dalipipe.telemetry import Recorder

_WARM_BATCHES = 4
_SETTLE_S = 0.3
_CUT = (500, 375)
_TASKS = {"T1": "image_train", "T2": "image_eval"}
_PARTS = [*_TASKS, "kernels", "resize", "jpeg_scale"]


class MemorySteps:
    """An endless prefetcher over files that are in memory, their sizes known as from an index."""

    def __init__(self, files: list[Path], batch_size: int) -> None:
        self._images = [np.frombuffer(file.read_bytes(), np.uint8) for file in files]
        headers = [parse_image_header(image.data) for image in self._images]
        self._sizes = np.array([(header.height, header.width) for header in headers], np.int32)
        self._label = np.frombuffer(b"7", np.uint8)
        self._batch_size = batch_size
        self._steps = itertools.count()

    def next(self) -> Step:
        """The next `batch_size` files, wrapping around."""
        step = next(self._steps)
        ids = (np.arange(self._batch_size) + step * self._batch_size) % len(self._images)
        fields = {"image": [self._images[i] for i in ids], "label": [self._label] * self._batch_size}
        return Step(
            epoch=0, step=step, ids=ids.astype(np.int64), fields=fields, sizes=self._sizes[ids],
            valid=np.ones(self._batch_size, np.bool_), substitutes=_no_substitutes, release=lambda: None,
        )  # fmt: skip

    def close(self) -> None:
        """Nothing to end."""


def _no_substitutes(_row: int) -> Iterator[Sample]:
    return iter(())


class Ours:
    """The source of this package, fed from memory."""

    def __init__(self, task: str, files: list[Path], batch_size: int, threads: int, **keys: Any) -> None:
        self._source = open_source(
            MemorySteps(files, batch_size),
            graph=GraphConfig(name=_TASKS[task], num_threads=threads, **keys),
            quarantine=QuarantineConfig(),
            fields=["image", "label"],
            seed=0,
            device="cpu",
            queue_depth=2,
            num_samples=len(files),
            run_dir=None,
            recorder=Recorder(),
        )

    def next(self) -> Any:
        """One batch of images."""
        return next(self._source).tensors["image"]

    def close(self) -> None:
        """Ends its threads."""
        self._source.close()


class RawDali:
    """What a DALI user writes, with the fused operators."""

    def __init__(self, task: str, files: list[Path], batch_size: int, threads: int) -> None:
        from nvidia.dali import Pipeline, fn, types
        from nvidia.dali.plugin.pytorch import DALIGenericIterator

        graph = GraphConfig()
        names = [str(file) for file in files]
        names = (names * (1 + 40 * batch_size // len(names)))[: 40 * batch_size]
        pipeline = Pipeline(batch_size=batch_size, num_threads=threads, device_id=None, prefetch_queue_depth=2)
        with pipeline:
            jpeg, label = fn.readers.file(files=names, labels=[7] * len(names), name="files")
            if task == "T1":
                crop = fn.decoders.image_random_crop(jpeg, random_area=graph.scale, random_aspect_ratio=graph.ratio)
                image, mirror = fn.resize(crop, size=[224, 224]), fn.random.coin_flip()
            else:
                whole = fn.decoders.image(jpeg, output_type=types.RGB)
                image, mirror = fn.resize_crop_mirror(whole, resize_shorter=256, crop=[224, 224]), 0
            normal = fn.crop_mirror_normalize(
                image, mirror=mirror, dtype=types.FLOAT, output_layout="CHW", mean=graph.mean, std=graph.std
            )
            pipeline.set_outputs(normal, label)
        self._iterator: Any = DALIGenericIterator([pipeline], ["image", "label"], reader_name="files", auto_reset=True)

    def next(self) -> Any:
        """One batch of images."""
        try:
            return next(self._iterator)[0]["image"]
        except StopIteration:
            return next(self._iterator)[0]["image"]

    def close(self) -> None:
        """Ends its threads."""
        self._iterator = None


def jpegs_in(folder: Path) -> list[Path]:
    """The JPEG files under a folder, sorted."""
    return sorted(file for file in folder.rglob("*") if file.suffix.lower() in (".jpg", ".jpeg"))


def cut_photographs(target: Path, num: int) -> Path:
    """Writes `num` JPEGs of 500 x 375, cut from the photographs of scikit-image, as one class folder of `target`."""
    rng = random.Random(0)
    photos = [Image.open(path).convert("RGB") for path in shipped_photos()]
    photos = [photo for photo in photos if photo.width >= _CUT[0] and photo.height >= _CUT[1]]
    (target / "photos").mkdir()
    for number in range(num):
        photo = photos[number % len(photos)]
        left, top = rng.randint(0, photo.width - _CUT[0]), rng.randint(0, photo.height - _CUT[1])
        cut = photo.crop((left, top, left + _CUT[0], top + _CUT[1]))
        cut.save(target / "photos" / f"{number:05d}.jpg", quality=95)
    return target


def measure(peer: Ours | RawDali, num_batches: int, batch_size: int) -> tuple[float, float]:
    """Images a second, and CPU milliseconds an image, after a few untimed batches."""
    for _ in range(_WARM_BATCHES):
        peer.next()
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(num_batches):
        image = peer.next()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    assert tuple(image.shape) == (batch_size, 3, 224, 224)
    time.sleep(_SETTLE_S)  # what is decoded ahead must not be charged to the other one
    num_images = num_batches * batch_size
    return num_images / wall, cpu / num_images * 1e3


def enlarge(files: list[Path], target: Path, num: int) -> list[Path]:
    """The first `num` files made 3.2 times as wide and high, quality 90: for want of larger photographs."""
    target.mkdir()
    for number, file in enumerate(files[:num]):
        photo = Image.open(file).convert("RGB")
        size = (round(photo.width * 3.2), round(photo.height * 3.2))
        photo.resize(size, Image.Resampling.BICUBIC).save(target / f"{number:05d}.jpg", quality=90)
    return jpegs_in(target)


def settings(
    task: str, files: list[Path], args: argparse.Namespace, *, key: str, values: tuple[str, str], size: int
) -> dict[str, float]:
    """Ours with the first value of `graph.KEY` against the second, in batches of `size`."""
    one, other = values
    peers = {value: Ours(task, files, size, args.threads, **{key: value}) for value in (one, other)}
    rounds = [{value: measure(peer, args.batches, size) for value, peer in peers.items()} for _ in range(args.rounds)]
    for peer in peers.values():
        peer.close()
    return {
        "speedup": round(statistics.median(r[one][0] / r[other][0] for r in rounds), 3),
        f"{other}_cpu_ms": round(statistics.median(r[other][1] for r in rounds), 3),
        "cpu_saving": round(statistics.median(r[other][1] / r[one][1] for r in rounds), 3),
    }


def windows(args: argparse.Namespace) -> dict[str, float]:
    """Milliseconds of CPU that the resize of one decoded window takes, by kernel: medians over rounds."""
    side, size, num = 331, 224, args.batch_size
    images = list(np.random.Generator(np.random.Philox(0)).integers(0, 256, (num, side, side, 3), dtype=np.uint8))
    scale, mirror = np.full((num, 2), side / size), np.zeros(num, np.int32)
    levels, floats = np.zeros((num, size, size, 3), np.uint8), np.zeros((num, 3, size, size), np.float32)
    graph, spent = GraphConfig(), defaultdict[str, list[float]](list)
    paths = {kernel.name: kernel for path in range(len(PATHS)) if (kernel := load_native(path=path)) is not None}

    def timed(name: str, work: Callable[[], None]) -> None:
        began = time.thread_time()
        work()
        spent[name].append((time.thread_time() - began) / num * 1e3)

    def by_torch() -> None:
        for image, out in zip(images, levels, strict=True):
            resize_into(torch.from_numpy(image), torch.from_numpy(out))

    for _ in range(args.rounds):
        timed("torch", by_torch)
        for name, kernel in paths.items():
            ways: dict[str, tuple[Any, Values | None]] = {"": (levels.transpose(0, 3, 1, 2), None)}
            if kernel is list(paths.values())[-1]:
                ways[" to float32"] = (floats, normalised("float32", graph.mean, graph.std))
            for way, (out, values) in ways.items():
                job = kernel.job(images, out, begin=scale * 0, scale=scale, mirror=mirror, values=values)
                timed(f"{name}{way}", job.run)
    return {f"{name}_ms": round(statistics.median(times), 4) for name, times in spent.items()}


def compare(task: str, files: list[Path], args: argparse.Namespace) -> dict[str, float]:
    """Medians of both peers and of the ratios within each round."""
    peers: dict[str, Ours | RawDali] = {
        kind.__name__: kind(task, files, args.batch_size, args.threads) for kind in (Ours, RawDali)
    }
    rounds = []
    for number in range(args.rounds):
        names = list(peers) if number % 2 == 0 else list(peers)[::-1]
        rounds.append({name: measure(peers[name], args.batches, args.batch_size) for name in names})
    for peer in peers.values():
        peer.close()

    def median(values: Iterator[float]) -> float:
        return round(statistics.median(values), 3)

    return {
        "ours_images_per_s": median(r["Ours"][0] for r in rounds),
        "dali_images_per_s": median(r["RawDali"][0] for r in rounds),
        "speedup": median(r["Ours"][0] / r["RawDali"][0] for r in rounds),
        "ours_cpu_ms": median(r["Ours"][1] for r in rounds),
        "dali_cpu_ms": median(r["RawDali"][1] for r in rounds),
        "cpu_saving": median(r["RawDali"][1] / r["Ours"][1] for r in rounds),
    }


def main() -> None:
    """Prints one table, or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="JPEG files, searched recursively")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--only", choices=_PARTS, help="one part instead of all")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="two short rounds: shows that it runs, not how fast")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.batches = 2, 3
    with tempfile.TemporaryDirectory() as scratch:
        files = jpegs_in(args.folder or cut_photographs(Path(scratch), 128))
        if not files:
            parser.error(f"no JPEG under {args.folder}")
        wanted = [args.only] if args.only else _PARTS
        results = {task: compare(task, files, args) for task in _TASKS if task in wanted}
        if "kernels" in wanted and load_native() is not None:
            for task in _TASKS:
                figures = settings(
                    task, files, args, key="resize_kernel", values=("native", "torch"), size=args.batch_size
                )
                results[f"{task} native against torch kernel"] = figures
        if "resize" in wanted:
            results["resize alone"] = windows(args)
        large = enlarge(files, Path(scratch, "large"), 16 if args.quick else 64) if "jpeg_scale" in wanted else []
        for task in _TASKS if large else ():
            size = min(args.batch_size, 16)
            figures = settings(task, large, args, key="jpeg_scale", values=("auto", "off"), size=size)
            results[f"{task} of large sources, jpeg_scale"] = figures
    if args.json:
        print(json.dumps({"files": len(files), "threads": args.threads, **results}))
        return
    for task, figures in results.items():
        print(task, "  ".join(f"{name} {value:g}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
