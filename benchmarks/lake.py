"""Does training wait for the lake, whatever the lake does?

    python benchmarks/lake.py [--quick] [--part link,tail,slow,storm,cold] [--images N] [--plot FILE.svg]

Parts without data of their own read one set of JPEGs (about 110 kB each) that is made and packed first. The lake is a
web server of this machine in a process of its own, with 30 ms latency and 100 MB/s unless said. The accelerator is
emulated: a sleep a step, so that AU (accelerator utilisation) = time in steps / wall time after the first step; the
rest is waiting. Server, decoder and everything else on the machine share its cores: compare figures of one run. Steps
that the CPU cannot feed are benchmarks/overlap.py.

    link    T1 training (crop, flip, normalise) at a step that the CPU can feed: AU in epochs 1 and 2.
    tail    lognormal latency and 0.2 % Pareto: AU and the longest wait with and without hedges, depth 2 and auto.
    slow    every request is slow: hedges fall to about none.
    storm   the lake slows 5x in the middle and recovers: depth and memory over time, as a plot with --plot.
    cold    seconds to the first batch from a real S3 server, with and without samples read alone; the floor is the
            same from a local folder (no lake at all).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dalipipe.cache.config import CacheConfig
from dalipipe.cache.open import open_cache
from dalipipe.interrupts import Stopping
from dalipipe.order.config import ShuffleConfig
from dalipipe.order.epoch import epoch_order
from dalipipe.packing.config import PackConfig
from dalipipe.packing.run import pack
from dalipipe.prefetch.config import PrefetchConfig
from dalipipe.prefetch.open import open_prefetcher
from dalipipe.shards.manifest import Manifest
from dalipipe.storage import StorageConfig, open_store
from dalipipe.telemetry import Recorder
from tests.support.emulation import lake
from tests.support.images import jpeg_bytes

BATCH_SIZE = 64
_UNIQUE = 96


def make_data(
    root: Path,
    num_images: int,
    block_bytes: str = "auto",
    *,
    height: int = 450,
    width: int = 600,
    quality: int = 94,
) -> Path:
    """Packs `num_images` JPEGs (few different ones, under many names) into shards of 64 MiB; returns their folder."""
    lake = root / "lake" / "0"
    lake.mkdir(parents=True)
    num_unique = min(_UNIQUE, max(8, num_images // 16))
    for i in range(num_images):
        path = lake / f"{i:06d}.jpg"
        if i < num_unique:
            path.write_bytes(jpeg_bytes(i, height=height, width=width, quality=quality))
        else:
            path.hardlink_to(lake / f"{i % num_unique:06d}.jpg")
    config = PackConfig(shard_bytes="64MiB", block_bytes=block_bytes, workers=1, check="header")
    pack(str(root / "lake"), str(root / "set"), config, StorageConfig())
    shutil.rmtree(root / "lake")
    return root / "set"


# --- the whole pipeline -------------------------------------------------------------------------------------------


def train(url: str, cache: Path, *, step_s: float, num_steps: int, epochs: int = 1, extra: tuple[str, ...] = ()) -> Any:
    """Emulated T1 training: by epoch AU, CPU seconds, waits and step times, and the loader's figures.

    All but `first_batch_s` and `stats` begin with the first batch. `ended_s` is when each step ended, in seconds since.
    """
    import dalipipe

    overrides = [f"data.url={url}", f"cache.dir={cache}", f"loader.batch_size={BATCH_SIZE}", "device=cpu", *extra]
    found: dict[str, Any] = {"au": [], "cpu_s": [], "waits_s": [], "ended_s": []}
    began = time.perf_counter()
    with dalipipe.load("train", overrides) as loader:
        for epoch in range(epochs):
            wall = computed = used_s = 0.0
            waits_s: dict[str, float] = {}
            ended_s: list[float] = []
            loader.set_epoch(epoch)
            for number, _ in enumerate(loader):
                if number == 0:
                    waits_s = loader.stats()["wait_by_s"]
                    wall, used_s = time.perf_counter(), time.process_time()
                    found.setdefault("first_batch_s", round(wall - began, 2))
                now = time.perf_counter()
                time.sleep(step_s)
                computed += time.perf_counter() - now
                ended_s.append(time.perf_counter() - wall)
                if number + 1 == num_steps:
                    break
            found["au"].append(round(computed / ended_s[-1], 4))
            found["cpu_s"].append(time.process_time() - used_s)
            after_s = loader.stats()["wait_by_s"]
            found["waits_s"].append({kind: seconds - waits_s.get(kind, 0.0) for kind, seconds in after_s.items()})
            found["ended_s"].append(ended_s)
        found["stats"] = loader.stats()
    return found


def cpu_rate(folder: Path, cache: Path, num_steps: int) -> float:
    """Images a second that this machine decodes just now, from the page cache."""
    import dalipipe

    overrides = [f"data.url={folder}", f"cache.dir={cache}", f"loader.batch_size={BATCH_SIZE}", "device=cpu"]
    with dalipipe.load("train", overrides) as loader:
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        began = time.perf_counter()
        for _ in range(num_steps):
            next(batches)
        return num_steps * BATCH_SIZE / (time.perf_counter() - began)


def part_link(folder: Path, work: Path, args: argparse.Namespace) -> dict[str, Any]:
    """AU where everything fits."""
    rate = cpu_rate(folder, work / "rate", 6 if args.quick else 12)
    step_s = round(max(0.2, 1.5 * BATCH_SIZE / rate), 2)
    num_steps = 8 if args.quick else 40
    with lake(folder) as server:
        found = train(server.url, work / "link", step_s=step_s, num_steps=num_steps, epochs=2)
    return {
        "step_s": step_s,
        "cpu_images_per_s": round(rate),
        "au_epoch_1": found["au"][0],
        "au_epoch_2": found["au"][1],
        "first_batch_s": found["first_batch_s"],
        "lake_mb": round(found["stats"]["bytes_read"]["lake"] / 1e6),
    }


def part_cold(folder: Path, work: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Time to the first batch from S3, nothing near; process start and imports excluded."""
    import dalipipe
    from tests.support.seaweed import s3_server

    times: dict[str, list[float]] = {"alone": [], "blocks": [], "local": []}
    (work / "s3").mkdir()
    with s3_server(work / "s3") as server:
        os.environ.update(server.environment())
        endpoint = f"storage.endpoint_url={server.endpoint_url}"
        store = open_store("s3://bench/set", StorageConfig(endpoint_url=server.endpoint_url))
        for file in folder.iterdir():
            if file.is_file():
                store.put(file.name, file)
        store.close()
        train(str(folder), work / "imports", step_s=0, num_steps=1)
        for number in range(1 if args.quick else 3):
            for name, extra in (("alone", ()), ("blocks", ("prefetch.cold_steps=0",)), ("local", ())):
                url = str(folder) if name == "local" else "s3://bench/set"
                cache = work / f"cold-{name}{number}"
                overrides = [f"data.url={url}", f"cache.dir={cache}", f"loader.batch_size={BATCH_SIZE}"]
                began = time.perf_counter()
                with dalipipe.load("train", [*overrides, "device=cpu", endpoint, *extra]) as loader:
                    next(iter(loader))
                    times[name].append(time.perf_counter() - began)
    return {f"first_batch_s_{name}": round(statistics.median(found), 2) for name, found in times.items()}


