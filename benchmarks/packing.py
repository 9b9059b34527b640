"""What does it cost to pack many small files: dalipipe against webdataset's ShardWriter and a plain tar loop?

    python benchmarks/packing.py            # 100,000 tiny JPEGs, one round
    python benchmarks/packing.py --quick
    python benchmarks/packing.py --listing 1000000
    python benchmarks/packing.py --scaling 20000 [--rounds 3] [--target /dev/shm]

Each contestant runs in a process of its own; the clock starts when its modules are imported. All write shards of the
same size to the same disk. dalipipe also hashes every byte, indexes every sample, syncs and publishes each shard, and
with `check=decode` decodes every image; the two others do none of that.

`--scaling` asks how throughput grows from one worker to two: files of 20 to 50 kB, one and two processes in turn, next
to the plain tar loop in one process and in two that share the folders. `--target /dev/shm` takes the disk out of it.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dalipipe.storage.store import ObjectInfo

SHARD_BYTES = 16 * 2**20
_POLL_S = 0.02

TAR_LOOP = """
import io, os, sys, tarfile, time, json
source, target, shard_bytes = sys.argv[1], sys.argv[2], int(sys.argv[3])
parts = int(sys.argv[4]) if len(sys.argv) > 4 else 1
begin = time.perf_counter()
os.makedirs(target)
classes = sorted(os.listdir(source))
part = 0
for other in range(1, parts):
    if os.fork() == 0:
        part = other
        break
