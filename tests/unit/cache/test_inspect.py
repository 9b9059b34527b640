from __future__ import annotations

from pathlib import Path

import pytest

from dalipipe.cache.config import CacheConfig, TierConfig, TiersConfig
from dalipipe.cache.inspect import clear, stat, verify
from dalipipe.cache.open import open_cache
from dalipipe.errors import CacheError
from dalipipe.shards.manifest import Manifest
from dalipipe.telemetry import Recorder
from tests.support.lake import MemoryLake, image_set, open_folder


@pytest.fixture
def manifest() -> Manifest:
    return open_folder(image_set())


@pytest.fixture
def config(tmp_path: Path, manifest: Manifest) -> CacheConfig:
    config = CacheConfig(dir=str(tmp_path / "cache"), tiers=TiersConfig(node=TierConfig(capacity="1M")))
    cache = open_cache(manifest, MemoryLake(image_set()), config, Recorder())
    for block in range(manifest.num_blocks):
        cache.get(block).release()
    cache.close()
    return config


def test_stat_counts_bytes_blocks_and_budget(config: CacheConfig, manifest: Manifest) -> None:
    report = stat(config)
    assert report.blocks == manifest.num_blocks
    assert report.bytes == sum(manifest.block_bytes(block) for block in range(manifest.num_blocks))
    assert report.budget_bytes == 10**6
    assert report.corrupt == 0


def test_verify_finds_each_kind_of_damage_and_drops_it_on_demand(config: CacheConfig, manifest: Manifest) -> None:
    paths = {int(path.name): path for path in Path(config.dir).rglob("*") if path.is_file() and path.name.isdigit()}
    for block, at in ((0, 0), (1, 50), (2, paths[2].stat().st_size - 1)):
        data = bytearray(paths[block].read_bytes())
        data[at] ^= 1
        paths[block].write_bytes(bytes(data))
    paths[3].write_bytes(b"")
    read: list[int] = []
    assert verify(config, progress=read.append).corrupt == 4
    assert sum(read) == stat(config).bytes
    assert verify(config, drop=True).corrupt == 4
    after = verify(config)
    assert (after.corrupt, after.blocks) == (0, manifest.num_blocks - 4)


def test_clear_leaves_what_a_job_uses_and_force_leaves_its_views_and_strangers(
    config: CacheConfig, manifest: Manifest
) -> None:
    cache = open_cache(manifest, MemoryLake(image_set()), config, Recorder())
    view = cache.get(1)
    stranger = Path(config.dir) / manifest.identity / "0" / "notes.txt"
    stranger.write_text("not a block")
    spared = clear(config)
    assert (spared.blocks, spared.skipped) == (0, 1)
    assert stat(config).sets[0].in_use
    assert clear(config, force=True).blocks == manifest.num_blocks
    assert stat(config).blocks == 0
    assert bytes(view.memory) == image_set().block(manifest, 1)
    assert stranger.exists()
    with cache.get(1) as again:
        assert again.tier == "lake"
    assert stat(config).blocks == 1
    cache.close()
    assert clear(config).blocks == 1
    assert not stat(config).sets[0].in_use


def test_an_absent_folder_is_empty_and_no_folder_is_an_error(tmp_path: Path) -> None:
    assert stat(CacheConfig(dir=str(tmp_path / "nowhere" / "yet"))).blocks == 0
    assert not (tmp_path / "nowhere").exists()
    with pytest.raises(CacheError, match=r"cache\.dir"):
        stat(CacheConfig())
