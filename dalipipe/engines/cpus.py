"""How many CPUs this process may really use: a container often sees 64 and is given 2."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def default_workers(*, root: Path = Path("/")) -> int:
    """CPUs this process may use: its affinity mask, cut by the quota of its control group; at least 1.

    A quota of a part of a CPU is rounded down, since a worker more would only be throttled.

    Args:
        root: where /proc and /sys lie, for tests.
    """
    allowed = len(os.sched_getaffinity(0))
    quotas = [quota for folder in _cgroup_folders(root) if (quota := _quota(folder)) is not None]
    return max(1, int(min([allowed, *quotas])))


def _cgroup_folders(root: Path) -> Iterator[Path]:
    """The control groups of this process from its own up to the root; every one of them may set a quota."""
    mount = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = mount / controllers if controllers else mount
        group = PurePosixPath(path.lstrip("/"))
        yield base / group
        yield from (base / parent for parent in group.parents)
    # Inside a container the path above may be the host's; the mount itself is then this process's own group.
    yield mount
    yield mount / "cpu"


def _quota(folder: Path) -> float | None:
    """CPUs that the group allows, None without a limit. Reads cgroup v2 (`cpu.max`), else v1 (`cpu.cfs_*`)."""
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    try:
        quota_us = int((folder / "cpu.cfs_quota_us").read_text())
        period_us = int((folder / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None
    return quota_us / period_us if quota_us > 0 and period_us > 0 else None
