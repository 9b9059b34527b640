"""Neighbouring blocks of a shard, read by one request."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dalipipe.cache.blockstore import BlockStore
from dalipipe.cache.config import CacheConfig
from dalipipe.cache.contract import BlockView
from dalipipe.cache.lake import Fetched
from dalipipe.cache.open import open_cache
from dalipipe.cache.readers import Readers
from dalipipe.cache.runs import MAX_RUN_BLOCKS, run_of
from dalipipe.cache.streamed import StreamedBlocks
from dalipipe.cache.tiered import TieredCache
from dalipipe.cache.warm import warm
from dalipipe.errors import ConfigError, IntegrityError, StorageTimeoutError
from dalipipe.shards.manifest import Extent, Manifest
from dalipipe.telemetry import Recorder
from tests.contracts.cache import CacheContract
from tests.support.lake import MemoryLake, image_set
from tests.unit.cache.tiers import configure, open_tiers

STREAM = CacheConfig(policy="stream")
MOST_BYTES = 8 << 20


@dataclass(frozen=True)
class Layout:
    """Blocks at given places; a `BlockMap`."""

    blocks: tuple[tuple[Extent, ...], ...]
    identity: str = "layout"

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @property
    def num_bytes(self) -> int:
        return sum(self.block_bytes(block) for block in range(self.num_blocks))

    def block_bytes(self, block: int) -> int:
        return sum(extent.stop - extent.start for extent in self.blocks[block])

    def extents(self, block: int) -> Sequence[Extent]:
        return self.blocks[block]


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Shards of blocks with gaps here and there; some blocks cross into the next shard."""
    blocks: list[tuple[Extent, ...]] = []
    part, crossing = 0, None
    for number in range(draw(st.integers(1, 4))):
        name, at = f"s{number}.{draw(st.sampled_from(['tar', 'tar', 'tar', 'vtar']))}", 0
        for _ in range(draw(st.integers(1, 12))):
            at += draw(st.sampled_from([0, 0, 0, 0, 7]))
            extent = Extent(shard=name, start=at, stop=at + draw(st.integers(1, 60)), digest=0, part=part)
            at, part = extent.stop, part + 1
            blocks.append((extent,) if crossing is None else (crossing, extent))
            crossing = None
        if draw(st.booleans()):
            crossing = blocks.pop()[-1]
    if crossing is not None:
        blocks.append((crossing,))
    return Layout(tuple(blocks))


@given(layout=layouts(), most_bytes=st.integers(1, 200), data=st.data())
def test_runs_cover_every_block_once_and_never_pass_an_end_a_gap_or_the_cap(
    layout: Layout, most_bytes: int, data: st.DataObject
) -> None:
    wanted = sorted(data.draw(st.sets(st.integers(0, layout.num_blocks - 1), min_size=1)))
    left, runs = wanted, []
    while left:
        run = run_of(layout, left, most_bytes)
        runs.append(run)
        left = left[len(run) :]
    assert [block for run in runs for block in run] == wanted
    for run in runs:
        parts = [layout.extents(block) for block in run]
        if len(run) > 1:
            assert all(len(extents) == 1 for extents in parts)
            assert len({extents[0].shard for extents in parts}) == 1
            assert not parts[0][0].shard.endswith(".vtar")
            assert all(before[0].stop == after[0].start for before, after in pairwise(parts))
            assert parts[-1][0].stop - parts[0][0].start <= most_bytes
    for run, following in pairwise(runs):  # as long as can be
        last, first = layout.extents(run[-1]), layout.extents(following[0])
        joins = (
            following[0] == run[-1] + 1
            and len(layout.extents(run[0])) == len(last) == len(first) == 1
            and last[0].shard == first[0].shard
            and not first[0].shard.endswith(".vtar")
            and last[0].stop == first[0].start
            and first[0].stop - layout.extents(run[0])[0].start <= most_bytes
        )
        assert not joins


