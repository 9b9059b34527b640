from __future__ import annotations

import errno
import logging
import os
import shutil
from functools import partial
from pathlib import Path

import pytest

from dalipipe.cache.blockstore import BlockStore
from dalipipe.cache.config import CacheConfig, TierConfig, TiersConfig
from dalipipe.cache.open import open_cache
from dalipipe.cache.tiered import TieredCache
from dalipipe.errors import CacheError, ConfigError, IntegrityError
from dalipipe.shards.manifest import Manifest
from dalipipe.telemetry import Recorder
from tests.contracts.cache import CacheContract
from tests.support.lake import MemoryLake, image_set, open_folder


def config(directory: Path | str, *, policy: str = "auto", capacity: int | float | str = 0.8) -> CacheConfig:
    return CacheConfig(dir=str(directory), policy=policy, tiers=TiersConfig(node=TierConfig(capacity=capacity)))


class TestNodeCache(CacheContract):
    @pytest.fixture(autouse=True)
    def _directory(self, tmp_path: Path) -> None:
        self.directory = tmp_path

    def make(self, manifest: Manifest, lake: MemoryLake) -> TieredCache:
        return open_cache(manifest, lake, config(self.directory), Recorder())

    def test_a_second_job_reads_nothing_from_the_lake(self, manifest: Manifest, lake: MemoryLake) -> None:
        for _ in range(2):
            recorder = Recorder()
            cache = open_cache(manifest, lake, config(self.directory), recorder)
            tiers = set()
            for block in range(manifest.num_blocks):
                with cache.get(block) as view:
                    tiers.add(view.tier)
                    assert view.held_bytes == 0
            cache.close()
        assert tiers == {"node"}
        num_bytes = sum(manifest.block_bytes(block) for block in range(manifest.num_blocks))
        counts = recorder.snapshot()
        assert counts["bytes_read.node"] == num_bytes
        assert counts["blocks_hit.node"] == manifest.num_blocks
        assert "bytes_read.lake" not in counts
        assert max(lake.reads.values()) == 1

    def test_counters_of_the_first_read(self, manifest: Manifest, lake: MemoryLake) -> None:
        recorder = Recorder()
        open_cache(manifest, lake, config(self.directory), recorder).get(0).release()
        counts = recorder.snapshot()
        num_bytes = manifest.block_bytes(0)
        assert counts["bytes_read.lake"] == counts["bytes_written.node"] == num_bytes
        assert counts["blocks_missed"] == 1
        assert counts["stage_s.lake"] > 0
        assert counts.get("retries", 0) == 0


class TestStreamCache(CacheContract):
    def make(self, manifest: Manifest, lake: MemoryLake) -> TieredCache:
        return open_cache(manifest, lake, config("", policy="stream"), Recorder())

    def test_a_block_lives_as_long_as_it_is_held(self, cache: TieredCache, lake: MemoryLake) -> None:
        first, second = cache.get(0), cache.get(0)
        assert first.held_bytes == len(first.memory)
        first.release()
        assert cache.contains(0)
        second.release()
        assert not cache.contains(0)
        cache.get(0).release()
        assert set(lake.reads.values()) == {2}


@pytest.fixture
def manifest() -> Manifest:
    return open_folder(image_set())


@pytest.fixture
def lake() -> MemoryLake:
    return MemoryLake(image_set())


def read_all(cache: TieredCache, manifest: Manifest) -> list[str]:
    tiers = []
    for block in range(manifest.num_blocks):
        with cache.get(block) as view:
            assert bytes(view.memory) == image_set().block(manifest, block)
            tiers.append(view.tier)
    return tiers


@pytest.mark.parametrize("share", [0.3, 0.7])
def test_pin_fills_its_budget_never_passes_it_and_never_replaces(
    tmp_path: Path, lake: MemoryLake, share: float
) -> None:
    manifest = open_folder(image_set(800, num_bytes=60))
    lake = MemoryLake(image_set(800, num_bytes=60))
    budget = int(share * manifest.num_bytes)
    epochs = []
    for _ in range(3):
        cache = open_cache(manifest, lake, config(tmp_path, policy="pin", capacity=budget), Recorder())
        tiers = []
        for block in range(manifest.num_blocks):
            with cache.get(block) as view:
                tiers.append(view.tier)
        epochs.append(tiers)
    num_bytes = sum(path.stat().st_size - 16 for path in tmp_path.rglob("*") if path.is_file() and path.name.isdigit())
    assert (share - 0.05) * manifest.num_bytes < num_bytes <= budget
    assert set(epochs[0]) == {"lake"}
    assert epochs[1] == epochs[2]
    assert abs(epochs[1].count("node") / len(epochs[1]) - num_bytes / manifest.num_bytes) < 0.05