# --- the lake and the window alone ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of the window before an emulated accelerator."""

    au: float
    waits_s: list[float]
    counts: dict[str, float]
    trace: list[tuple[float, int, float]]
    """(seconds, depth, bytes in memory), once a step."""


def run_window(
    url: str,
    *,
    step_s: float,
    num_steps: int,
    depth: int | str = "auto",
    hedge: bool = True,
    batch_size: int = BATCH_SIZE,
    memory_cap: str = "1GiB",
    on_step: Callable[[int], None] | None = None,
) -> Run:
    """Steps of the window with nothing kept (`cache.policy=stream`), so that all data come from the lake."""
    recorder = Recorder()
    store = open_store(url, StorageConfig(hedge=hedge), record=recorder.add)
    manifest = Manifest.open(store.read)
    cache = open_cache(manifest, store, CacheConfig(policy="stream"), recorder)
    prefetcher = open_prefetcher(
        orders=lambda epoch: epoch_order(
            manifest.shape, epoch=epoch, batch_size=batch_size, shuffle=ShuffleConfig(), last_batch="drop"
        ),
        start=(0, 0),
        slots=np.arange(batch_size, dtype=np.int64),
        manifest=manifest,
        cache=cache,
        fields=["image", "label"],
        config=PrefetchConfig(depth=depth, memory_cap=memory_cap, threads=64),
        recorder=recorder,
        store=store,
    )
    waits, trace = [], []
    try:
        prefetcher.next().release()
        began = time.perf_counter()
        for number in range(num_steps):
            if on_step is not None:
                on_step(number)
            time.sleep(step_s)
            asked = time.perf_counter()
            prefetcher.next().release()
            now = time.perf_counter()
            waits.append(now - asked)
            trace.append((now - began, prefetcher.depth, float(prefetcher.resident_bytes)))
        wall = time.perf_counter() - began
    finally:
        prefetcher.close()
        cache.close()
        store.close()
    return Run(au=1 - sum(waits) / wall, waits_s=waits, counts=recorder.snapshot(), trace=trace)


