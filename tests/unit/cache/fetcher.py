"""A process that fetches blocks: `python -m tests.unit.cache.fetcher DIR {all | runs | POINT BLOCK [STOP]}`.

With a point it stops there and waits to be killed; with a second block it asks for all [BLOCK, STOP) at once. With
`all` it fetches every block when told to, with `runs` as many at once as come together, and prints how often it read
each range of its lake.
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from pathlib import Path

from dalipipe.cache.blockstore import BlockStore
from dalipipe.cache.config import CacheConfig
from dalipipe.cache.contract import BlockView
from dalipipe.cache.open import open_cache
from dalipipe.cache.tiered import TieredCache
from dalipipe.telemetry import Recorder
from tests.support.lake import MemoryLake, image_set, open_folder


def stop_at(point: str) -> None:
    print(point, flush=True)
    sys.stdin.read()


def node_cache(directory: str, lake: MemoryLake, stop_point: str = "") -> TieredCache:
    def probe(point: str) -> None:
        if point == stop_point:
            stop_at(point)

    return open_cache(
        open_folder(image_set()),
        lake,
        CacheConfig(dir=directory),
        Recorder(),
        open_blocks=partial(BlockStore, probe=probe),
    )


def main() -> None:
    directory, what = sys.argv[1:3]
    folder = image_set()
    lake = MemoryLake(folder, on_read=lambda key, start, stop: time.sleep(0.002))
    if what not in ("all", "runs"):
        blocks = range(int(sys.argv[3]), int(sys.argv[4]) if sys.argv[4:] else int(sys.argv[3]) + 1)
        node_cache(directory, lake, what).get_run(blocks, lambda _block, _view: None)
        return
    cache, manifest = node_cache(directory, lake), open_folder(folder)
    print("ready", flush=True)
    sys.stdin.readline()
    left = list(range(manifest.num_blocks))
    while left:
        came: dict[int, BlockView] = {}
        cache.get_run(left if what == "runs" else left[:1], came.__setitem__)
        for block, view in came.items():
            assert bytes(view.memory) == folder.block(manifest, block)
            view.release()
        left = left[len(came) :]
    print(json.dumps([[*extent, count] for extent, count in lake.reads.items()]), flush=True)


if __name__ == "__main__":
    assert Path(sys.argv[1]).is_absolute()
    main()