def test_a_run_has_an_end_however_small_blocks_are() -> None:
    blocks = tuple((Extent(shard="s.tar", start=n, stop=n + 1, digest=0, part=n),) for n in range(1000))
    assert run_of(Layout(blocks), range(1000), MOST_BYTES) == list(range(MAX_RUN_BLOCKS))


class TestEachAlone(CacheContract):
    """`cache.request_bytes=0`."""

    def make(self, manifest: Manifest, lake: MemoryLake) -> TieredCache:
        return open_cache(manifest, lake, replace(STREAM, request_bytes=0), Recorder())


class TestShortRuns(CacheContract):
    @pytest.fixture(autouse=True)
    def _directory(self, tmp_path: Path) -> None:
        self.directory = tmp_path

    def make(self, manifest: Manifest, lake: MemoryLake) -> TieredCache:
        config = CacheConfig(dir=str(self.directory), request_bytes=2 * manifest.block_bytes(0) + 200)
        return open_cache(manifest, lake, config, Recorder())


def get_run(cache: TieredCache, blocks: Sequence[int]) -> dict[int, BlockView]:
    views: dict[int, BlockView] = {}
    cache.get_run(blocks, views.__setitem__)
    return views


def extent_of(manifest: Manifest, first: int, last: int) -> tuple[str, int, int]:
    (begin,), (end,) = manifest.extents(first), manifest.extents(last)
    assert begin.shard == end.shard
    return begin.shard, begin.start, end.stop


@pytest.mark.parametrize("streamed", [True, False])
def test_a_run_is_one_request_and_each_block_has_its_own_memory(
    tmp_path: Path, manifest: Manifest, lake: MemoryLake, streamed: bool
) -> None:
    recorder = Recorder()
    cache = open_cache(manifest, lake, STREAM if streamed else CacheConfig(dir=str(tmp_path)), recorder)
    views = get_run(cache, range(2, 9))
    assert lake.reads == {extent_of(manifest, 2, 8): 1}
    assert list(views) == list(range(2, 9))
    for block, view in views.items():
        assert view.tier == "lake"
        assert view.held_bytes == (manifest.block_bytes(block) if streamed else 0)
        if streamed:  # one that is held alone does not keep the others' bytes
            assert memoryview(view.memory.obj).nbytes == view.held_bytes
        view.release()
    counts = recorder.snapshot()
    num_bytes = sum(map(manifest.block_bytes, range(2, 9)))
    assert (counts["blocks_missed"], counts["blocks_joined"], counts["bytes_read.lake"]) == (7, 6, num_bytes)
    assert counts.get("bytes_written.node", 0) == (0 if streamed else num_bytes)
    assert cache.contains(5) is not streamed
    cache.close()


def test_a_run_passes_no_shards_end(manifest: Manifest, lake: MemoryLake) -> None:
    crossing = next(block for block in range(manifest.num_blocks) if len(manifest.extents(block)) > 1)
    cache = open_cache(manifest, lake, STREAM, Recorder())
    assert list(get_run(cache, range(crossing - 3, crossing + 3))) == [crossing - 3, crossing - 2, crossing - 1]
    assert list(get_run(cache, range(crossing, crossing + 3))) == [crossing]
    cache.close()


def test_what_a_full_disk_cannot_keep_is_streamed(tmp_path: Path, manifest: Manifest, lake: MemoryLake) -> None:
    written = 0

    def fill_up(descriptor: int, data: memoryview) -> int:
        nonlocal written
        written += len(data)
        if written > 3 * manifest.block_bytes(0):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.write(descriptor, data)

    cache = open_cache(
        manifest, lake, CacheConfig(dir=str(tmp_path)), Recorder(), open_blocks=partial(BlockStore, write=fill_up)
    )
    views = get_run(cache, range(6))
    assert [bool(view.held_bytes) for view in views.values()] == sorted(
        bool(view.held_bytes) for view in views.values()
    )
    assert 0 < sum(bool(view.held_bytes) for view in views.values()) < 6
    folder = image_set(manifest.num_samples, num_bytes=60)
    for block, view in views.items():
        assert bytes(view.memory) == folder.block(manifest, block)
        view.release()
    assert sum(lake.reads.values()) == 1
    cache.close()


