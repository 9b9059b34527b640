"""How often does a job want two neighbouring blocks of a shard at once, so that one request could bring both?

    python benchmarks/neighbours.py [--quick]

First by counting at the lake: small JPEGs, packed into many small blocks, are read through a server on loopback that
answers after 30 ms and writes down which ranges were under way at the same time. Then by arithmetic, for a data set as
large as ImageNet: of the blocks that the shipped order newly needs in a window of steps, those whose neighbour is among
them. `block` is the shuffled order; `none`, the order of the manifest, is the ceiling: every block has its neighbour
beside it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import dalipipe as dp
from dalipipe.order.config import ShuffleConfig
from dalipipe.order.recipe import orders
from dalipipe.packing.config import PackConfig
from dalipipe.packing.run import pack
from dalipipe.shards.shape import DataShape
from dalipipe.storage.store import StorageConfig
from tests.support.faultproxy import FolderServer, Request
from tests.support.images import write_image_tree

Ids = npt.NDArray[np.int64]

LATENCY_S = 0.03
_MOST_BYTES = 8 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    num_images = 600 if parser.parse_args().quick else 6000
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "lake").mkdir()
        write_image_tree(root / "lake", num_images=num_images, num_classes=10)
        config = PackConfig(shard_bytes="4MiB", block_bytes="64KiB", workers=1, check="header")
        pack(str(root / "lake"), str(root / "set"), config, StorageConfig())
        print(f"{'order':<8}{'blocks':>8}{'with a neighbour':>20}{'requests if joined':>22}")
        for mode in ("block", "none"):
            requests, joined, together = _count(root, mode)
            print(f"{mode:<8}{requests:>8}{together / requests:>20.1%}{joined / requests:>22.1%}")
    _print_arithmetic()


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


def _count(root: Path, mode: str) -> tuple[int, int, int]:
    """Requests of whole blocks in an epoch; how many were left if neighbours under way together were one; how many had
    such a neighbour."""
    lock = threading.Lock()
    seen: list[tuple[float, str, int, int]] = []

    def note(request: Request) -> None:
        name = request.target.partition("?")[0].rpartition("/")[2]
        if request.method == "GET" and name.endswith(".tar"):
            start, stop = request.headers["range"].removeprefix("bytes=").split("-")
            with lock:
                seen.append((request.at_s, name, int(start), int(stop) + 1))

    server = FolderServer(root / "set", latency_s=LATENCY_S)
    server.rule = note
    words = [f"data.url={server.url}", f"cache.dir={root / mode}", "cache.policy=stream", f"shuffle.mode={mode}"]
    words += ["graph.size=32", "loader.batch_size=32", "device=cpu", "prefetch.cold_steps=0", "storage.hedge=false"]
    try:
        with dp.load("train", words) as loader:
            for _batch in loader:
                pass
    finally:
        server.stop()
    return len(seen), *_neighbours(sorted(seen, key=lambda one: (one[1], one[2])))


def _neighbours(by_place: list[tuple[float, str, int, int]]) -> tuple[int, int]:
    joined, together, run_start = 1, set(), 0
    for number in range(1, len(by_place)):
        at_s, name, _, _ = by_place[number - 1]
        here_s, here, begin, stop = by_place[number]
        touches = here == name and begin == by_place[number - 1][3] and abs(here_s - at_s) < LATENCY_S
        if touches:
            together |= {number - 1, number}
        if not touches or stop - by_place[run_start][2] > _MOST_BYTES:
            joined, run_start = joined + 1, number
    return joined, len(together)


if __name__ == "__main__":
    main()
