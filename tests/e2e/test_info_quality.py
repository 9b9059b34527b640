"""`dalipipe info quality=true` on class-sorted and on shuffled shards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dalipipe.cli import main
from dalipipe.packing.config import PackConfig
from dalipipe.packing.run import pack
from dalipipe.storage.store import StorageConfig
from tests.support.images import jpeg_bytes


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """One lake of four classes, packed with and without shuffling, a few shards each."""
    root = tmp_path_factory.mktemp("quality")
    for i in range(240):
        path = root / "lake" / f"class_{i // 60}" / f"{i:03d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        # Padding after the end marker makes several shards of few pixels; readers ignore it.
        path.write_bytes(jpeg_bytes(i % 8) + bytes(30_000))
    for shuffle in (False, True):
        config = PackConfig(shard_bytes="1MiB", block_bytes="64KiB", shuffle=shuffle, workers=1)
        pack(str(root / "lake"), str(root / str(shuffle)), config, StorageConfig())
    return {shuffle: root / str(shuffle) for shuffle in (False, True)}


def info(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["info", *words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_rho_tells_sorted_shards_from_shuffled_ones(sets: dict[bool, Path], capsys: pytest.CaptureFixture[str]) -> None:
    options = ("quality=true", "loader.global_batch_size=16", "shuffle.window=0.5")
    of_sorted = info(capsys, str(sets[False]), *options)
    assert of_sorted["shards"] >= 4
    quality = of_sorted["quality"]
    assert quality["rho"] > 0.6
    assert quality["rho_samples"] == 240
    assert quality["multiset_deviation"] == 0
    assert quality["epoch_steps"] == quality["num_steps"] == 15
    assert 0 < quality["collision_ratio"] < 3
    worst, rho = quality["design_effect_at_rho_1"], quality["rho"]
    assert quality["design_effect"] == pytest.approx(1 + (worst - 1) * rho)
    assert abs(info(capsys, str(sets[True]), *options)["quality"]["rho"]) < 0.1


def test_quality_follows_the_configuration(sets: dict[bool, Path], capsys: pytest.CaptureFixture[str]) -> None:
    common = (str(sets[False]), "quality=true", "loader.global_batch_size=16")
    in_order = info(capsys, *common, "shuffle.mode=none")["quality"]
    full = info(capsys, *common, "shuffle.mode=full")["quality"]
    assert in_order["collision_ratio"] > 2 * full["collision_ratio"]
    assert in_order["recurrence"] > 5
    assert full["recurrence"] < 2


def test_text_explains_each_figure_and_nothing_is_measured_unasked(
    sets: dict[bool, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["info", str(sets[True]), "quality=true"]) == 0
    printed = capsys.readouterr().out
    for word in ("collision_ratio", "1 is ideal", "recurrence", "rho", "design_effect"):
        assert word in printed
    assert "quality" not in info(capsys, str(sets[True]))


def test_a_configuration_that_cannot_work_is_wrong_usage(
    sets: dict[bool, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["info", str(sets[True]), "quality=true", "loader.global_batch_size=16", "shuffle.lanes=5"]) == 2
    assert "nearest that do: 4 or 8" in capsys.readouterr().err
