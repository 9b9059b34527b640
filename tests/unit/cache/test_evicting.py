"""Policies that evict, and how they share their budget out."""

from __future__ import annotations

import errno
import os
from fractions import Fraction
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dalipipe.cache.blockstore import BlockStore
from dalipipe.cache.inspect import stat
from dalipipe.cache.policies import LfuPolicy, LruPolicy
from dalipipe.cache.readers import Readers
from dalipipe.cache.sets import BudgetSets
from dalipipe.cache.tier import Tier
from dalipipe.cache.tiered import TieredCache
from dalipipe.cache.usage import UsageTable
from dalipipe.errors import ConfigError
from dalipipe.shards.manifest import Manifest
from dalipipe.telemetry import Recorder
from tests.contracts.cache import CacheContract
from tests.support.lake import MemoryLake
from tests.unit.cache.tiers import configure, open_tiers, scan


class TestLru(CacheContract):
    @pytest.fixture(autouse=True)
    def _directory(self, tmp_path: Path) -> None:
        self.directory = tmp_path

    def make(self, manifest: Manifest, lake: MemoryLake) -> TieredCache:
        config = configure(self.directory, policy="lru", node=manifest.num_bytes // 2)
        return open_tiers(manifest, lake, config)[0]


def test_lru_keeps_the_latest_within_its_budget_and_counts_what_it_drops(
    tmp_path: Path, manifest: Manifest, lake: MemoryLake
) -> None:
    config = configure(tmp_path, policy="lru", node=manifest.num_bytes // 2)
    cache, recorder = open_tiers(manifest, lake, config)
    scan(cache, manifest)
    report = stat(config)
    assert report.bytes <= manifest.num_bytes // 2
    kept = {int(path.name) for path in (tmp_path / "node" / manifest.identity / "0").iterdir()}
    assert kept == set(range(manifest.num_blocks - len(kept), manifest.num_blocks))
    assert recorder.snapshot()["blocks_evicted.node"] == manifest.num_blocks - len(kept)
    # A scan in the same order is the worst case: what is asked for was dropped a moment ago.
    assert set(scan(cache, manifest)) == {"lake"}


def test_lfu_holds_on_to_hot_blocks_and_replaces_nothing_in_a_scan(
    tmp_path: Path, manifest: Manifest, lake: MemoryLake
) -> None:
    config = configure(tmp_path, policy="lfu", node=manifest.num_bytes // 4)
    cache, recorder = open_tiers(manifest, lake, config)
    for _ in range(3):
        tiers = scan(cache, manifest)
    assert "blocks_evicted.node" not in recorder.snapshot()
    assert tiers.count("node") > 0.2 * manifest.num_blocks
    hot = list(range(manifest.num_blocks - 12, manifest.num_blocks))
    for _ in range(3):
        for _ in range(4):
            scan(cache, manifest, hot)
        scan(cache, manifest)
    assert scan(cache, manifest, hot) == ["node"] * len(hot)
    assert stat(config).bytes <= manifest.num_bytes // 4


def test_counts_are_shared_survive_and_age(tmp_path: Path) -> None:
    clock = iter(range(1, 1000))
    one, other = (UsageTable(tmp_path / "usage", clock=lambda: float(next(clock))) for _ in range(2))
    for _ in range(3):
        one.used(700)
    other.used(700)
    beside = range(512, 1024)
    assert other.read(beside)[700 - 512].tolist() == (4.0, 4, 0)
    other.age(beside)
    assert one.read(beside)["uses"][700 - 512] == 4
    for _ in range(5):
        one.used(700)
    one.age(beside)
    assert one.read(beside)["uses"][700 - 512] == 4
    one.close()
    one.used(700)
    one.close()
    assert other.read(beside)["uses"][700 - 512] == 4
    assert not other.read(range(512)).view(np.uint8).any()


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        (("pin", 100), "one block"),
        (("lru", 50_000), "12 blocks that the order has open"),
        (("lfu", "50K"), "lower shuffle.window"),
    ],
)
def test_a_budget_below_the_working_set_is_refused_with_the_numbers(
    tmp_path: Path, manifest: Manifest, lake: MemoryLake, budget: tuple[str, int | str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        open_tiers(
            manifest, lake, configure(tmp_path, policy=budget[0], node=budget[1]), readers=Readers(working_blocks=12)
        )
    assert "cache.tiers.node.capacity" in str(caught.value)
    assert "give at least" in str(caught.value)


def test_a_full_disk_under_lru_evicts_its_own_before_it_gives_up(
    tmp_path: Path, manifest: Manifest, lake: MemoryLake
) -> None:
    written = 0

    def nearly_full(descriptor: int, data: memoryview) -> int:
        nonlocal written
        kept = sum(
            path.stat().st_size for path in (tmp_path / "node").rglob("*") if path.name.isdigit() and path.is_file()
        )
        if kept > manifest.num_bytes // 8:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written += len(data)
        return os.write(descriptor, data)

    config = configure(tmp_path, policy="lru", node=0.5)
    cache, recorder = open_tiers(manifest, lake, config, open_blocks=partial(BlockStore, write=nearly_full))
    scan(cache, manifest)
    counts = recorder.snapshot()
    assert counts["blocks_evicted.node"] > 0
    assert counts.get("node_write_failures", 0) == 0
    assert scan(cache, manifest, [manifest.num_blocks - 1]) == ["node"]


@given(num_blocks=st.integers(1, 5000), budget=st.fractions(0, 2), block_bytes=st.integers(1, 4 << 20), data=st.data())
def test_sets_share_out_the_budget_and_none_is_too_small_for_a_block(
    num_blocks: int, budget: Fraction, block_bytes: int, data: st.DataObject
) -> None:
    num_bytes = num_blocks * block_bytes
    sets = BudgetSets(num_blocks=num_blocks, num_bytes=num_bytes, budget_bytes=int(budget * num_bytes))
    parts, block = [], 0
    while block < num_blocks:
        parts.append(sets.blocks_beside(block))
        assert parts[-1].start == block
        block = parts[-1].stop
    assert block == num_blocks
    assert sets.blocks_beside(data.draw(st.integers(0, num_blocks - 1))) in parts
    shares = [sets.share_bytes(part) for part in parts]
    assert sets.budget_bytes - len(parts) <= sum(shares) <= sets.budget_bytes
    assert len(parts) == 1 or min(shares) >= 8 * block_bytes


@pytest.mark.parametrize("num_kept", [8, 40])
def test_a_budget_of_a_few_blocks_in_a_thousand_is_used(tmp_path: Path, num_kept: int) -> None:
    """With sets of 512 blocks each would have a part of a block, and nothing would ever be kept."""
    num_blocks, data = 1 << 15, memoryview(bytes(100))
    tier = Tier(
        "node",
        BlockStore(tmp_path),
        LruPolicy(),
        budget_bytes=num_kept * len(data),
        used_bytes=0,
        num_blocks=num_blocks,
        num_bytes=num_blocks * len(data),
        recorder=Recorder(),
        usage=UsageTable(tmp_path / "usage"),
    )
    kept: list[int] = []
    for block in range(0, num_blocks, num_blocks // 128):
        assert tier.admits(block, len(data))
        assert tier.keep(block, data)
        kept.append(block)
    found = [block for block in kept if tier.open(block, len(data)) is not None]
    assert 0.8 * num_kept <= len(found) <= num_kept
    assert kept[-1] in found
    tier.close()


def test_what_was_hot_long_ago_makes_room_for_what_is_hot_now(tmp_path: Path) -> None:
    data, usage = memoryview(bytes(100)), UsageTable(tmp_path / "usage")
    tier = Tier(
        "node",
        BlockStore(tmp_path),
        LfuPolicy(),
        budget_bytes=8 * len(data),
        used_bytes=0,
        num_blocks=16,
        num_bytes=16 * len(data),
        recorder=Recorder(),
        usage=usage,
    )
    for block in range(8):
        assert tier.keep(block, data)
        for _ in range(100):
            usage.used(block)
    turns = 0
    while not tier.keep(12, data):
        usage.used(12)
        turns += 1
        assert turns < 60  # 103 if no count ever aged
    tier.close()
