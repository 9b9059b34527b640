"""The GPU kit without a GPU: its dry run from a bare checkout, and that it cannot pass by skipping."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import __main__ as kit
from benchmarks.gpu import checks
from benchmarks.gpu.checks import judge_tests
from benchmarks.gpu.resnet import resnet
from benchmarks.gpu.speed import raw_pipeline
from dalipipe.graphs.config import GraphConfig

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What a checkout holds and the kit needs, in another place; nothing of it is installed."""
    root = tmp_path / "checkout"
    for name in ("benchmarks", "configs", "dalipipe", "tests"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    return root


def _run(checkout: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", checkout / "benchmarks/gpu/run.sh", *words],
        check=False,
        cwd=checkout.parent,
        env=os.environ | {"PYTHON": sys.executable} | environ,
        capture_output=True,
        text=True,
        timeout=280,
    )


@pytest.mark.timeout(300)
def test_the_dry_run_from_a_bare_checkout(checkout: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = _run(checkout, "--device", "cpu", "--quick", "--budget-s", "250", OUT=str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((out / "kit.json").read_text())
    sections = results["sections"]
    assert list(sections) == [
        "environment", "gpu_tests", "pixels", "recovery", "pointers", "hand_over", "sweep", "device_tier", "training",
    ]  # fmt: skip
    for name in ("pixels", "recovery", "pointers", "sweep", "device_tier"):
        assert sections[name]["ok"] is True, sections[name]
    # The twin of the GPU's graph shows the same crops; another seed's crops are nothing like them.
    assert sections["pixels"]["image_train"]["psnr_min_db"] > 45
    assert sections["pixels"]["image_train"]["another_seed_median_db"] < 20
    assert sections["recovery"]["bad_images"] >= 3
    assert sections["recovery"]["good_rows_bit_equal"] == 1.0
    assert sections["gpu_tests"]["tests"] >= 4
    assert sections["gpu_tests"]["failed"] == []
    assert sections["training"]["fed_step_ms"] > 0
    assert sections["sweep"]["rows"][0]["dali_images_per_s"] > 0
    page = (out / "kit.md").read_text()
    assert "| pixels | held |" in page
    assert "torch: 2." in page
    assert page.strip() in done.stdout


def test_wheels_of_a_folder_are_used_without_network(checkout: Path, tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "kit_probe-1.0-py3-none-any.whl", "w") as wheel:
        info = "kit_probe-1.0.dist-info"
        wheel.writestr("kit_probe.py", "")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: kit-probe\nVersion: 1.0\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    seen = tmp_path / "seen"
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\n[ "$2" = benchmarks.gpu ] && {sys.executable} -c "import kit_probe" && touch {seen}\n'
        f'exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    words = ["--wheels", str(wheels), "--out", str(tmp_path / "out"), "--device", "cpu", "--sections", "environment"]
    done = _run(checkout, *words, PYTHON=str(python))
    assert done.returncode == 0, done.stderr
    assert seen.exists()
    empty = _run(checkout, "--wheels", str(tmp_path / "out"))
    assert empty.returncode == 2
    assert "no wheel" in empty.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="this host has a card")
def test_a_card_that_is_not_there_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert kit.main(["--device", "cuda:0", "--out", str(tmp_path)]) == 2
    assert "cuda:0 is not there" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        kit.main(["--device", "tpu"])


def test_a_section_that_fails_costs_only_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(_kit: object) -> dict[str, Any]:
        raise RuntimeError("no such luck")

    monkeypatch.setattr(checks, "pixels", broken)
    words = ["--device", "cpu", "--quick", "--out", str(tmp_path), "--sections", "pixels", "pointers"]
    assert kit.main(words) == 1
    sections = json.loads((tmp_path / "kit.json").read_text())["sections"]
    assert sections["pixels"]["ok"] is False
    assert "no such luck" in sections["pixels"]["why"]
    assert sections["pointers"]["ok"] is True
    assert "failed: pixels" in capsys.readouterr().err


def test_no_time_left_is_a_failure(tmp_path: Path) -> None:
    words = ["--device", "cpu", "--quick", "--out", str(tmp_path), "--budget-s", "0.01", "--sections", "pointers"]
    assert kit.main(words) == 1


@pytest.mark.parametrize(
    ("cases", "on_gpu", "ok"),
    [
        ("<testcase classname='t' name='a'/>", True, True),
        ("<testcase classname='t' name='a'/><testcase classname='t' name='b'><skipped/></testcase>", True, False),
        ("", True, False),
        ("<testcase classname='t' name='a'><failure/></testcase>", True, False),
        ("<testcase classname='t' name='a'><error/></testcase>", False, False),
        ("<testcase classname='t' name='a'><skipped/></testcase>", False, None),
    ],
    ids=["all ran", "one skipped", "none", "one failed", "error without a card", "skipped without a card"],
)
def test_every_gpu_test_must_run_on_a_card(tmp_path: Path, cases: str, on_gpu: bool, ok: bool | None) -> None:
    report = tmp_path / "report.xml"
    report.write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    assert judge_tests(report, on_gpu=on_gpu)["ok"] is ok


def test_the_peer_on_a_card_is_a_graph_that_dali_accepts(tmp_path: Path) -> None:
    """Without a card it can be built and serialised, which checks arguments and placement, but not run."""
    pipeline = raw_pipeline(
        [str(tmp_path / "a.jpg")], GraphConfig(num_threads=2), batch_size=4, mixed=True, device_id=None
    )
    pipeline._build_graph()
    pipeline.serialize()
    kinds = [operator._op for operator in pipeline._ops]
    placed = {getattr(kind, "schema_name", None) or type(kind).__name__: kind.device for kind in kinds}
    assert placed["decoders__ImageRandomCrop"] == "mixed"
    assert placed["Resize"] == placed["CropMirrorNormalize"] == "gpu"


def test_the_net_is_resnet_50() -> None:
    assert sum(weight.numel() for weight in resnet(1000).parameters()) == 25_557_032
    assert resnet(10, (1, 1, 1, 1), 8)(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