tar, used, number = None, 0, part * 10**5
for label, name in enumerate(classes):
    if label % parts != part:
        continue
    for file in sorted(os.listdir(f"{source}/{name}")):
        with open(f"{source}/{name}/{file}", "rb") as stream:
            data = stream.read()
        if tar is None or used > shard_bytes:
            if tar is not None:
                tar.close()
            tar, used = tarfile.open(f"{target}/{number:06d}.tar", "w"), 0
            number += 1
        for ending, content in ((".jpg", data), (".cls", str(label).encode())):
            info = tarfile.TarInfo(f"{name}/{file[:-4]}{ending}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
            used += 512 + -(-len(content) // 512) * 512
tar.close()
if part == 0:
    for other in range(1, parts):
        assert os.wait()[1] == 0
    print(json.dumps({"wall_s": time.perf_counter() - begin}))
"""

SHARD_WRITER = """
import os, sys, time, json
import webdataset
source, target, shard_bytes = sys.argv[1], sys.argv[2], int(sys.argv[3])
begin = time.perf_counter()
os.makedirs(target)
with webdataset.ShardWriter(f"{target}/%06d.tar", maxsize=shard_bytes, maxcount=10**9, verbose=0) as writer:
    for label, name in enumerate(sorted(os.listdir(source))):
        for file in sorted(os.listdir(f"{source}/{name}")):
            with open(f"{source}/{name}/{file}", "rb") as stream:
                writer.write({"__key__": f"{name}/{file[:-4]}", "jpg": stream.read(), "cls": label})
print(json.dumps({"wall_s": time.perf_counter() - begin}))
"""

DALIPIPE = """
import sys, time, json
import numpy, pyarrow
from dalipipe.packing.config import PackConfig
from dalipipe.packing.run import pack
from dalipipe.storage.store import StorageConfig
if __name__ == "__main__":
    source, target, shard_bytes, workers, check = sys.argv[1:]
    config = PackConfig(shard_bytes=int(shard_bytes), workers=int(workers), check=check)
    begin = time.perf_counter()
    pack(source, target, config, StorageConfig())
    print(json.dumps({"wall_s": time.perf_counter() - begin}))
"""

SCALING = {
    "plain tar loop": (TAR_LOOP, ["1"]),
    "plain tar loop, 2 processes": (TAR_LOOP, ["2"]),
    "dalipipe workers=1 check=none": (DALIPIPE, ["1", "none"]),
    "dalipipe workers=2 check=none": (DALIPIPE, ["2", "none"]),
    "dalipipe workers=1 check=decode": (DALIPIPE, ["1", "decode"]),
    "dalipipe workers=2 check=decode": (DALIPIPE, ["2", "decode"]),
}

CONTESTANTS = {
    "plain tar loop": (TAR_LOOP, []),
    "webdataset ShardWriter": (SHARD_WRITER, []),
    "dalipipe workers=1 check=none": (DALIPIPE, ["1", "none"]),
    "dalipipe workers=2 check=none": (DALIPIPE, ["2", "none"]),
    "dalipipe workers=2 check=header": (DALIPIPE, ["2", "header"]),
    "dalipipe workers=2 check=decode": (DALIPIPE, ["2", "decode"]),
}


def make_lake(root: Path, num_files: int, *, base: int = 0) -> None:
    """JPEGs of 32 to 95 pixels (tiny: 2 kB), each side `base` more, in 100 class folders."""
    from tests.support.images import jpeg_bytes

    images = [jpeg_bytes(i, height=base + 32 + i, width=base + 95 - i, quality=85) for i in range(64)]
    for label in range(100):
        (root / f"class_{label:03d}").mkdir(parents=True)
    for i in range(num_files):
        (root / f"class_{i % 100:03d}" / f"{i:07d}.jpg").write_bytes(images[i % 64])


@dataclass(frozen=True)
class Ran:
    """One contestant: seconds on the clock, peak resident bytes, CPU seconds of the first process and all below."""

    wall_s: float
    rss_bytes: int
    parent_cpu_s: float
    workers_cpu_s: float


def tree_rss_bytes(pid: int, cpu_s: dict[int, float] | None = None) -> int:
    """Resident memory of a process and all below it; pages that they share count for each.

    Args:
        cpu_s: gets the CPU seconds of each process so far.
    """
    total, todo = 0, [pid]
    while todo:
        one = todo.pop()
        try:
            pages = int(Path(f"/proc/{one}/statm").read_text().split()[1])
            children = Path(f"/proc/{one}/task/{one}/children").read_text().split()
            ticks = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()[11:13]
        except (OSError, IndexError):
            continue
        total += pages * 4096
        todo += map(int, children)
        if cpu_s is not None:
            cpu_s[one] = sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
    return total


def run(name: str, lake: Path, folder: Path, shard_bytes: int) -> Ran:
    """Runs one contestant."""
    script, extra = {**CONTESTANTS, **SCALING}[name]
    (folder / "script.py").write_text(script)
    target = folder / "out"
    shutil.rmtree(target, ignore_errors=True)
    os.sync()  # what the last one left to be written is not this one's affair
    command = [sys.executable, str(folder / "script.py"), str(lake), str(target), str(shard_bytes), *extra]
    peak = 0
    cpu_s: dict[int, float] = {}
    stop = threading.Event()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1])

    def watch() -> None:
        nonlocal peak
        while not stop.is_set():
            peak = max(peak, tree_rss_bytes(process.pid, cpu_s))
            time.sleep(_POLL_S)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        out, _ = process.communicate(timeout=1800)
    finally:
        process.kill()
        stop.set()
        watcher.join()
    if process.returncode:
        raise SystemExit(f"{name} failed with exit code {process.returncode}")
    shutil.rmtree(target)
    parent_cpu_s = cpu_s.pop(process.pid, 0.0)
    return Ran(float(json.loads(out)["wall_s"]), peak, parent_cpu_s, sum(cpu_s.values()))


class NamesOnly:
    """A store that lists names and holds nothing."""

    url = "memory://names"

    def __init__(self, num_files: int) -> None:
        self._num_files = num_files

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """`class_000/000000000.jpg` and so on."""
        for i in range(self._num_files):
            yield ObjectInfo(key=f"{prefix}class_{i % 1000:03d}/{i:09d}.jpg", num_bytes=100_000 + i % 7, etag="e")


def measure_listing(num_files: int) -> None:
    """Prints what it takes to list and plan `num_files` names, the store's own time left out."""
    from dalipipe.packing.config import PackConfig
    from dalipipe.packing.discover import discover
    from dalipipe.packing.plan import make_plan

    before = tree_rss_bytes(os.getpid())
    begin = time.perf_counter()
    shown: list[int] = []
    listing = discover(NamesOnly(num_files), PackConfig(), shown.append)  # type: ignore[arg-type]
    listed = time.perf_counter()
    names = [sample.name for sample in listing.samples]
    sizes = np.asarray([sample.num_bytes for sample in listing.samples], np.int64)
    plan = make_plan(names, sizes, members=np.full(len(names), 2), config=PackConfig())
    planned = time.perf_counter()
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    print(
        f"{num_files} names: listed in {listed - begin:.1f} s with {len(shown)} reports of progress, planned into "
        f"{plan.num_shards} shards in {planned - listed:.1f} s, peak {used / num_files:.0f} bytes a name"
    )


def main() -> None:
    """Runs the contestants in turn and prints medians and ratios to the plain tar loop."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--files", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--scaling", type=int, default=0, help="only one worker against two, over that many files")
    parser.add_argument("--only", default="", help="comma-separated parts of contestants' names; the first always runs")
    parser.add_argument("--target", default="", help="the folder below which shards are written")
    parser.add_argument("--listing", type=int, default=0, help="only list and plan that many names")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, _stop)
    if args.listing:
        measure_listing(args.listing)
        return
    if args.scaling:
        names = [n for n in SCALING if any(part in n for part in ("plain", *args.only.split(",")))]
        report(names, args.scaling, SHARD_BYTES, args.rounds, base=270, target=args.target)
        return
    num_files = args.files or (2_000 if args.quick else 100_000)
    shard_bytes = 2 * 2**20 if args.quick else SHARD_BYTES
    names = [n for n in CONTESTANTS if not args.quick or n != "dalipipe workers=2 check=header"]
    names = names[:1] + [n for n in names[1:] if any(part in n for part in args.only.split(","))]
    report(names, num_files, shard_bytes, args.rounds, base=0, target=args.target)


def report(names: list[str], num_files: int, shard_bytes: int, rounds: int, *, base: int, target: str) -> None:
    """Runs contestants in turn, round by round, and prints what is known when it ends, be it by SIGTERM."""
    found: dict[str, list[Ran]] = {}
    num_bytes = 0
    with (
        tempfile.TemporaryDirectory(prefix="dalipipe-bench-") as root,
        tempfile.TemporaryDirectory(prefix="dalipipe-bench-", dir=target or None) as folder,
    ):
        try:
            make_lake(Path(root) / "lake", num_files, base=base)
            num_bytes = sum(path.stat().st_size for path in (Path(root) / "lake").glob("*/*"))
            for _ in range(rounds):
                for name in names:
                    found.setdefault(name, []).append(run(name, Path(root) / "lake", Path(folder), shard_bytes))
        finally:
            print(
                f"{num_files} files of {num_bytes / num_files / 1000:.1f} kB, shards of {shard_bytes >> 20} MiB, load "
                f"average {os.getloadavg()[0]:.1f}"
            )
            print_table(found, names[0], num_files)


def print_table(found: dict[str, list[Ran]], floor: str, num_files: int) -> None:
    """Prints medians; ratios are medians of those within a round."""
    print(
        f"{'':34}{'rounds':>7}{'wall s':>8}{'files/s':>9}{'x ' + floor:>18}{'x 1 worker':>12}{'peak RSS MiB':>14}"
        f"{'cpu s':>8}{'workers':>9}{'x 1 by cpu':>12}"
    )
    for name, results in found.items():
        if not results:
            continue
        wall = statistics.median(one.wall_s for one in results)
        rss = max(one.rss_bytes for one in results) / 2**20
        alone = found.get(name.replace("workers=2", "workers=1").replace(", 2 processes", ""), results)
        parent = statistics.median(one.parent_cpu_s for one in results)
        workers = statistics.median(one.workers_cpu_s for one in results)
        print(
            f"{name:34}{len(results):7}{wall:8.2f}{num_files / wall:9.0f}{_ratio(found[floor], results, _wall):>18}"
            f"{_ratio(alone, results, _wall):>12}{rss:14.0f}{parent:8.2f}{workers:9.2f}"
            f"{_ratio(alone, results, _critical_cpu):>12}"
        )


def _stop(_number: int, _frame: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # `timeout` sends it twice
    sys.exit("stopped before the end")


def _wall(ran: Ran) -> float:
    return ran.wall_s


def _critical_cpu(ran: Ran) -> float:
    """What the clock would show at most on two idle cores and an idle disk: the CPU seconds of the first process, and
    after them those of two workers that share their work out."""
    return ran.parent_cpu_s + ran.workers_cpu_s / 2


def _ratio(slow: list[Ran], fast: list[Ran], measure: Callable[[Ran], float]) -> str:
    return f"{statistics.median(measure(a) / max(measure(b), 0.01) for a, b in zip(slow, fast, strict=False)):.2f}"


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main()
