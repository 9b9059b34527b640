"""How many bytes each tier of the node may take."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

from dalipipe.cache.config import CacheConfig
from dalipipe.cache.folders import free_bytes, memory_folder
from dalipipe.cache.inspect import measure_folder
from dalipipe.errors import ConfigError
from dalipipe.units import format_bytes, parse_capacity

_ANY_DISK_BYTES = 1 << 60
_HUGE_DEFAULT = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """One tier of the node that is on: its folder for this data set, what it may take and what it takes already.

    asked_bytes: what the configuration says; None where it gives a fraction of what is free.
    """

    name: str
    folder: Path
    capacity: int | float | str
    num_bytes: int = 0
    used_bytes: int = 0
    asked_bytes: int | None = None
    writable: bool = True
    hugepages: bool = False

    def measured(self) -> Budget:
        """The same with its bytes, once the folder is there.

        What this data set holds already counts as free: a restart keeps the share it chose when there was more room.
        """
        used_bytes = measure_folder(self.folder)[0]
        room_bytes = free_bytes(self.folder, self.name) + used_bytes
        key = f"cache.tiers.{self.name}.capacity"
        wanted_bytes = parse_capacity(self.capacity, room_bytes, key)
        is_fraction = parse_capacity(self.capacity, 2 * room_bytes + 2, key) != wanted_bytes
        return replace(
            self,
            used_bytes=used_bytes,
            num_bytes=min(wanted_bytes, room_bytes),
            asked_bytes=None if is_fraction else wanted_bytes,
        )


def plan_budgets(config: CacheConfig, identity: str) -> list[Budget]:
    """The tiers that the configuration turns on, the nearest first, not yet measured.

    Raises:
        ConfigError: a capacity is no size, or the node tier is on and `cache.dir` is empty.
    """
    memory, node, budgets = config.tiers.memory, config.tiers.node, []
    if parse_capacity(memory.capacity, _ANY_DISK_BYTES, "cache.tiers.memory.capacity"):
        folder = memory_folder(config) / identity
        budgets.append(Budget(name="memory", folder=folder, capacity=memory.capacity, hugepages=memory.hugepages))
        if memory.hugepages:
            warn_without_hugepages(memory_folder(config))
    if parse_capacity(node.capacity, _ANY_DISK_BYTES, "cache.tiers.node.capacity"):
        if not config.dir:
            raise ConfigError(
                f"cache.policy={config.policy} keeps blocks on the node, and cache.dir is empty; name a folder on a "
                "local disk, or choose cache.policy=stream"
            )
        budgets.append(Budget(name="node", folder=Path(config.dir) / identity, capacity=node.capacity))
    return budgets


def check_budget(budget: Budget, *, policy: str, working_blocks: int, num_blocks: int, num_bytes: int) -> None:
    """Refuses a budget that can never work; warns of a disk that has too little room just now.

    Where blocks are evicted, those that the order has open must fit, or each is evicted and fetched again for every
    few samples. Where they are not, one block must.

    Raises:
        ConfigError: the budget was given in bytes and is too small; says what is needed.
    """
    mean_bytes = -(-num_bytes // max(num_blocks, 1))
    needs_bytes = mean_bytes * (1 if policy == "pin" else min(working_blocks, num_blocks))
    if budget.num_bytes >= min(needs_bytes, num_bytes):
        return
    holds = "one block" if policy == "pin" else f"the {working_blocks} blocks that the order has open at once"
    numbers = (
        f"cache.tiers.{budget.name}.capacity={budget.capacity!r} gives {format_bytes(budget.num_bytes)} in "
        f"{budget.folder}, and {holds} take {format_bytes(needs_bytes)}"
    )
    if budget.asked_bytes is not None and budget.asked_bytes < needs_bytes:
        raise ConfigError(
            f"{numbers} (blocks of {format_bytes(mean_bytes)}); give at least {needs_bytes} bytes, or 0 to turn the "
            "tier off" + ("" if policy == "pin" else ", or lower shuffle.window, or choose cache.policy=pin")
        )
    _log.warning("%s: there is no room for the cache, blocks are read from farther away; free space there", numbers)


def warn_without_hugepages(folder: Path) -> None:
    """Says so where a memory file system would not use huge pages."""
    while not folder.exists():
        folder = folder.parent
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    inside = [mount for mount in mounts if folder.resolve().is_relative_to(mount[1])]
    options = max(inside, key=lambda mount: len(mount[1]))[3] if inside else ""
    if "huge=always" in options or "huge=within_size" in options:
        return
    default = _HUGE_DEFAULT.read_text() if _HUGE_DEFAULT.exists() else ""
    if "[always]" in default or "[within_size]" in default or "[force]" in default:
        return
    _log.warning(
        "cache.tiers.memory.hugepages is set, and the file system at %s uses small pages: mount one with "
        "`mount -t tmpfs -o huge=within_size,size=100G tmpfs DIR` and name it in cache.tiers.memory.dir",
        folder,
    )
