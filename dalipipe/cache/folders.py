"""Where the tiers of a node lie, and what room there is."""

from __future__ import annotations

import os
from pathlib import Path

from dalipipe.cache.config import CacheConfig
from dalipipe.shards.digest import digest64

SHARED_MEMORY = Path("/dev/shm")

PASSING_NAME = "passing"
"""In a data set's folder in shared memory: blocks that no tier keeps, while a process holds them."""

KEEP_NAME = "keep"
"""In a data set's folder in shared memory: its blocks stay when the last job ends."""


def memory_root(config: CacheConfig) -> Path:
    """What holds the shared memory of all caches of this user, or of this one alone where its folder is named."""
    return Path(config.tiers.memory.dir or SHARED_MEMORY / f"dalipipe-{os.getuid()}")


def memory_folder(config: CacheConfig) -> Path:
    """Where the shared memory of a node's cache is: `cache.tiers.memory.dir`, or a folder in /dev/shm that belongs to
    this user and this `cache.dir`: jobs that share the one share the other."""
    if config.tiers.memory.dir:
        return memory_root(config)
    mark = digest64(memoryview(os.fsencode(Path(config.dir).absolute())))
    return memory_root(config) / f"{mark:016x}"


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
