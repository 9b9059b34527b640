"""What `cache warm` brings."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from dalipipe.cache.inspect import stat
from dalipipe.cache.warm import warm
from dalipipe.errors import ConfigError, IntegrityError
from dalipipe.shards.manifest import Manifest
from tests.support.lake import MemoryLake
from tests.unit.cache.tiers import configure, open_tiers, scan


def test_warm_brings_what_is_kept_and_nothing_else(tmp_path: Path, manifest: Manifest, lake: MemoryLake) -> None:
    config = configure(tmp_path, node=int(0.4 * manifest.num_bytes))
    cache, _ = open_tiers(manifest, lake, config)
    seen: list[tuple[int, int]] = []
    report = warm(cache, manifest, threads=3, progress=lambda done, total: seen.append((done, total)))
    assert report.blocks == report.fetched_blocks == stat(config).blocks
    assert report.bytes == stat(config).bytes
    assert report.left_blocks == manifest.num_blocks - report.blocks
    assert 0.35 < report.blocks / manifest.num_blocks <= 0.4
    assert seen[-1][0] == seen[-1][1] == len(seen)
    again = warm(cache, manifest)
    assert (again.blocks, again.fetched_blocks) == (report.blocks, 0)
    assert scan(cache, manifest).count("node") == report.blocks


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_warm_fills_a_tier_that_evicts_and_evicts_nothing(
    tmp_path: Path, manifest: Manifest, lake: MemoryLake, policy: str
) -> None:
    cache, recorder = open_tiers(manifest, lake, configure(tmp_path, policy=policy, node=manifest.num_bytes // 2))
    report = warm(cache, manifest)
    assert 0.4 < report.blocks / manifest.num_blocks <= 0.5
    assert "blocks_evicted.node" not in recorder.snapshot()


def test_warm_says_what_it_cannot_do(tmp_path: Path, manifest: Manifest, lake: MemoryLake) -> None:
    with pytest.raises(ConfigError, match="nothing to warm"):
        warm(open_tiers(manifest, lake, configure(tmp_path, policy="stream"))[0], manifest)
    cache = open_tiers(manifest, lake, configure(tmp_path, node=0.5))[0]
    with pytest.raises(ConfigError, match="threads=0"):
        warm(cache, manifest, threads=0)
    extent = manifest.extents(9)[0]
    data = bytearray(lake.files[extent.shard])
    data[extent.start] ^= 1
    lake.files[extent.shard] = bytes(data)
    with pytest.raises(IntegrityError, match=extent.shard):
        warm(cache, manifest)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("dalipipe-warm")]
