"""What does everything around the graph cost: blocks, cache, order, hand-over, bad samples, memory?

    python benchmarks/loader.py [FOLDER] [--rounds 5] [--batches 12] [--batch-size 64] [--threads 2] [--epochs 20]
                                [--samples 1024] [--only PART,PART] [--json] [--quick]

`overhead`: `dalipipe.load` on a packed set from a warm cache against the same graph fed from memory (the floor), in
turn, round by round, in one process. `bad`: the graph fed from memory with one sample in a hundred bad, each met for
the first time, against none: cut short, a broken header, and a progressive JPEG or a PNG with damage inside, at which
nothing shows before a decoder fails; and all kinds of `found` in turn. `found`: which share of each kind of damage is
found by the look at the bytes on arrival, by a decoder alone, or not at all because it decodes. `precheck_us`: that
look. `first_batch`: from `dalipipe.load` to the first batch with an empty cache, after the imports. `memory`: resident
bytes after each epoch of the packed set from the third on: medians of the first and the last three, and the largest.
Without a FOLDER of JPEGs, 500 x 375 crops of the photographs that scikit-image ships.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.graphs import MemorySteps, cut_photographs, jpegs_in
from dalipipe.graphs.check import suspicion, undecodable
from dalipipe.graphs.config import GraphConfig, QuarantineConfig
from dalipipe.graphs.source import open_source
from dalipipe.order.step import Bytes, Sample, Step
from dalipipe.telemetry import Recorder

_WARM_BATCHES = 4
_BAD_EVERY = 100
_PARTS = {"overhead", "memory", "bad", "found", "precheck_us", "first_batch"}


class BadSteps(MemorySteps):
    """The files without end under ever new ids; one in a hundred is bad when `spoil` is given."""

    def __init__(self, files: list[Path], batch_size: int, spoil: Callable[[Bytes], Bytes] | None) -> None:
        super().__init__(files, batch_size)
        self._spoil = spoil

    def next(self) -> Step:
        """The next step; its ids count on instead of wrapping around."""
        step = super().next()
        num = len(step.ids)
        ids = np.arange(step.step * num, (step.step + 1) * num, dtype=np.int64)
        images = list(step.fields["image"])

        def substitutes(row: int) -> Iterator[Sample]:
            other = (row + 1) % num
            height, width = step.sizes[other].tolist()
            fields = {name: views[other] for name, views in step.fields.items()}
            yield Sample(id=int(ids[other]), fields=fields, height=height, width=width)

        if self._spoil is not None:
            for row in np.flatnonzero(ids % _BAD_EVERY == _BAD_EVERY // 2).tolist():
                images[row] = self._spoil(images[row])
        return Step(
            epoch=0, step=step.step, ids=ids, fields=step.fields | {"image": images}, sizes=step.sizes,
            valid=step.valid, substitutes=substitutes, release=step.release,
        )  # fmt: skip


class Damage:
    """Ways in which image files go bad, each as a function of a whole JPEG."""

    def __init__(self) -> None:
        self._random = np.random.Generator(np.random.Philox(11))
        self._others: dict[tuple[bytes, str], Bytes] = {}
        self._turn = itertools.count()
        self.kinds: dict[str, Callable[[Bytes], Bytes]] = {
            "cut_short": lambda image: image[: self._place(image)],
            "zeroed_tail": lambda image: self._filled(image, self._place(image), len(image)),
            "empty": lambda image: image[:0],
            "html_page": lambda _: np.frombuffer(b"<html><body>503 try again</body></html>" * 20, np.uint8),
            "broken_header": self._broken_header,
            "header_bit": self._header_bit,
            "flipped_bits": self._flipped,
            "zeroed_page": lambda image: self._filled(image, page := self._place(image) & -4096, page + 4096),
            "noise_page": self._noise,
            "noise_in_progressive": lambda image: self._noise(self._as_other(image, "PROGRESSIVE")),
            "png_named_jpg": lambda image: self._as_other(image, "PNG"),
            "webp_named_jpg": lambda image: self._as_other(image, "WEBP"),
            "damaged_png": self._damaged_png,
        }

    def in_turn(self, image: Bytes) -> Bytes:
        """The next kind."""
        return list(self.kinds.values())[next(self._turn) % len(self.kinds)](image)

    def _place(self, image: Bytes) -> int:
        return int(self._random.integers(len(image) // 4, len(image)))

    @staticmethod
    def _filled(image: Bytes, start: int, stop: int) -> Bytes:
        image = image.copy()
        image[start:stop] = 0
        return image

    def _noise(self, image: Bytes) -> Bytes:
        """Up to 4 KiB overwritten with random bytes, mostly far behind the header."""
        image, place = image.copy(), min(self._place(image), len(image) - 3)
        stop = min(place + 4096, len(image) - 2)
        image[place:stop] = np.frombuffer(self._random.bytes(stop - place), np.uint8)
        return image

    def _flipped(self, image: Bytes) -> Bytes:
        image = image.copy()
        image[self._random.integers(2, len(image) - 2, 8)] ^= np.uint8(1) << self._random.integers(0, 8, 8, np.uint8)
        return image

    @staticmethod
    def _broken_header(image: Bytes) -> Bytes:
        """With a Huffman table that cannot be; both ends look whole."""
        image = image.copy()
        at = image.tobytes().index(b"\xff\xc4") + 4
        image[at : at + 20] = 255
        return image

    def _header_bit(self, image: Bytes) -> Bytes:
        """With one bit before the first scan's data flipped."""
        image = image.copy()
        stop = image.tobytes().rindex(b"\xff\xda") + 14
        image[self._random.integers(2, stop)] ^= np.uint8(1) << self._random.integers(0, 8, dtype=np.uint8)
        return image

    def _as_other(self, image: Bytes, kind: str) -> Bytes:
        """The picture in another format, made once: it is no part of what is measured."""
        key = (image.tobytes(), kind)
        if key not in self._others:
            sink = io.BytesIO()
            progressive = {"progressive": True, "quality": 92} if kind == "PROGRESSIVE" else {}
            picture = Image.open(io.BytesIO(image.data)).convert("RGB")
            picture.save(sink, "JPEG" if progressive else kind, **progressive)
            self._others[key] = np.frombuffer(sink.getvalue(), np.uint8)
        return self._others[key]

    def _damaged_png(self, image: Bytes) -> Bytes:
        """16 bytes in the middle are wrong: only a decoder that reads up to there sees it."""
        image = self._as_other(image, "PNG").copy()
        image[len(image) // 2 :][:16] ^= 0x55
        return image


def found(files: list[Path]) -> dict[str, dict[str, float]]:
    """By kind of damage, the shares of files that are found on arrival, by a decoder alone, and that decode."""
    damage, shares = Damage(), {}
    images = [np.frombuffer(file.read_bytes(), np.uint8) for file in files]
    for kind, spoil in damage.kinds.items():
        bad = [spoil(image) for image in images]
        looks = [suspicion(image) is not None for image in bad]
        fails = [reason is not None for reason in undecodable(bad)]
        num = {
            "on_arrival": sum(look and fail for look, fail in zip(looks, fails, strict=True)),
            "by_decoder": sum(fail and not look for look, fail in zip(looks, fails, strict=True)),
            "decodes": fails.count(False),
        }
        shares[kind] = {stage: round(count / len(bad), 3) for stage, count in num.items()}
    return shares


class FromMemory:
    """The graph over steps in memory."""

    def __init__(self, steps: MemorySteps, threads: int) -> None:
        self._source = open_source(
            steps,
            graph=GraphConfig(num_threads=threads),
            quarantine=QuarantineConfig(max_fraction=1),
            fields=["image", "label"],
            seed=0,
            device="cpu",
            queue_depth=2,
            num_samples=10**9,
            run_dir=None,
            recorder=Recorder(),
        )

    def next(self) -> Any:
        """One batch of images."""
        return next(self._source).tensors["image"]

    def rest(self) -> None:
        """Nothing works ahead of the calls."""

    def close(self) -> None:
        """Ends its threads."""
        self._source.close()


class Loaded:
    """`dalipipe.load` over a packed set, epoch after epoch."""

    def __init__(self, data: Path, cache: Path, batch_size: int, threads: int) -> None:
        import dalipipe

        began_s = time.perf_counter()
        options = [f"data.url={data}", f"cache.dir={cache}", "device=cpu", f"graph.num_threads={threads}"]
        self.loader = dalipipe.load("train", [*options, f"loader.batch_size={batch_size}", "shuffle.seed=0"])
        self._batches = itertools.chain.from_iterable(iter(lambda: self.loader, None))
        self.next()
        self.first_batch_s = time.perf_counter() - began_s

    def next(self) -> Any:
        """One batch of images."""
        return next(self._batches)["image"]

    def rest(self) -> None:
        """Stops the work ahead, so that it is not charged to the other one."""
        self.loader.rest()

    def close(self) -> None:
        """Ends its threads."""
        self.loader.close()


def measure(peer: FromMemory | Loaded, num_batches: int) -> tuple[float, float]:
    """Images a second and CPU milliseconds an image, after a few untimed batches."""
    for _ in range(_WARM_BATCHES):
        peer.next()
    images = 0
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(num_batches):
        images += len(peer.next())
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    peer.rest()
    time.sleep(0.3)
    return images / wall, cpu / images * 1e3


def in_turn(peers: dict[str, FromMemory | Loaded], rounds: int, batches: int) -> dict[str, dict[str, float]]:
    """Medians over rounds, and of the ratios to the first peer within each round."""
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in peers}
    for number in range(rounds):
        for name in list(peers) if number % 2 == 0 else list(peers)[::-1]:
            seen[name].append(measure(peers[name], batches))
    base = next(iter(peers))
    return {
        name: {
            "images_per_s": _median(rate for rate, _ in figures),
            "cpu_ms": _median(cpu for _, cpu in figures),
            "rate_ratio": _median(rate / floor for (rate, _), (floor, _) in zip(figures, seen[base], strict=True)),
            "cpu_ratio": _median(floor / cpu for (_, cpu), (_, floor) in zip(figures, seen[base], strict=True)),
        }
        for name, figures in seen.items()
    }


