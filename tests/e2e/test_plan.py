"""`dalipipe plan`, on a data set, on figures and on a run that was real."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dalipipe as dp
from dalipipe.cli import main
from dalipipe.errors import ConfigError
from tests.conftest import NUM_IMAGES
from tests.support.faultproxy import FolderServer

FIGURES = ("plan.samples=4096", "plan.sample_bytes=10kB", "plan.gpus_per_node=2", "loader.batch_size=8")
REQUIRED = {"node_cache_bytes", "policy", "au", "lake_bytes_per_epoch"}


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main(["plan", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main(["plan", *words])
    return code, capsys.readouterr().err


@pytest.fixture(scope="module")
def run_dir(packed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A job of two epochs on a web server that answers late."""
    root = tmp_path_factory.mktemp("plan")
    server = FolderServer(packed, latency_s=0.02)
    overrides = [f"data.url={server.url}", f"cache.dir={root / 'cache'}", f"run_dir={root / 'run'}"]
    try:
        with dp.load("train", [*overrides, "loader.batch_size=10", "graph.size=32", "device=cpu"]) as loader:
            for _ in range(2):
                for _ in loader:
                    time.sleep(0.01)
    finally:
        server.stop()
    yield root / "run"


def test_figures_alone_are_enough(capsys: pytest.CaptureFixture[str]) -> None:
    told = plan(capsys, *FIGURES, "plan.gpu_read_rate=1.5GB", "plan.cover_s=180")
    assert told.keys() >= REQUIRED
    assert told["node_cache_bytes"] == 2 * 1_500_000_000 * 180
    assert told["policy"] == "pin"
    assert told["gpu_read_rate"] == pytest.approx(1.5e9)
    assert 0 < told["au_first_epoch"] <= told["au"] <= 1
    assert told["cross_node_reads"] is None
    assert told["calibration"] is None