def test_blocks_that_came_damaged_together_are_right_alone(manifest: Manifest, lake: MemoryLake) -> None:
    first, other = manifest.extents(1)[0], manifest.extents(4)[0]
    good = lake.files[first.shard]
    bad = bytearray(good)
    bad[first.start] ^= 1
    bad[other.start] ^= 1
    lake.files[first.shard] = bytes(bad)

    def heal(key: str, start: int, stop: int) -> None:
        lake.files[key] = bytes(bad) if stop - start > first.stop - first.start else good

    lake.on_read = heal
    recorder = Recorder()
    cache = open_cache(manifest, lake, STREAM, recorder)
    views = get_run(cache, range(1, 7))
    assert list(views) == [1, 2, 3, 5, 6]
    assert recorder.snapshot()["retries"] == 1
    views |= get_run(cache, [4])
    folder = image_set(manifest.num_samples, num_bytes=60)
    for block, view in views.items():
        assert bytes(view.memory) == folder.block(manifest, block)
        view.release()
    cache.close()


def test_a_shard_that_is_cut_short_costs_only_the_blocks_that_it_lacks(manifest: Manifest, lake: MemoryLake) -> None:
    cut = manifest.extents(4)[0]
    lake.files[cut.shard] = lake.files[cut.shard][: cut.stop - 1]
    cache = open_cache(manifest, lake, STREAM, Recorder())
    assert list(get_run(cache, range(1, 6))) == [1]
    assert list(get_run(cache, [2, 3])) == [2, 3]
    with pytest.raises(IntegrityError, match=rf"has {cut.stop - 1} bytes"):
        get_run(cache, [4, 5])
    cache.close()


def test_a_run_that_took_all_its_time_is_not_asked_for_again(manifest: Manifest, lake: MemoryLake) -> None:
    def hang(key: str, start: int, stop: int) -> None:
        raise StorageTimeoutError(f"{lake.url}/{key} took too long")

    lake.on_read = hang
    cache = open_cache(manifest, lake, STREAM, Recorder())
    with pytest.raises(StorageTimeoutError):
        get_run(cache, range(5))
    assert sum(lake.reads.values()) == 1
    cache.close()


def test_the_pool_is_asked_first_and_filled_with_what_it_lacked(
    tmp_path: Path, manifest: Manifest, lake: MemoryLake
) -> None:
    config = configure(tmp_path, policy="stream", pool=1.0)
    first, counts = open_tiers(manifest, lake, config)
    for view in get_run(first, [4]).values():
        view.release()
    views = get_run(first, range(2, 8))
    assert {block: view.tier for block, view in views.items()} == {2: "lake", 3: "lake", 4: "pool"}
    for view in views.values():
        view.release()
    assert lake.reads == {extent_of(manifest, 4, 4): 1, extent_of(manifest, 2, 3): 1}
    assert (counts.snapshot()["blocks_hit.pool"], counts.snapshot()["blocks_joined"]) == (1, 1)
    first.close()
    second, _ = open_tiers(manifest, lake, config)
    tiers = {}
    for block in range(2, 6):
        for got, view in get_run(second, range(block, 8)).items():
            tiers[got] = view.tier
            view.release()
    assert tiers == {2: "pool", 3: "pool", 4: "pool", 5: "lake", 6: "lake", 7: "lake"}
    assert lake.reads[extent_of(manifest, 5, 7)] == 1
    assert counts.snapshot()["bytes_written.pool"] == sum(map(manifest.block_bytes, (2, 3, 4)))
    second.close()


