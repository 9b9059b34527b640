"""What does it cost to pack many small files: dalipipe against webdataset's ShardWriter and a plain tar loop?

    python benchmarks/packing.py            # 100,000 tiny JPEGs, one round
    python benchmarks/packing.py --quick
    python benchmarks/packing.py --listing 1000000

Each contestant runs in a process of its own; the clock starts when its modules are imported. All write shards of the
same size to the same disk. dalipipe also hashes every byte, indexes every sample, syncs and publishes each shard, and
with `check=decode` decodes every image; the two others do none of that.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from dalipipe.storage.store import ObjectInfo

SHARD_BYTES = 16 * 2**20
_POLL_S = 0.02

TAR_LOOP = """
import io, os, sys, tarfile, time, json
source, target, shard_bytes = sys.argv[1], sys.argv[2], int(sys.argv[3])
begin = time.perf_counter()
os.makedirs(target)
classes = sorted(os.listdir(source))
tar, used, number = None, 0, 0
for label, name in enumerate(classes):
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

CONTESTANTS = {
    "plain tar loop": (TAR_LOOP, []),
    "webdataset ShardWriter": (SHARD_WRITER, []),
    "dalipipe workers=1 check=none": (DALIPIPE, ["1", "none"]),
    "dalipipe workers=2 check=none": (DALIPIPE, ["2", "none"]),
    "dalipipe workers=2 check=header": (DALIPIPE, ["2", "header"]),
    "dalipipe workers=2 check=decode": (DALIPIPE, ["2", "decode"]),
}


def make_lake(root: Path, num_files: int) -> None:
    """Tiny JPEGs of 32 to 95 pixels in 100 class folders."""
    from tests.support.images import jpeg_bytes

    images = [jpeg_bytes(i, height=32 + i, width=95 - i, quality=85) for i in range(64)]
    for label in range(100):
        (root / f"class_{label:03d}").mkdir(parents=True)
    for i in range(num_files):
        (root / f"class_{i % 100:03d}" / f"{i:07d}.jpg").write_bytes(images[i % 64])


def tree_rss_bytes(pid: int) -> int:
    """Resident memory of a process and all below it; pages that they share count for each."""
    total, todo = 0, [pid]
    while todo:
        one = todo.pop()
        try:
            pages = int(Path(f"/proc/{one}/statm").read_text().split()[1])
            children = Path(f"/proc/{one}/task/{one}/children").read_text().split()
        except (OSError, IndexError):
            continue
        total += pages * 4096
        todo += map(int, children)
    return total


def run(name: str, lake: Path, folder: Path, shard_bytes: int) -> tuple[float, int]:
    """(seconds, peak resident bytes) of one contestant."""
    script, extra = CONTESTANTS[name]
    (folder / "script.py").write_text(script)
    target = folder / "out"
    shutil.rmtree(target, ignore_errors=True)
    command = [sys.executable, str(folder / "script.py"), str(lake), str(target), str(shard_bytes), *extra]
    peak = 0
    stop = threading.Event()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1])

    def watch() -> None:
        nonlocal peak
        while not stop.is_set():
            peak = max(peak, tree_rss_bytes(process.pid))
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
    return float(json.loads(out)["wall_s"]), peak


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
    parser.add_argument("--listing", type=int, default=0, help="only list and plan that many names")
    args = parser.parse_args()
    if args.listing:
        measure_listing(args.listing)
        return
    num_files = args.files or (2_000 if args.quick else 100_000)
    shard_bytes = 2 * 2**20 if args.quick else SHARD_BYTES
    names = [n for n in CONTESTANTS if not args.quick or n != "dalipipe workers=2 check=header"]
    with tempfile.TemporaryDirectory(prefix="dalipipe-bench-") as root:
        folder = Path(root)
        make_lake(folder / "lake", num_files)
        found: dict[str, list[tuple[float, int]]] = {name: [] for name in names}
        for _ in range(args.rounds):
            for name in names:
                found[name].append(run(name, folder / "lake", folder, shard_bytes))
    walls = {name: statistics.median(one[0] for one in results) for name, results in found.items()}
    floor = walls["plain tar loop"]
    print(f"{num_files} files, {args.rounds} round(s), shards of {shard_bytes >> 20} MiB")
    print(f"{'':34}{'wall s':>8}{'files/s':>10}{'x tar loop':>12}{'peak RSS MiB':>14}")
    for name, results in found.items():
        rss = max(one[1] for one in results) / 2**20
        print(f"{name:34}{walls[name]:8.2f}{num_files / walls[name]:10.0f}{floor / walls[name]:12.2f}{rss:14.0f}")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main()
