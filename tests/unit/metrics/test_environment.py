"""The environment report: what it must hold, what it must hide, and each finding from the facts that call for it."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import types
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from dalipipe.metrics.environment import collect, describe_environment
from dalipipe.metrics.findings import judge

GOOD: dict[str, dict[str, Any]] = {
    "host": {"cpus": 64},
    "packages": {"torch": "2.13.0", "nvidia-dali-cuda130": "2.4.0"},
    "gpu": {"driver": "580.65.06", "devices": ["0: card", "1: card"]},
    "torch": {"version": "2.13.0", "cuda": "13.0", "available": True},
    "graphs": {"resize_kernel": "native avx2"},
    "memory": {"shm_bytes": 8 * 2**30},
    "limits": {"open_files": 20000, "max_map_count": 65530},
    "cache.dir": {"path": "/nvme", "file_system": "xfs", "free_bytes": 10**12},
    "data.url": {"url": "s3://bucket/set", "manifest_bytes": 100},
}


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    assert judge(GOOD) == []


@pytest.mark.parametrize(
    ("section", "change", "level", "words"),
    [
        ("packages", {"nvidia-dali-cuda130": None}, "error", "DALI is not installed"),
        ("packages", {"nvidia-dali-cuda120": "2.4.0"}, "error", "both flavours"),
        ("packages", {"torch": None}, "error", "torch is not installed"),
        ("gpu", {"driver": "550.54"}, "error", "DALI for CUDA 13 needs driver 580, this host has 550"),
        ("torch", {"cuda": "12.8"}, "warning", "torch is built for CUDA 12.8, DALI is nvidia-dali-cuda130"),
        ("torch", {"cuda": "", "available": False}, "error", "torch is a CPU build"),
        ("torch", {"available": False}, "error", "torch cannot use it"),
        ("gpu", {"nvml": "Unknown Error"}, "warning", "NVML cannot be asked: Unknown Error"),
        ("graphs", {"resize_kernel": "torch"}, "warning", "the resize kernel was not built"),
        ("memory", {"shm_bytes": 64 * 2**20}, "warning", "/dev/shm has 67.1 MB"),
        ("limits", {"max_map_count": 1000}, "warning", "vm.max_map_count is 1000"),
        ("limits", {"open_files": 256}, "warning", "only 256 open files"),
        ("host", {"cpus": 2}, "warning", "2 CPUs for 2 GPUs"),
        ("cache.dir", {"file_system": "nfs4"}, "warning", "a network disk"),
        ("cache.dir", {"file_system": "fuse.ceph"}, "warning", "a network disk"),
        ("cache.dir", {"file_system": "tmpfs"}, "warning", "in memory"),
        ("cache.dir", {"file_system": "overlay"}, "warning", "the container's own layer"),
        ("cache.dir", {"free_bytes": 5}, "warning", "5 B are free"),
        ("cache.dir", {"error": "Permission denied"}, "error", "cannot be used: Permission denied"),
        ("data.url", {"error": "s3://bucket/set does not answer"}, "error", "does not answer"),
    ],
)
def test_each_trouble_is_found_alone(section: str, change: dict[str, Any], level: str, words: str) -> None:
    facts = copy.deepcopy(GOOD)
    facts[section] = {name: value for name, value in (facts[section] | change).items() if value is not None}
    (finding,) = judge(facts)
    assert finding.level == level
    assert words in finding.what
    assert finding.remedy


def test_the_report_of_this_host(packed: Path, tmp_path: Path) -> None:
    report = describe_environment(
        environ=os.environ, cache_dir=str(tmp_path / "not" / "yet"), url=str(packed), probe_torch=False
    )
    facts = json.loads(json.dumps(report.facts))
    assert facts["packages"]["dalipipe"]
    assert facts["torch"]["version"]
    assert facts["host"]["cpus"] >= 1
    assert facts["memory"]["total_bytes"] > 0
    assert facts["cache.dir"]["free_bytes"] > 0
    assert facts["data.url"]["manifest_bytes"] == (packed / "manifest.json").stat().st_size
    assert "python" in report.text()
    assert "findings" in report.text()


def test_a_lake_that_does_not_answer_is_a_finding(tmp_path: Path) -> None:
    report = describe_environment(environ={}, url=str(tmp_path / "nothing"), probe_torch=False)
    assert not report.healthy
    assert any(str(tmp_path / "nothing") in finding.what for finding in report.findings)


def test_a_folder_that_may_not_be_written_is_a_finding(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    report = describe_environment(environ={}, cache_dir=str(tmp_path / "file"), probe_torch=False)
    assert any("cannot be used" in finding.what for finding in report.findings)


def test_secrets_are_not_repeated() -> None:
    environ = {
        "AWS_SECRET_ACCESS_KEY": "hush-1",
        "AWS_SESSION_TOKEN": "hush-2",
        "AWS_ENDPOINT_URL": "http://me:hush-3@store:9000",
        "RANK": "3",
        "HOME": "/root",
    }
    report = describe_environment(environ=environ, url="memory://me:hush-4@x/y", probe_torch=False)
    assert "hush" not in report.text()
    assert "hush" not in json.dumps(report.facts)
    assert report.facts["environment"]["RANK"] == "3"
    assert report.facts["environment"]["AWS_ENDPOINT_URL"] == "http://***@store:9000"
    assert "HOME" not in report.facts["environment"]


def test_a_gpu_is_described_by_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a stand-in for NVML, since there is no driver here."""
    nvml = types.ModuleType("pynvml")
    memory = types.SimpleNamespace(total=10**9 * 140, free=10**9 * 139)
    names = {
        "NVMLError": RuntimeError,
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: b"580.65.06",
        "nvmlSystemGetCudaDriverVersion": lambda: 13000,
        "nvmlDeviceGetCount": lambda: 1,
        "nvmlDeviceGetHandleByIndex": lambda number: number,
        "nvmlDeviceGetMemoryInfo": lambda handle: memory,
        "nvmlDeviceGetName": lambda handle: "NVIDIA H200",
    }
    for name, value in names.items():
        setattr(nvml, name, value)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    gpu = collect(environ={}, probe_torch=False)["gpu"]
    assert gpu == {
        "driver": "580.65.06",
        "devices": ["0: NVIDIA H200, 140.0 GB, 139.0 GB free"],
        "cuda_of_driver": "13.0",
    }