def test_ranks_of_a_node_share_what_one_of_them_read_together(
    tmp_path: Path, manifest: Manifest, lake: MemoryLake
) -> None:
    config = configure(tmp_path, policy="stream")
    mine, _ = open_tiers(manifest, lake, config, readers=Readers(local_ranks=2))
    other, _ = open_tiers(manifest, lake, config, readers=Readers(local_ranks=2))
    views = get_run(mine, range(5))
    assert len(views) == 5
    for block in range(5):
        with other.get(block) as view:
            assert view.tier == "memory"
            assert view.memory == views[block].memory
    assert list(other.together(range(3, 8))) == [3]
    assert list(get_run(other, range(5, 7))) == [5, 6]
    assert sum(lake.reads.values()) == 2
    for view in views.values():
        view.release()
    assert not mine.contains(2)
    for cache in (mine, other):
        cache.close()


def test_a_block_that_came_damaged_is_no_longer_held_when_somebody_else_begins_to_hold_it() -> None:
    class Passing:
        """Takes one thing after the other down; whoever may read block 1 meanwhile would hold it twice."""

        def __init__(self) -> None:
            self.seen: list[str] = []

        def contains(self, block: int) -> bool:
            return False

        def get(self, block: int, num_bytes: int, read: Callable[[object], Fetched]) -> Fetched:
            self.seen.append(f"hold {block}")
            return read(object())

        def begin(self, block: int, lock: object) -> bool:
            return True

        def release(self, block: int) -> None:
            reader = threading.Thread(target=streamed.get_run, args=([block], alone, dropped))
            reader.start()
            reader.join(0.2)
            self.seen.append(f"let go {block}")
            readers.append(reader)

    def alone(run: Sequence[int]) -> dict[int, Fetched]:
        return {run[0]: Fetched(memoryview(b"block"), "lake")}

    def dropped(_block: int, _view: BlockView) -> None:
        """The view is held until the end of the test."""

    readers: list[threading.Thread] = []
    passing = Passing()
    streamed = StreamedBlocks(
        passing,  # type: ignore[arg-type]
        wait_s=10,
        recorder=Recorder(),
        block_bytes=lambda block: 5,
        belongs=lambda block: False,
    )
    streamed.get_run([0, 1], alone, dropped)
    for reader in readers:
        reader.join(10)
    assert passing.seen == ["hold 0", "let go 1", "hold 1"]


def test_tiers_take_no_more_than_their_budget_by_runs(tmp_path: Path, manifest: Manifest, lake: MemoryLake) -> None:
    budget = int(0.4 * manifest.num_bytes)
    cache, recorder = open_tiers(manifest, lake, configure(tmp_path, policy="pin", node=budget))
    left = list(range(manifest.num_blocks))
    while left:
        views = get_run(cache, left)
        for view in views.values():
            view.release()
        left = left[len(views) :]
    counts = recorder.snapshot()
    assert 0.35 * manifest.num_bytes < counts["bytes_written.node"] <= budget
    assert counts["bytes_read.lake"] == sum(map(manifest.block_bytes, range(manifest.num_blocks)))
    cache.close()


def test_warm_reads_neighbours_together(tmp_path: Path, manifest: Manifest, lake: MemoryLake) -> None:
    cache, _ = open_tiers(manifest, lake, configure(tmp_path, node=2 * manifest.num_bytes))
    report = warm(cache, manifest, threads=2)
    assert report.fetched_blocks == manifest.num_blocks
    assert sum(lake.reads.values()) <= 3 * manifest.num_shards  # 34 blocks a shard, one that crosses its end
    for block in range(manifest.num_blocks):
        assert {n for extent in manifest.extents(block) for n in lake.times_read(extent)} == {1}
    cache.close()


@pytest.mark.parametrize("value", ["9MiB", -1, "much", MOST_BYTES + 1])
def test_request_bytes_that_can_never_work_are_refused(manifest: Manifest, lake: MemoryLake, value: int | str) -> None:
    with pytest.raises(ConfigError, match=r"cache\.request_bytes"):
        open_cache(manifest, lake, replace(STREAM, request_bytes=value), Recorder())