def test_a_full_disk_serves_from_memory_counts_and_warns_once(
    tmp_path: Path, manifest: Manifest, lake: MemoryLake, caplog: pytest.LogCaptureFixture
) -> None:
    def full(descriptor: int, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    recorder = Recorder()
    cache = open_cache(manifest, lake, config(tmp_path), recorder, open_blocks=partial(BlockStore, write=full))
    with caplog.at_level(logging.WARNING):
        assert set(read_all(cache, manifest)) == {"lake"}
    assert recorder.snapshot()["node_write_failures"] == manifest.num_blocks
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "No space left" in warnings[0]
    assert "cache.tiers.node.capacity" in warnings[0]


def test_a_transient_flip_in_the_lake_is_read_again(manifest: Manifest, lake: MemoryLake, tmp_path: Path) -> None:
    extent = manifest.extents(0)[0]
    good = lake.files[extent.shard]
    lake.files[extent.shard] = bytes([good[0] ^ 1]) + good[1:]

    def heal(key: str, start: int, stop: int) -> None:
        if lake.reads[key, start, stop] == 2:
            lake.files[key] = good

    lake.on_read = heal
    recorder = Recorder()
    with open_cache(manifest, lake, config(tmp_path), recorder).get(0) as view:
        assert bytes(view.memory) == image_set().block(manifest, 0)
    assert recorder.snapshot()["retries"] == 1


def test_a_shard_that_is_cut_short_names_both_sizes(manifest: Manifest, lake: MemoryLake, tmp_path: Path) -> None:
    extent = manifest.extents(2)[0]
    lake.files[extent.shard] = lake.files[extent.shard][: extent.stop - 1]
    with pytest.raises(IntegrityError) as caught:
        open_cache(manifest, lake, config(tmp_path), Recorder()).get(2)
    assert f"{lake.url}/{extent.shard} has {extent.stop - 1} bytes" in str(caught.value)
    assert f"[{extent.start}, {extent.stop})" in str(caught.value)


def test_a_block_out_of_range_is_an_index_error(manifest: Manifest, lake: MemoryLake, tmp_path: Path) -> None:
    cache = open_cache(manifest, lake, config(tmp_path), Recorder())
    for block in (-1, manifest.num_blocks):
        with pytest.raises(IndexError, match=str(manifest.num_blocks)):
            cache.get(block)


@pytest.mark.parametrize("policy", ["belady", "fifo"])
def test_policies_that_are_not_there_are_refused_with_those_that_are(
    manifest: Manifest, lake: MemoryLake, tmp_path: Path, policy: str
) -> None:
    with pytest.raises(ConfigError, match="auto, pin, lru, lfu, stream"):
        open_cache(manifest, lake, config(tmp_path, policy=policy), Recorder())


def test_pin_without_a_folder_is_refused(manifest: Manifest, lake: MemoryLake) -> None:
    with pytest.raises(ConfigError, match=r"cache\.dir"):
        open_cache(manifest, lake, config(""), Recorder())


def test_a_folder_that_cannot_be_made_is_a_cache_error_with_a_remedy(
    manifest: Manifest, lake: MemoryLake, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CacheError, match=r"choose a cache\.dir"):
        open_cache(manifest, lake, config(tmp_path / "file"), Recorder())


def test_the_description_names_policy_share_and_budget(manifest: Manifest, lake: MemoryLake, tmp_path: Path) -> None:
    about = open_cache(manifest, lake, config(tmp_path, capacity="1G"), Recorder()).describe()
    assert "pin, chosen by auto" in about
    assert "100%" in about
    assert "1.0 GB" in about
    assert "stream" in open_cache(manifest, lake, config("", policy="stream"), Recorder()).describe()
    assert "capacity is 0" in open_cache(manifest, lake, config("", capacity=0), Recorder()).describe()


def test_a_cache_folder_that_is_deleted_under_a_job_begins_anew(
    tmp_path: Path, manifest: Manifest, lake: MemoryLake
) -> None:
    cache = open_cache(manifest, lake, config(tmp_path / "cache"), Recorder())
    with cache.get(0) as view:
        before = bytes(view.memory)
        shutil.rmtree(tmp_path / "cache")
        assert bytes(view.memory) == before
    for _ in range(2):
        for block in range(manifest.num_blocks):
            cache.get(block).release()
    with cache.get(0) as view:
        assert (view.tier, bytes(view.memory)) == ("node", before)
    cache.close()
