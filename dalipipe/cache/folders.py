"""Where the tiers of a node lie, and what room there is."""

from __future__ import annotations

import os
from pathlib import Path

from dalipipe.cache.config import CacheConfig


def memory_folder(config: CacheConfig) -> Path:
    """Where shared memory is: `cache.tiers.memory.dir`, or a folder of this user in /dev/shm."""
    return Path(config.tiers.memory.dir or f"/dev/shm/dalipipe-{os.getuid()}")


def free_bytes(folder: Path, tier: str) -> int:
    """What may still be written below `folder` (which may not be there yet); for memory also what the host has."""
    while not folder.exists():
        folder = folder.parent
    disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize
    return min(free, _available_memory_bytes()) if tier == "memory" else free


def _available_memory_bytes() -> int:
    with Path("/proc/meminfo").open() as lines:
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return available
    return available if limit == "max" else max(0, min(available, int(limit) - used))