def part_tail(_folder: Path, work: Path, args: argparse.Namespace) -> dict[str, Any]:
    """The 2 x 2 of hedging and depth on a store with a heavy tail; small blocks, so that a step needs many requests."""
    num_steps, step_s = (12, 0.25) if args.quick else (100, 0.25)
    depths: tuple[int | str, ...] = ("auto",) if args.quick else (2, "auto")
    folder = make_data(work, 1024 if args.quick else 2560, "256KiB")
    found: dict[str, Any] = {"step_s": step_s}
    for depth in depths:
        for hedge in (False, True):
            with lake(folder) as server:
                server.mode("tail")
                run = run_window(server.url, step_s=step_s, num_steps=num_steps, depth=depth, hedge=hedge)
            name = f"depth_{depth}_{'hedged' if hedge else 'unhedged'}"
            found[f"au_{name}"] = round(run.au, 4)
            found[f"longest_wait_s_{name}"] = round(max(run.waits_s), 2)
            found[f"requests_{name}"] = int(run.counts["requests.lake"])
            if hedge:
                requests = run.counts["requests.lake"]
                found[f"hedges_share_{name}"] = round(run.counts.get("hedges", 0) / requests, 4)
                found[f"hedges_won_{name}"] = int(run.counts.get("hedges_won", 0))
    return found