def test_a_data_set_by_its_url(capsys: pytest.CaptureFixture[str], packed: Path) -> None:
    words = ("plan.gpus=4", "plan.gpus_per_node=2", "loader.batch_size=5", "plan.step_s=0.1")
    told = plan(capsys, str(packed), *words, "plan.nodes=3")
    assert told["url"] == str(packed)
    assert told["steps_per_epoch"] == NUM_IMAGES // 20
    assert told["nodes"] == 2
    assert told["cross_node_reads"]["nodes"] == 3
    assert told["lake_bytes_first_epoch"] > 0.8 * told["dataset_bytes"]
    assert main(["info", str(packed), "nodes=3", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert {name: facts[name] for name in told["cross_node_reads"]} == told["cross_node_reads"]


def test_a_small_set_needs_no_batch_size(capsys: pytest.CaptureFixture[str], packed: Path) -> None:
    told = plan(capsys, f"data.url={packed}", "plan.gpus_per_node=8", "plan.gpu_read_rate=1.5GB", "plan.cover_s=180")
    assert told["node_cache_bytes"] == 8 * 1_500_000_000 * 180
    assert told["batch_size"] == 1
    assert told["gpus"] == 8


def test_a_table_of_several_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    words = (*FIGURES, "plan.step_s=0.1", "plan.gpus=[1,2,4]", "cost.gpu_hour=3", "plan.lake_bandwidth=1MB")
    told = plan(capsys, *words)
    assert [one["gpus"] for one in told["by_gpus"]] == [1, 2, 4]
    assert told["gpus"] == 1
    first = [one["au_first_epoch"] for one in told["by_gpus"]]
    assert first == sorted(first, reverse=True)
    assert main(["plan", *words]) == 0
    shown = capsys.readouterr().out
    assert "AU, first epoch" in shown
    assert "money lost an epoch" in shown
    assert "4 GPUs: " in shown
    assert "simulated: " in shown


@pytest.mark.parametrize("key", ["plan.from", "from"])
def test_a_run_tells_its_own_plan(capsys: pytest.CaptureFixture[str], run_dir: Path, key: str) -> None:
    told = plan(capsys, f"{key}={run_dir}")
    compared = told["calibration"]
    assert told["gpus"] == compared["gpus"] == 1
    assert told["batch_size"] == 10
    assert told["step_s"] > 0.01
    assert told["decode_s"] > 0
    assert "of the run" in told["latency"]
    assert compared["steps"] == 2 * NUM_IMAGES // 10 - 3
    assert 0 < compared["observed_au"] <= 1
    assert 0 < compared["predicted_au"] <= 1
    assert compared["difference_points"] == pytest.approx(
        100 * (compared["predicted_au"] - compared["observed_au"]), abs=1e-9
    )


def test_a_run_is_the_basis_of_other_sizes(capsys: pytest.CaptureFixture[str], run_dir: Path) -> None:
    words = (f"plan.from={run_dir}", "plan.gpus=[1,3]", "plan.gpus_per_node=1", "plan.step_s=0.5")
    assert main(["plan", *words]) == 0
    shown = capsys.readouterr().out
    assert "the run itself: AU predicted" in shown
    told = plan(capsys, *words)
    assert [one["nodes"] for one in told["by_gpus"]] == [1, 3]
    assert {one["step_s"] for one in told["by_gpus"]} == {0.5}
    config = json.loads((run_dir / "config.json").read_text())
    assert told["batch_size"] == config["loader"]["batch_size"]


def test_a_run_of_several_ranks(capsys: pytest.CaptureFixture[str], run_dir: Path, tmp_path: Path) -> None:
    """The one real rank twice, as one node: in lock-step the slower of both waits counts."""
    copy = tmp_path / "run"
    shutil.copytree(run_dir, copy)
    figures = json.loads((copy / "ranks" / "00000.json").read_text())
    (copy / "ranks" / "00001.json").write_text(json.dumps({**figures, "rank": 1, "world_size": 2, "local_rank": 1}))
    shutil.copytree(copy / "ledger" / "rank-00000", copy / "ledger" / "rank-00001")
    told = plan(capsys, f"plan.from={copy}")
    assert (told["gpus"], told["nodes"], told["calibration"]["gpus"]) == (2, 1, 2)
    assert "2 of 2 GPUs" in told["calibration"]["about"]


def test_what_a_run_had_of_the_host_is_in_bytes(
    capsys: pytest.CaptureFixture[str], run_dir: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run_dir, copy)
    config = json.loads((copy / "config.json").read_text())
    config["prefetch"] |= {"memory_cap": 0.5, "whole_epoch": True}
    config["cache"]["tiers"]["memory"]["capacity"] = 0.1
    config["cache"]["tiers"]["pool"]["url"] = "s3://near/pool"
    (copy / "config.json").write_text(json.dumps(config))
    told = plan(capsys, f"plan.from={copy}")
    memory = json.loads((copy / "ranks" / "00000.json").read_text())["facts"]["memory_bytes"]
    assert told["cache_bytes"] == told["node_cache_bytes"] + int(0.1 * memory)
    assert told["hit_ratio"] == 1.0


def test_a_run_without_a_ledger_is_not_compared(
    capsys: pytest.CaptureFixture[str], run_dir: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run_dir, copy)
    shutil.rmtree(copy / "ledger")
    told = plan(capsys, f"plan.from={copy}")
    assert told["calibration"] is None
    assert told["step_s"] > 0.01
    assert main(["plan", f"plan.from={copy}"]) == 0
    assert "too few steps to compare" in capsys.readouterr().out


def test_what_memory_holds_is_no_miss_of_the_node_caches(capsys: pytest.CaptureFixture[str], packed: Path) -> None:
    """A set smaller than what is prefetched: later epochs ask the lake for next to nothing, and no cache either."""
    words = ("plan.gpus=1", "loader.batch_size=5", "plan.step_s=0.1", "cache.policy=stream", f"data.url={packed}")
    told = plan(capsys, *words)
    assert told["read_again"] < 0.5
    assert told["lake_bytes_per_epoch"] < 0.5 * told["dataset_bytes"]
    assert main(["plan", *words]) == 0
    rows = [line.strip().rsplit("  ", 1) for line in capsys.readouterr().out.splitlines()]
    shown = {row[0].strip(): row[1].strip() for row in rows if len(row) == 2}
    assert shown["blocks still in memory"] == f"{100 * (1 - told['read_again']):.1f} %"
    assert shown["of others, in node caches"] == f"{100 * told['hit_ratio']:.1f} %"


@pytest.mark.parametrize("price", ["gpu_hour=-3", "egress_gb=nan", "requests_1k=inf", "disk_gb_month=-0.1"])
def test_a_price_that_is_none_is_refused(
    capsys: pytest.CaptureFixture[str], price: str, packed: Path, tmp_path: Path
) -> None:
    code, said = refused(capsys, *FIGURES, "plan.gpu_read_rate=1.5GB", f"cost.{price}")
    assert (code, f"cost.{price.partition('=')[0]}=" in said, "at least 0" in said) == (2, True, True)
    with pytest.raises(ConfigError, match=r"cost\..* must be a price"):
        dp.load("train", [f"data.url={packed}", f"cache.dir={tmp_path / 'cache'}", "device=cpu", f"cost.{price}"])


def test_a_folder_that_tells_nothing_is_refused(
    capsys: pytest.CaptureFixture[str], run_dir: Path, tmp_path: Path
) -> None:
    code, said = refused(capsys, f"plan.from={tmp_path / 'none'}")
    assert code == 2
    assert f"plan.from={tmp_path / 'none'} is no folder" in said
    code, said = refused(capsys, f"plan.from={tmp_path}")
    assert code == 1
    assert "holds no run" in said
    for name, damage, says in (
        ("old", lambda figures: figures["histograms"].pop("lake_block_s"), "has no histogram of blocks from the lake"),
        ("older", lambda figures: figures["facts"].pop("block_samples"), "does not tell block_samples"),
        ("other", lambda figures: figures.update(version=9), "of version 9 cannot be read"),
    ):
        copy = tmp_path / name
        shutil.copytree(run_dir, copy)
        figures = json.loads((copy / "ranks" / "00000.json").read_text())
        damage(figures)
        (copy / "ranks" / "00000.json").write_text(json.dumps(figures))
        code, said = refused(capsys, f"plan.from={copy}")
        assert code == 1
        assert says in said
    mixed = tmp_path / "mixed"
    shutil.copytree(run_dir, mixed)
    config = json.loads((mixed / "config.json").read_text())
    (mixed / "config.json").write_text(json.dumps({**config, "data": {**config["data"], "mix": {"a": 1.0}}}))
    code, said = refused(capsys, f"plan.from={mixed}")
    assert code == 2
    assert "plan simulates one data set" in said
    torn = tmp_path / "torn"
    shutil.copytree(run_dir, torn)
    (torn / "config.json").write_text("{")
    code, said = refused(capsys, f"plan.from={torn}")
    assert code == 1
    assert "is not the configuration of a run of this release" in said
    (torn / "config.json").unlink()
    code, said = refused(capsys, f"plan.from={torn}")
    assert code == 1
    assert "config.json cannot be read" in said


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "plan needs a data set"),
        (("plan.samples=10", "plan.sample_bytes=10"), "how fast a GPU consumes"),
        ((*FIGURES, "plan.step_s=1", "plan.gpus=0"), "plan.gpus=0 must be from 1"),
        ((*FIGURES, "plan.step_s=1", "plan.gpus=5"), "nearest: 4 or 6"),
        ((*FIGURES, "plan.step_s=1", "plan.nodes=-1"), "plan.nodes=-1"),
        ((*FIGURES, "plan.step_s=1", "data.url=/somewhere"), "name two data sets"),
        ((*FIGURES, "plan.step_s=1", "data.mix={a:0.5}"), "leave data.mix and data.repeat out"),
        ((*FIGURES, "plan.gpu_rate=1"), "unknown key 'plan.gpu_rate'; did you mean 'plan.gpu_read_rate'?"),
        ((*FIGURES, "plan.step_s=soon"), "plan.step_s"),
    ],
)
def test_words_that_make_no_plan(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], says: str) -> None:
    code, said = refused(capsys, *words)
    assert code == 2
    assert says in said


def test_the_key_from_is_in_the_schema(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(f"defaults:\n  - plan\n  - _self_\nplan:\n  from: {tmp_path / 'gone'}\n")
    code, said = refused(capsys, "--config-dir", str(tmp_path), "--config-name", "mine")
    assert code == 2
    assert f"plan.from={tmp_path / 'gone'} is no folder" in said
    assert main(["plan", "--cfg", "job"]) == 0
    assert "  from: ''" in capsys.readouterr().out


def test_a_plan_needs_no_torch_and_no_store() -> None:
    words = ["plan", *FIGURES, "plan.step_s=0.1", "--json"]
    code = (
        "import sys\n"
        "from dalipipe.cli import main\n"
        f"assert main({words!r}) == 0\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'nvidia.dali', 'obstore', 'fsspec', 'ray')))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
