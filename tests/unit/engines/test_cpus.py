from __future__ import annotations

import os
from pathlib import Path

import pytest

from dalipipe.engines import default_workers


@pytest.fixture
def many_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_affinity_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 5, 7})
    assert default_workers(root=tmp_path) == 3


@pytest.mark.usefixtures("many_cpus")
class TestQuota:
    def test_none_without_control_groups(self, tmp_path: Path) -> None:
        assert default_workers(root=tmp_path) == 64

    @pytest.mark.parametrize(
        ("limit", "workers"),
        [("max 100000", 64), ("400000 100000", 4), ("250000 100000", 2), ("50000 100000", 1), ("garbage", 64)],
    )
    def test_version_2(self, tmp_path: Path, limit: str, workers: int) -> None:
        _write(tmp_path / "proc/self/cgroup", "0::/slice/pod\n")
        _write(tmp_path / "sys/fs/cgroup/slice/pod/cpu.max", limit + "\n")
        assert default_workers(root=tmp_path) == workers

    def test_smallest_quota_on_the_way_up_counts(self, tmp_path: Path) -> None:
        _write(tmp_path / "proc/self/cgroup", "0::/slice/pod\n")
        _write(tmp_path / "sys/fs/cgroup/slice/pod/cpu.max", "800000 100000\n")
        _write(tmp_path / "sys/fs/cgroup/slice/cpu.max", "300000 100000\n")
        assert default_workers(root=tmp_path) == 3

    def test_group_of_the_mount_counts_inside_a_container(self, tmp_path: Path) -> None:
        _write(tmp_path / "proc/self/cgroup", "0::/of/the/host\n")
        _write(tmp_path / "sys/fs/cgroup/cpu.max", "200000 100000\n")
        assert default_workers(root=tmp_path) == 2

    @pytest.mark.parametrize(("quota", "workers"), [("-1", 64), ("500000", 5)])
    def test_version_1(self, tmp_path: Path, quota: str, workers: int) -> None:
        _write(tmp_path / "proc/self/cgroup", "5:memory:/a\n4:cpu,cpuacct:/pod\n")
        _write(tmp_path / "sys/fs/cgroup/cpu,cpuacct/pod/cpu.cfs_quota_us", quota)
        _write(tmp_path / "sys/fs/cgroup/cpu,cpuacct/pod/cpu.cfs_period_us", "100000")
        assert default_workers(root=tmp_path) == workers


def test_this_machine() -> None:
    assert 1 <= default_workers() <= len(os.sched_getaffinity(0))