def part_slow(folder: Path, _work: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Every request becomes slow at once: hedges before and after."""
    num_steps, step_s = (12, 0.25) if args.quick else (100, 0.25)
    with lake(folder) as server:

        def on_step(step: int) -> None:
            if step == num_steps // 3:
                server.mode("slow", 0.3)

        run = run_window(server.url, step_s=step_s, num_steps=num_steps, on_step=on_step)
    return {
        "requests": int(run.counts["requests.lake"]),
        "hedges": int(run.counts.get("hedges", 0)),
        "hedges_share": round(run.counts.get("hedges", 0) / run.counts["requests.lake"], 4),
        "au": round(run.au, 4),
    }


def part_storm(_folder: Path, work: Path, args: argparse.Namespace) -> dict[str, Any]:
    """5x slower for a while. Small blocks and batches: else the lumps of demand make the window deep from the start."""
    folder = make_data(work, 1024 if args.quick else 2560, "256KiB")
    steps, step_s, cap_bytes = (15, 15, 30) if args.quick else (200, 200, 500), 0.1, 256 << 20
    slow, even = steps[0], steps[0] + steps[1]
    with lake(folder, latency_s=0.1) as server:

        def on_step(step: int) -> None:
            if step == slow:
                server.mode("slow", 0.5)
            elif step == even:
                server.mode("even")

        run = run_window(
            server.url,
            step_s=step_s,
            num_steps=sum(steps),
            batch_size=16,
            memory_cap=str(cap_bytes),
            on_step=on_step,
        )
    times, depths, resident = np.array(run.trace).T
    waits = run.waits_s
    cuts = [times[0] - step_s, times[slow], times[even], times[-1]]
    if args.plot:
        args.plot.write_text(plot(run.trace, (float(cuts[1]), float(cuts[2])), cap_bytes))
    return {
        "au": round(run.au, 4),
        "au_before_during_after": [
            round(1 - sum(waits[start:stop]) / float(stop_s - start_s), 3)
            for start, stop, start_s, stop_s in (
                (0, slow, cuts[0], cuts[1]),
                (slow, even, cuts[1], cuts[2]),
                (even, None, cuts[2], cuts[3]),
            )
        ],
        "depth_before_peak_end": [int(depths[slow]), int(depths.max()), int(depths[-1])],
        "memory_peak_mb": round(float(resident.max()) / 1e6),
        "memory_cap_mb": round(cap_bytes / 1e6),
    }


def plot(trace: list[tuple[float, int, float]], slow_s: tuple[float, float], cap_bytes: int) -> str:
    """Depth and memory over time as an SVG picture."""
    width, height, left = 900, 320, 50
    end_s = trace[-1][0]
    deepest = max(depth for _, depth, _ in trace)

    def line(values: list[tuple[float, float]], colour: str) -> str:
        points = " ".join(f"{left + x / end_s * width:.1f},{20 + (1 - y) * height:.1f}" for x, y in values)
        return f'<polyline fill="none" stroke="{colour}" stroke-width="1.5" points="{points}"/>'

    depth_line = line([(at, depth / deepest) for at, depth, _ in trace], "#1f6fb4")
    memory_line = line([(at, num_bytes / cap_bytes) for at, _, num_bytes in trace], "#c0562a")
    start, stop = (left + at / end_s * width for at in slow_s)
    band = f'<rect x="{start:.1f}" y="20" width="{stop - start:.1f}" height="{height}" fill="#eee"/>'
    cap = f"memory (top = cap, {cap_bytes / 1e6:.0f} MB)"
    text = (
        f'<text x="{left}" y="14" font-size="12" fill="#1f6fb4">depth (top = {deepest} steps)</text>'
        f'<text x="{left + 220}" y="14" font-size="12" fill="#c0562a">{cap}</text>'
        f'<text x="{left + 480}" y="14" font-size="12">grey: the lake is 5x slower</text>'
        f'<text x="{left + width - 60}" y="{height + 38}" font-size="12">{end_s:.0f} s</text>'
    )
    axis = f'<rect x="{left}" y="20" width="{width}" height="{height}" fill="none" stroke="#888"/>'
    size = f'width="{width + 2 * left}" height="{height + 50}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{band}{axis}{depth_line}{memory_line}{text}</svg>\n'


PARTS = {
    "link": part_link, "tail": part_tail, "slow": part_slow, "storm": part_storm,
    "cold": part_cold,
}  # fmt: skip


_OWN_DATA = {"tail", "storm"}


def main() -> int:
    """Prints one JSON object a part; interrupted, it takes what it made away."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--part", default=",".join(PARTS))
    parser.add_argument("--images", type=int, default=0)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    names = args.part.split(",") if not args.quick or args.part != ",".join(PARTS) else ["tail", "slow"]
    stopping = Stopping(ends_process=True)
    try:
        with stopping, tempfile.TemporaryDirectory() as root:
            folder = Path(root) / "set"
            if not _OWN_DATA.issuperset(names):
                make_data(Path(root), args.images or (768 if args.quick else 3072))
            for name in names:
                work = Path(root) / name
                work.mkdir()
                print(name, json.dumps(PARTS[name](folder, work, args)), flush=True)
                shutil.rmtree(work)
    except KeyboardInterrupt:
        return 128 + (stopping.number or 2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