def test_a_host_is_read_from_its_files(tmp_path: Path) -> None:
    """Mounts, a container, a driver without NVML, a memory limit."""
    files = {
        "etc/os-release": 'NAME="Test"\nPRETTY_NAME="Test Linux 1"\n',
        "run/.containerenv": "",
        "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  575.57.08  Release\n",
        "proc/meminfo": "MemTotal: 1000 kB\nMemAvailable: 900 kB\n",
        "proc/self/mounts": f"overlay / overlay rw 0 0\nnvme {tmp_path} xfs rw 0 0\n",
        "sys/fs/cgroup/memory.max": "4096\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    facts = collect(environ={}, cache_dir=str(tmp_path / "cache"), probe_torch=False, root=tmp_path)
    assert facts["host"]["distribution"] == "Test Linux 1"
    assert facts["host"]["container"] == "yes"
    assert facts["gpu"]["driver"] == "575.57.08"
    assert facts["memory"]["total_bytes"] == 1000 * 1024
    assert facts["memory"]["group_limit_bytes"] == 4096
    assert facts["cache.dir"]["file_system"] == "xfs"


def test_doctor_env_prints_it(packed: Path, tmp_path: Path) -> None:
    words = [f"data.url={packed}", f"cache.dir={tmp_path}", "torch=false"]
    command = [sys.executable, "-m", "dalipipe", "doctor", "env", *words]
    environ = os.environ | {"AWS_SECRET_ACCESS_KEY": "hush"}
    done = subprocess.run(command, check=False, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    for words_of_report in ("torch", "resize_kernel", "nvidia-dali", "shm_bytes", "manifest_bytes", "findings"):
        assert words_of_report in done.stdout
    assert "hush" not in done.stdout
    missing = [*command, "--json", f"data.url={tmp_path / 'nothing'}"]
    done = subprocess.run(missing, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert json.loads(done.stdout)["healthy"] is False


def test_a_checkout_that_is_not_installed_works(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Packages have no version there: neither the loader nor the command line may fall over it."""
    import dalipipe as dp
    from dalipipe.cli import main

    def missing(package: str) -> str:
        raise metadata.PackageNotFoundError(package)

    monkeypatch.setattr(metadata, "version", missing)
    assert main(["--version"]) == 0
    assert "not installed" in capsys.readouterr().out
    words = [f"data.url={packed}", f"cache.dir={tmp_path / 'cache'}", "loader.batch_size=8", "graph.size=32"]
    with dp.load("train", [*words, f"run_dir={tmp_path / 'run'}"]) as loader:
        assert len(next(iter(loader))["id"]) == 8
    assert any(finding.what == "torch is not installed" for finding in judge(collect(environ={}, probe_torch=False)))
