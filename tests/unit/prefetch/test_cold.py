"""The first steps: samples read alone, blocks that follow, and the whole epoch brought ahead."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dalipipe.cache.config import CacheConfig
from dalipipe.cache.open import open_cache
from dalipipe.errors import ConfigError, IntegrityError, StorageError
from dalipipe.prefetch.config import PrefetchConfig
from dalipipe.prefetch.open import open_prefetcher
from dalipipe.prefetch.window import WindowPrefetcher
from dalipipe.shards.manifest import Manifest
from dalipipe.telemetry import Recorder
from tests.contracts.prefetcher import BATCH_SIZE, check_bytes, orders_of
from tests.support.lake import MemoryLake, image_set, open_folder
from tests.support.waiting import wait_until

STREAM = CacheConfig(policy="stream")


@pytest.fixture
def manifest() -> Manifest:
    return open_folder(image_set())


@pytest.fixture
def lake() -> MemoryLake:
    return MemoryLake(image_set())


def start(
    manifest: Manifest,
    lake: MemoryLake,
    cache_config: CacheConfig = STREAM,
    *,
    recorder: Recorder | None = None,
    with_cache: bool = True,
    keeps: Callable[[int], bool] | None = None,
    **config: object,
) -> WindowPrefetcher:
    recorder = recorder or Recorder()
    cache = open_cache(manifest, lake, cache_config, recorder)
    return open_prefetcher(
        orders=orders_of(manifest, last_batch="drop"),
        start=(0, 0),
        slots=np.arange(BATCH_SIZE, dtype=np.int64),
        manifest=manifest,
        cache=cache,
        fields=("image", "label"),
        config=PrefetchConfig(**{"threads": 4, **config}),  # type: ignore[arg-type]
        recorder=recorder,
        store=lake,
        keeps=keeps or (cache.keeps if with_cache else None),
    )


def test_a_thread_alone_reads_blocks(manifest: Manifest, lake: MemoryLake) -> None:
    recorder = Recorder()
    prefetcher = start(manifest, lake, threads=1, recorder=recorder)
    try:
        for _ in range(orders_of(manifest, last_batch="drop")(0).num_steps):
            step = prefetcher.next()
            check_bytes(step)
            step.release()
    finally:
        prefetcher.close()
    assert "cold_samples" not in recorder.snapshot(), "it has no thread beside that one to bring blocks"


def blocks_of(manifest: Manifest) -> set[tuple[str, int, int]]:
    return {
        (extent.shard, extent.start, extent.stop)
        for block in range(manifest.num_blocks)
        for extent in manifest.extents(block)
    }


def test_the_first_period_needs_no_whole_block() -> None:
    folder = image_set(800, block_samples=48)
    manifest, lake = open_folder(folder), MemoryLake(folder)
    blocks, gate, recorder = blocks_of(manifest), threading.Event(), Recorder()

    def hold_blocks(key: str, begin: int, end: int) -> None:
        if (key, begin, end) in blocks:
            assert gate.wait(60)

    lake.on_read = hold_blocks
    order = orders_of(manifest, last_batch="drop")(0)
    used = order.blocks(0, 1, np.arange(BATCH_SIZE)).blocks
    period = 48 * len(used) // BATCH_SIZE
    # Threads that hang in blocks must leave some for samples.
    prefetcher = start(manifest, lake, threads=64, recorder=recorder)
    try:
        for number in range(period):
            step = prefetcher.next()
            check_bytes(step)
            assert step.ids.tolist() == order.ids(number, 1)[0].tolist()
            step.release()
        gate.set()
        for _ in range(order.num_steps + 3):
            step = prefetcher.next()
            check_bytes(step)
            step.release()
        # What was read alone is only known to be right when the block has come.
        wait_until(lambda: recorder.snapshot()["blocks_missed"] >= len(used), "the blocks that were put off")
    finally:
        gate.set()
        prefetcher.close()
    assert {block for block, count in lake.reads.items() if block in blocks and count} >= {
        (extent.shard, extent.start, extent.stop) for block in used.tolist() for extent in manifest.extents(block)
    }


def test_views_of_single_samples_stay_valid_until_release_also_after_close(
    manifest: Manifest, lake: MemoryLake
) -> None:
    prefetcher = start(manifest, lake)
    kept = [prefetcher.next() for _ in range(4)]
    prefetcher.close()
    for step in kept:
        check_bytes(step)
        step.release()


def test_substitutes_of_a_sample_that_was_read_alone_come_from_its_block(manifest: Manifest, lake: MemoryLake) -> None:
    prefetcher = start(manifest, lake)
    try:
        step = prefetcher.next()
        bad = int(step.ids[0])
        sample = next(step.substitutes(0))
        assert sample.id // manifest.block_samples == bad // manifest.block_samples
        step.release()
    finally:
        prefetcher.close()


@pytest.mark.parametrize("cold_steps", [0, 1, 5, "auto"])
def test_nothing_stays_in_memory_and_every_step_is_right(
    manifest: Manifest, lake: MemoryLake, cold_steps: int | str
) -> None:
    lake.on_read = lambda key, begin, end: time.sleep(0.002)
    prefetcher = start(manifest, lake, cold_steps=cold_steps, depth=2)
    try:
        for _ in range(2 * orders_of(manifest, last_batch="drop")(0).num_steps):
            step = prefetcher.next()
            check_bytes(step)
            step.release()
    finally:
        prefetcher.close()
    assert prefetcher.resident_bytes == 0


def test_without_cold_steps_only_blocks_are_read(manifest: Manifest, lake: MemoryLake) -> None:
    prefetcher = start(manifest, lake, cold_steps=0)
    try:
        prefetcher.next().release()
    finally:
        prefetcher.close()
    blocks = blocks_of(manifest)
    assert {(key, start) for key, start, _ in lake.reads} <= {(key, start) for key, start, _ in blocks}
    assert {(key, stop) for key, _, stop in lake.reads} <= {(key, stop) for key, _, stop in blocks}


def test_what_is_near_is_not_read_alone(manifest: Manifest, lake: MemoryLake, tmp_path: Path) -> None:
    config = CacheConfig(dir=str(tmp_path))
    cache = open_cache(manifest, lake, config, Recorder())
    for block in range(manifest.num_blocks):
        cache.get(block).release()
    lake.reads.clear()
    recorder = Recorder()
    prefetcher = start(manifest, lake, config, recorder=recorder)
    try:
        check_bytes(prefetcher.next())
    finally:
        prefetcher.close()
    assert not lake.reads
    assert "cold_samples" not in recorder.snapshot()


def test_samples_that_cannot_be_read_alone_come_with_their_block(manifest: Manifest, lake: MemoryLake) -> None:
    blocks = blocks_of(manifest)

    def refuse_samples(key: str, begin: int, end: int) -> None:
        if (key, begin, end) not in blocks:
            raise StorageError("no single samples today")

    lake.on_read = refuse_samples
    prefetcher = start(manifest, lake)
    try:
        step = prefetcher.next()
        check_bytes(step)
        step.release()
    finally:
        prefetcher.close()


def test_a_sample_that_differs_from_its_block_is_an_error_by_name(manifest: Manifest, lake: MemoryLake) -> None:
    blocks, real = blocks_of(manifest), lake.read

    def read(key: str, begin: int = 0, end: int | None = None, *, into: memoryview | None = None) -> memoryview:
        data = real(key, begin, end, into=into)
        if into is None and (key, begin, end) not in blocks:
            return memoryview(bytes(len(data)))
        return data

    lake.read = read  # type: ignore[method-assign]
    prefetcher = start(manifest, lake)
    try:
        with pytest.raises(IntegrityError, match=r"bytes \[\d+, \d+\) of memory://lake/s\d\.tar were read wrong"):
            for _ in range(20):
                prefetcher.next().release()
    finally:
        prefetcher.close()


@pytest.mark.parametrize("policy", ["auto", "lfu"])
def test_whole_epoch_brings_every_block_that_the_node_keeps(
    manifest: Manifest, lake: MemoryLake, tmp_path: Path, policy: str
) -> None:
    config = CacheConfig(dir=str(tmp_path), policy=policy)
    cache = open_cache(manifest, lake, config, Recorder())
    order = orders_of(manifest, last_batch="drop")(0)
    needed = set(order.blocks(0, order.num_steps, np.arange(BATCH_SIZE)).blocks.tolist())
    prefetcher = start(manifest, lake, config, whole_epoch=True, depth=1)
    try:
        wait_until(lambda: all(cache.contains(block) for block in needed), "all blocks of the epoch")
        before = sum(count for (key, _, _), count in lake.reads.items() if key.endswith(".tar"))
        for _ in range(order.num_steps):
            step = prefetcher.next()
            check_bytes(step)
            step.release()
        after = sum(count for (key, _, _), count in lake.reads.items() if key.endswith(".tar"))
    finally:
        prefetcher.close()
    # The next epoch, whose window has begun, may need a block that the dropped tail of this one left out.
    assert after - before <= manifest.num_blocks - len(needed)


def test_whole_epoch_stops_where_the_node_has_no_room(manifest: Manifest, lake: MemoryLake) -> None:
    prefetcher = start(manifest, lake, whole_epoch=True, depth=1, cold_steps=0, keeps=lambda block: True, threads=2)
    try:
        prefetcher.next().release()
        wait_until(prefetcher.is_full, "a full window")
        time.sleep(0.2)
    finally:
        prefetcher.close()
    wanted = orders_of(manifest, last_batch="drop")(0).blocks(0, 3, np.arange(BATCH_SIZE)).blocks
    assert len(lake.reads) <= 2 * len(wanted) + 2 < 2 * manifest.num_blocks


def test_whole_epoch_without_a_cache_that_keeps_is_refused(manifest: Manifest, lake: MemoryLake) -> None:
    with pytest.raises(ConfigError, match=r"prefetch\.whole_epoch=true"):
        start(manifest, lake, whole_epoch=True, with_cache=False)


@pytest.mark.parametrize("value", [-1, "many"])
def test_cold_steps_that_can_never_work_are_refused(manifest: Manifest, lake: MemoryLake, value: int | str) -> None:
    with pytest.raises(ConfigError, match=r"prefetch\.cold_steps="):
        start(manifest, lake, cold_steps=value)


def test_memory_stays_under_the_cap_while_the_lake_slows_and_recovers() -> None:
    folder = image_set(1600, block_samples=8, num_bytes=1000)
    manifest, lake = open_folder(folder), MemoryLake(folder)
    delay_s = [0.001]
    lake.on_read = lambda key, begin, end: time.sleep(delay_s[0])
    largest = max(manifest.block_bytes(block) for block in range(manifest.num_blocks))
    cap_bytes = 4 * BATCH_SIZE * largest
    prefetcher = start(manifest, lake, memory_cap=cap_bytes, threads=8)
    peak, depths = 0, []
    num_steps = orders_of(manifest, last_batch="drop")(0).num_steps
    try:
        for number in range(num_steps):
            delay_s[0] = 0.02 if num_steps // 3 < number < 2 * num_steps // 3 else 0.001
            prefetcher.next().release()
            peak = max(peak, prefetcher.resident_bytes)
            depths.append(prefetcher.depth)
            time.sleep(0.003)
    finally:
        prefetcher.close()
    assert 0 < peak <= cap_bytes
    assert max(depths) > depths[0]
