"""Neighbouring blocks of a shard that are wanted together come by one request."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dalipipe.cache.config import CacheConfig
from dalipipe.cache.open import open_cache
from dalipipe.order.config import ShuffleConfig
from dalipipe.order.contract import Order
from dalipipe.order.recipe import orders
from dalipipe.prefetch.warm import EpochWarmer
from dalipipe.shards.manifest import Manifest
from dalipipe.telemetry import Recorder
from tests.contracts.prefetcher import BATCH_SIZE
from tests.support.lake import MemoryLake, image_set, open_folder


def in_order(manifest: Manifest, epoch: int = 0) -> Order:
    return orders({"": manifest.shape}, batch_size=BATCH_SIZE, shuffle=ShuffleConfig(mode="none"), last_batch="drop")(
        epoch
    )


def test_whole_epoch_reads_neighbours_together(tmp_path: Path) -> None:
    folder = image_set(800, block_samples=4)
    manifest, lake = open_folder(folder), MemoryLake(folder)
    cache = open_cache(manifest, lake, CacheConfig(dir=str(tmp_path)), Recorder())
    warmer = EpochWarmer(
        lambda epoch: in_order(manifest, epoch),
        (0, 0),
        np.arange(BATCH_SIZE),
        keeps=lambda block: block != 9,
        most_blocks=16,
    )
    cache.get(20).release()
    while warmer.bring_one(cache):
        pass
    needed = set(range(in_order(manifest).num_steps * BATCH_SIZE // 4)) - {9}
    assert {block for block in range(manifest.num_blocks) if cache.contains(block)} == needed
    assert sum(lake.reads.values()) <= len(needed) / 16 + 12  # shards end, and 9 and 20 are left out
    assert {n for block in needed for extent in manifest.extents(block) for n in lake.times_read(extent)} == {1}
    cache.close()
