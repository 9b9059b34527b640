"""Neighbouring blocks of a shard that are wanted together come by one request."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dalipipe.cache.config import CacheConfig
from dalipipe.cache.open import open_cache
from dalipipe.errors import IntegrityError
from dalipipe.order.config import ShuffleConfig
from dalipipe.order.contract import Order
from dalipipe.order.recipe import orders
from dalipipe.prefetch.config import PrefetchConfig
from dalipipe.prefetch.open import open_prefetcher
from dalipipe.prefetch.together import Neighbours
from dalipipe.prefetch.warm import EpochWarmer
from dalipipe.prefetch.window import WindowPrefetcher
from dalipipe.shards.manifest import Manifest
from dalipipe.telemetry import Recorder
from tests.contracts.prefetcher import BATCH_SIZE, check_bytes
from tests.support.lake import MemoryLake, image_set, open_folder

BLOCK_SAMPLES = 4


@pytest.fixture
def lake() -> MemoryLake:
    return MemoryLake(image_set(800, block_samples=BLOCK_SAMPLES))


@pytest.fixture
def manifest() -> Manifest:
    return open_folder(image_set(800, block_samples=BLOCK_SAMPLES))


def in_order(manifest: Manifest, epoch: int = 0) -> Order:
    return orders({"": manifest.shape}, batch_size=BATCH_SIZE, shuffle=ShuffleConfig(mode="none"), last_batch="drop")(
        epoch
    )


@contextmanager
def started(
    manifest: Manifest, lake: MemoryLake, config: CacheConfig, *, memory_cap: int | str = "4GiB", depth: int = 4
) -> Iterator[tuple[WindowPrefetcher, Recorder]]:
    recorder = Recorder()
    prefetcher = open_prefetcher(
        orders=lambda epoch: in_order(manifest, epoch),
        start=(0, 0),
        slots=np.arange(BATCH_SIZE),
        manifest=manifest,
        cache=open_cache(manifest, lake, config, recorder),
        fields=["image", "label"],
        config=PrefetchConfig(threads=4, depth=depth, memory_cap=memory_cap, timeout_s=60),
        recorder=recorder,
    )
    with closing(prefetcher):
        yield prefetcher, recorder


@pytest.mark.parametrize("policy", ["stream", "pin"])
def test_an_epoch_in_order_takes_few_requests_and_reads_each_byte_once(
    manifest: Manifest, lake: MemoryLake, tmp_path: Path, policy: str
) -> None:
    num_steps = in_order(manifest).num_steps
    with started(manifest, lake, CacheConfig(policy=policy, dir=str(tmp_path))) as (prefetcher, recorder):
        for _ in range(num_steps):
            step = prefetcher.next()
            check_bytes(step)
            step.release()
        counts = recorder.snapshot()
    num_blocks = num_steps * BATCH_SIZE // BLOCK_SAMPLES
    assert num_blocks - counts["blocks_joined"] <= num_blocks / 4
    needed = [extent for block in range(num_blocks) for extent in manifest.extents(block)]
    # The window has begun the next epoch, for which streamed blocks are read again.
    allowed = {1} if policy == "pin" else {1, 2}
    assert {n for extent in needed for n in lake.times_read(extent)} <= allowed


def test_each_has_a_request_of_its_own_where_that_is_asked_for(manifest: Manifest, lake: MemoryLake) -> None:
    with started(manifest, lake, CacheConfig(policy="stream", request_bytes=0)) as (prefetcher, recorder):
        for _ in range(10):
            check_bytes(prefetcher.next())
        counts = recorder.snapshot()
    assert "blocks_joined" not in counts
    assert set(lake.reads) <= {
        (e.shard, e.start, e.stop) for b in range(manifest.num_blocks) for e in manifest.extents(b)
    }


def test_what_the_first_step_lacks_is_not_read_behind_anything_else(manifest: Manifest, lake: MemoryLake) -> None:
    first: list[tuple[int, int]] = []
    lake.on_read = lambda key, start, stop: first.append((start, stop))
    with started(manifest, lake, CacheConfig(policy="stream")) as (prefetcher, _):
        prefetcher.next().release()
    last = manifest.extents(BATCH_SIZE // BLOCK_SAMPLES - 1)[0]
    assert (0, last.stop) in first


def test_a_damaged_block_stops_the_step_that_needs_it_and_no_other(manifest: Manifest, lake: MemoryLake) -> None:
    bad = 20  # of step 3
    extent = manifest.extents(bad)[0]
    data = bytearray(lake.files[extent.shard])
    data[extent.start] ^= 1
    lake.files[extent.shard] = bytes(data)
    with started(manifest, lake, CacheConfig(policy="stream"), depth=8) as (prefetcher, _):
        for _ in range(bad * BLOCK_SAMPLES // BATCH_SIZE):
            check_bytes(prefetcher.next())
        with pytest.raises(IntegrityError, match=rf"\[{extent.start}, {extent.stop}\)"):
            prefetcher.next()


def test_a_cap_of_a_few_blocks_is_kept_and_stops_nothing(manifest: Manifest, lake: MemoryLake) -> None:
    mean_bytes = -(-manifest.num_bytes // manifest.num_blocks)
    cap_bytes = 20 * mean_bytes  # three steps of six blocks, and runs of two
    with started(manifest, lake, CacheConfig(policy="stream"), memory_cap=cap_bytes) as (prefetcher, recorder):
        for _ in range(in_order(manifest).num_steps):
            check_bytes(step := prefetcher.next())
            assert prefetcher.resident_bytes <= cap_bytes + 6 * mean_bytes  # one step is let past it
            step.release()
        assert recorder.snapshot()["blocks_joined"] > 0
    # The window has begun the next epoch at the end.
    needed = [extent for block in range(80, 190) for extent in manifest.extents(block)]
    assert {n for extent in needed for n in lake.times_read(extent)} == {1}


def test_whole_epoch_reads_neighbours_together(manifest: Manifest, lake: MemoryLake, tmp_path: Path) -> None:
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
    needed = set(range(in_order(manifest).num_steps * BATCH_SIZE // BLOCK_SAMPLES)) - {9}
    assert {block for block in range(manifest.num_blocks) if cache.contains(block)} == needed
    assert sum(lake.reads.values()) <= len(needed) / 16 + 12  # shards end, and 9 and 20 are left out
    assert {n for block in needed for extent in manifest.extents(block) for n in lake.times_read(extent)} == {1}
    cache.close()


NEEDS = st.lists(st.none() | st.integers(0, 40), min_size=2, max_size=40)


@given(needs=NEEDS, head=st.integers(0, 40), most=st.integers(1, 20), lead=st.integers(0, 39))
def test_neighbours_come_with_a_block_only_as_far_as_its_own_step_has_time(
    needs: list[int | None], head: int, most: int, lead: int
) -> None:
    lead %= len(needs)
    neighbours = Neighbours(most)
    for block, step in enumerate(needs):
        if step is not None:
            neighbours.lacked([block], step)
            neighbours.lacked([block], step + 1)
    found = neighbours.of(lead, head, lambda block: needs[block] if block < len(needs) else None)
    assert found == list(range(lead + 1, lead + 1 + len(found)))
    assert len(found) < most
    step = needs[lead]
    if step is None:
        assert not found
        return
    allowed = [need is not None and head <= need <= head + 2 * max(0, step - head) for need in needs]
    assert all(allowed[block] for block in found)
    end = lead + 1 + len(found)
    assert len(found) == most - 1 or end == len(needs) or not allowed[end]


def test_blocks_that_are_near_are_handed_out_one_by_one_after_a_while() -> None:
    neighbours = Neighbours(4)
    neighbours.lacked(range(10), 0)
    num_looks = 0
    while neighbours.of(1, 0, neighbours.needed_by) == [2, 3, 4]:
        neighbours.looked(is_near=True)
        num_looks += 1
        assert num_looks < 100
    neighbours.looked(is_near=False)
    assert neighbours.of(1, 0, neighbours.needed_by) == [2, 3, 4]
