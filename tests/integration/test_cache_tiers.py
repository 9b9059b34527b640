"""The tiers and policies of the cache under a whole loader."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import dalipipe as dp
from dalipipe.cache.readers import cache_readers
from dalipipe.errors import ConfigError
from dalipipe.order import ShuffleConfig
from dalipipe.order.signature import order_signature
from dalipipe.shards.shape import DataShape
from dalipipe.world import World
from tests.conftest import NUM_IMAGES

SMALL = ("graph.size=32", "loader.batch_size=15", "device=cpu")


def load(packed: Path, root: Path, *overrides: str) -> dp.Loader:
    settings = (f"data.url={packed}", f"cache.dir={root / 'node'}", f"cache.tiers.memory.dir={root / 'memory'}")
    return dp.load("train", [*settings, *SMALL, *overrides])


def epoch_ids(loader: dp.Loader) -> list[int]:
    return sorted(sum((batch["id"].tolist() for batch in loader), []))


def test_all_tiers_feed_an_exact_epoch_and_a_second_node_spares_the_lake(packed: Path, tmp_path: Path) -> None:
    total = sum(path.stat().st_size for path in packed.glob("*.tar"))
    tiers = (
        f"cache.tiers.node.capacity={int(0.3 * total)}",
        f"cache.tiers.memory.capacity={int(0.3 * total)}",
        f"cache.tiers.pool.url={tmp_path / 'pool'}",
        "cache.tiers.memory.keep=true",
        "prefetch.cold_steps=0",  # single samples are read past the cache
        "prefetch.memory_cap=300KiB",  # and streamed blocks are remembered while there is room
    )
    with load(packed, tmp_path / "one", *tiers) as loader:
        assert epoch_ids(loader) == list(range(NUM_IMAGES))
        first = loader.stats()
        assert epoch_ids(loader) == list(range(NUM_IMAGES))
        stats = loader.stats()
    # The pool has all that the node's tiers lack: no byte left the lake twice.
    assert stats["bytes_read"]["lake"] == first["bytes_read"]["lake"] <= total
    assert stats["bytes_written"]["pool"] > 0.9 * stats["bytes_read"]["lake"]
    assert stats["bytes_read"]["pool"] > 0
    with load(packed, tmp_path / "one", *tiers) as loader:
        assert epoch_ids(loader) == list(range(NUM_IMAGES))
        assert min(loader.stats()["bytes_read"][tier] for tier in ("memory", "node", "pool")) > 0
        assert loader.stats()["bytes_read"]["lake"] == 0
    with load(packed, tmp_path / "two", *tiers) as loader:
        assert epoch_ids(loader) == list(range(NUM_IMAGES))
        assert loader.stats()["bytes_read"]["lake"] == 0


def test_what_the_pool_has_does_not_leave_the_lake_for_a_second_node(packed: Path, tmp_path: Path) -> None:
    """Not a byte of it, not for the first step either."""
    lake_bytes = []
    for node in range(2):
        words = [
            f"data.url={packed}",
            f"cache.dir={tmp_path / f'node{node}'}",
            f"cache.tiers.pool.url={tmp_path / 'pool'}",
        ]
        with dp.load("train", [*words, "graph.size=32", "device=cpu", "loader.batch_size=10"]) as loader:
            for _batch in loader:
                pass
            lake_bytes.append(loader.stats()["bytes_read"]["lake"])
    assert lake_bytes[0] > 0
    assert lake_bytes[1] == 0


def test_auto_takes_lfu_where_samples_are_hot(packed: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="dalipipe.cache.open"):
        load(packed, tmp_path / "plain").close()
        load(packed, tmp_path / "hot", "data.repeat={shard-000000.tar: 3}").close()
    about = [record.message for record in caplog.records if record.name == "dalipipe.cache.open"]
    assert "policy pin, chosen by auto" in about[0]
    assert "policy lfu, chosen by auto" in about[1]


def test_kept_blocks_and_the_cache_agree(packed: Path, tmp_path: Path) -> None:
    total = sum(path.stat().st_size for path in packed.glob("*.tar"))
    words = (
        "shuffle.kept=0.5",
        "shuffle.lanes=3",
        "loader.last_batch=partial",
        f"cache.tiers.node.capacity={total // 2}",
    )
    with load(packed, tmp_path, *words) as loader:
        assert epoch_ids(loader) == list(range(NUM_IMAGES))
        written = loader.stats()["bytes_written"]["node"]
        assert 0.35 * total < written <= total // 2
        assert epoch_ids(loader) == list(range(NUM_IMAGES))
        assert loader.stats()["bytes_written"]["node"] == written


@pytest.mark.parametrize(
    ("lanes", "exchange", "replicas", "expected"),
    [(64, 0.0, 1, (0.5, 1)), (64, 0.5, 1, (1.0, 1)), (4, 0.0, 1, (0.5, 4)), (64, 0.0, 2, (0.5, 4))],
)
def test_a_node_caches_its_lanes_and_shares_what_its_ranks_have_in_common(
    lanes: int, exchange: float, replicas: int, expected: tuple[float, int]
) -> None:
    shape = DataShape(num_samples=100_000, block_samples=8, num_bytes=10**9)
    shuffle = ShuffleConfig(lanes=lanes, exchange=exchange)
    signature = order_signature(shape, batch_size=64, shuffle=shuffle, last_batch="drop")
    world = World(rank=5, world_size=8, local_rank=1, local_world_size=4, node=1)
    readers = cache_readers(signature, shape, world, replicas=replicas)
    assert (readers.node_share, readers.local_ranks) == expected
    assert readers.working_blocks == round(lanes * signature.window_blocks * expected[0])


def test_a_second_job_decodes_nothing_again(packed: Path, tmp_path: Path) -> None:
    kept = ("cache.tiers.memory.decoded=200MB", "cache.tiers.memory.keep=true", "shuffle.seed=5")

    def epoch(root: Path, *overrides: str) -> tuple[dict[int, torch.Tensor], dict[str, Any]]:
        with load(packed, root, *overrides) as loader:
            pixels = {
                i: image.clone()
                for batch in loader
                for i, image in zip(batch["id"].tolist(), batch["image"], strict=True)
            }
            return pixels, loader.stats()

    plain, stats = epoch(tmp_path / "plain", "shuffle.seed=5")
    assert stats["decoded"] == {"found": 0, "kept": 0, "gave_way": 0}
    first, stats = epoch(tmp_path / "kept", *kept)
    assert stats["decoded"]["kept"] == NUM_IMAGES
    second, stats = epoch(tmp_path / "kept", *kept)
    assert stats["decoded"]["found"] >= NUM_IMAGES
    assert stats["decoded"]["kept"] == 0
    assert stats["bytes_read"]["memory"] > NUM_IMAGES * 120 * 160 * 3
    for pixels in (first, second):
        assert pixels.keys() == plain.keys()
        assert all(torch.equal(pixels[i], plain[i]) for i in plain)


def test_decoded_samples_where_no_graph_takes_them_are_refused(packed: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cache\.tiers\.memory\.decoded .*jpeg_scale=off"):
        load(packed, tmp_path, "cache.tiers.memory.decoded=0.5", "graph.jpeg_scale=auto")


def test_the_device_tier_needs_a_gpu(packed: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cache\.tiers\.device\.capacity=1G needs a GPU, and device=cpu"):
        load(packed, tmp_path, "cache.tiers.device.capacity=1G")
    with load(packed, tmp_path) as loader:
        assert loader.release_device_cache() == 0
