"""`assign=node`: nodes that come back in another order read what they have cached, and the batches stay the same."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import dalipipe as dp
from dalipipe.cli.compose import compose
from dalipipe.errors import ConfigError


def config(packed: Path, cache: Path, assign: str) -> dp.LoadConfig:
    options = [
        f"data.url={packed}",
        f"cache.dir={cache}",
        f"assign={assign}",
        "graph=image_raw",
        "loader.global_batch_size=8",
        "prefetch.threads=2",
        "prefetch.depth=2",
        "prefetch.timeout_s=60",
    ]
    found: dp.LoadConfig = compose("train", options)
    return found


def epoch_of(cfg: dp.LoadConfig, rank: int) -> tuple[list[list[int]], dict[str, Any]]:
    """One rank alone on its node."""
    world = dp.World(rank=rank, world_size=2, local_rank=0, local_world_size=1, node=rank)
    with dp.Loader(cfg, world=world) as loader:
        return [batch["id"].tolist() for batch in loader], loader.stats()


def test_a_swapped_pair_of_nodes_reads_its_own_cache(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches = [tmp_path / "first", tmp_path / "second"]
    configs = [config(packed, cache, "static") for cache in caches]
    with ThreadPoolExecutor(2) as pool:
        run = list(pool.map(epoch_of, configs, range(2)))
    plan = [sorted(one + other) for one, other in zip(run[0][0], run[1][0], strict=True)]

    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(server.port))
    # In a job each rank is a process, and the first loader of each is number 0.
    monkeypatch.setattr("dalipipe.wiring.ranks._openings", iter([0, 0]))
    swapped = [config(packed, cache, "node") for cache in reversed(caches)]
    with ThreadPoolExecutor(2) as pool:
        again = list(pool.map(epoch_of, swapped, range(2)))
    assert [sorted(one + other) for one, other in zip(again[0][0], again[1][0], strict=True)] == plan
    static_bytes = sum(stats["bytes_read"]["lake"] for _, stats in run)
    # The tail and the blocks that straddle lanes are anybody's; the rest is near.
    assert sum(stats["bytes_read"]["lake"] for _, stats in again) < 0.4 * static_bytes


def test_without_a_place_to_meet_it_is_refused(packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(ConfigError, match="MASTER_ADDR:MASTER_PORT, which are not set"):
        epoch_of(config(packed, tmp_path, "node"), 0)