def precheck_us(files: list[Path]) -> float:
    """Microseconds of CPU a sample."""
    images = [np.frombuffer(file.read_bytes(), np.uint8) for file in files]
    repeats = max(1, 20_000 // len(images))
    began_s = time.thread_time()
    for _ in range(repeats):
        for image in images:
            suspicion(image)
    return (time.thread_time() - began_s) / repeats / len(images) * 1e6


def memory_growth(peer: Loaded, epochs: int) -> dict[str, float]:
    """Resident bytes after each epoch from the third on. A decoded batch more or less in flight is 2 % of them, so
    growth is the median of the last three epochs over that of the first three; the largest is told beside it."""
    resident = []
    for _ in range(epochs):
        for _ in range(len(peer.loader)):
            peer.next()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        resident.append(pages * os.sysconf("SC_PAGE_SIZE"))
    steady = resident[min(2, len(resident) - 2) :]
    first, last = statistics.median(steady[:3]), statistics.median(steady[-3:])
    return {
        "epochs": epochs,
        "first_mb": round(first / 1e6, 1),
        "last_mb": round(last / 1e6, 1),
        "largest_mb": round(max(steady) / 1e6, 1),
        "last_over_first": round(last / first, 4),
        "largest_over_first": round(max(steady) / first, 4),
    }


def bad(files: list[Path], args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Rates with one sample in a hundred bad, against none."""
    damage = Damage()
    for file in [] if args.quick else files:  # made before the clock runs
        for kind in ("png_named_jpg", "webp_named_jpg", "noise_in_progressive"):
            damage.kinds[kind](np.frombuffer(file.read_bytes(), np.uint8))
    spoils: dict[str, Callable[[Bytes], Bytes] | None] = {"none": None, "in_turn": damage.in_turn}
    spoils |= {
        kind: damage.kinds[kind] for kind in ("cut_short", "broken_header", "noise_in_progressive", "damaged_png")
    }
    peers: dict[str, FromMemory | Loaded] = {
        kind: FromMemory(BadSteps(files, args.batch_size, spoil), args.threads) for kind, spoil in spoils.items()
    }
    rates = in_turn(peers, args.rounds, args.batches)
    for peer in peers.values():
        peer.close()
    return rates


def run(files: list[Path], scratch: Path, args: argparse.Namespace) -> dict[str, Any]:
    """All figures that were asked for."""
    result: dict[str, Any] = {"files": len(files), "threads": args.threads, "batch_size": args.batch_size}
    parts = args.only
    if "found" in parts:
        result["found"] = found(files[:6] if args.quick else files)
    if "precheck_us" in parts:
        result["precheck_us"] = round(precheck_us(files), 2)
    if "bad" in parts:
        result["bad"] = bad(files, args)
    if {"overhead", "memory", "first_batch"} & parts:
        result |= packed(files, scratch, args)
    return result


def packed(files: list[Path], scratch: Path, args: argparse.Namespace) -> dict[str, Any]:
    """The figures of `dalipipe.load` on a packed set."""
    tree = scratch / "lake" / "photos"
    tree.mkdir(parents=True)
    for number in range(max(len(files), args.samples)):
        (tree / f"{number:06d}.jpg").symlink_to(files[number % len(files)].resolve())
    target, cache = scratch / "packed", scratch / "cache"
    pack = ["pack", f"source={tree.parent}", f"target={target}"]
    subprocess.run([sys.executable, "-m", "dalipipe", *pack], check=True, stdout=subprocess.DEVNULL)
    batch_size, threads = args.batch_size, args.threads
    result: dict[str, Any] = {}
    loaded = Loaded(target, cache, batch_size, threads)
    if "overhead" in args.only:
        # As many bytes as the packed set: a few files read again and again would stay in the CPU's cache.
        floor = FromMemory(MemorySteps(jpegs_in(tree), batch_size), threads)
        result["overhead"] = in_turn({"memory": floor, "loader": loaded}, args.rounds, args.batches)
        floor.close()
    if "memory" in args.only:
        result["memory"] = memory_growth(loaded, args.epochs)
    loaded.close()
    if "first_batch" in args.only:
        firsts = []
        for number in range(args.rounds):
            fresh = Loaded(target, scratch / f"cache-{number}", batch_size, threads)
            firsts.append(fresh.first_batch_s)
            fresh.close()
        result["first_batch_s"] = _median(iter(firsts))
    return result


def _median(values: Iterator[float]) -> float:
    return round(statistics.median(values), 3)


def main() -> None:
    """Prints one line a question, or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="JPEG files, searched recursively")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--samples", type=int, default=1024, help="of the packed set; files are used again")
    parser.add_argument("--only", type=lambda text: set(text.split(",")), default=_PARTS, metavar="PART,PART")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="one short round: shows that it runs, not how fast")
    args = parser.parse_args()
    if args.only - _PARTS:
        parser.error(f"--only takes {', '.join(sorted(_PARTS))}, not {', '.join(sorted(args.only - _PARTS))}")
    if args.quick:
        args.rounds, args.batches, args.epochs, args.batch_size, args.samples = 1, 3, 3, 32, 96
    with tempfile.TemporaryDirectory() as scratch:
        photos = Path(scratch, "photos")
        photos.mkdir()
        files = jpegs_in(args.folder or cut_photographs(photos, max(96, 2 * args.batch_size)))
        if len(files) < 2 * args.batch_size:
            parser.error(f"{len(files)} JPEGs under {args.folder}; two batches of {args.batch_size} are needed")
        result = run(files, Path(scratch), args)
    if args.json:
        print(json.dumps(result))
        return
    for question, figures in result.items():
        print(question, json.dumps(figures))


if __name__ == "__main__":
    main()
