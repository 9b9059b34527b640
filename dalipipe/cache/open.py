"""From configuration to a working cache."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dalipipe.cache.blockstore import LOCKS_NAME, BlockStore
from dalipipe.cache.budget import Budget, check_budget, plan_budgets
from dalipipe.cache.config import CacheConfig
from dalipipe.cache.contract import EvictionPolicy
from dalipipe.cache.firstread import FirstReads, first_reads_path
from dalipipe.cache.folders import PASSING_NAME, memory_folder
from dalipipe.cache.lake import BlockMap, LakeReader
from dalipipe.cache.locks import stay_alive
from dalipipe.cache.passing import PassingBlocks
from dalipipe.cache.policies import (
    LfuPolicy,
    LruPolicy,
    PinPolicy,
    StreamPolicy,
    block_hash,
    hash_ranges,
    pinned_from,
)
from dalipipe.cache.pool import Pool, PooledReader
from dalipipe.cache.readers import Readers
from dalipipe.cache.tenancy import Tenancy, sweep
from dalipipe.cache.tier import Tier
from dalipipe.cache.tiered import TieredCache
from dalipipe.cache.usage import USAGE_NAME, UsageTable
from dalipipe.errors import CacheError, ConfigError
from dalipipe.filelocks import FileLock, open_file
from dalipipe.storage.ranges import PART_BYTES
from dalipipe.telemetry import Recorder
from dalipipe.units import format_bytes, parse_bytes, parse_capacity

if TYPE_CHECKING:
    from dalipipe.storage.store import Store

POLICIES = ("auto", "pin", "lru", "lfu", "stream")
_EVICTING: dict[str, type[LruPolicy] | type[LfuPolicy]] = {"lru": LruPolicy, "lfu": LfuPolicy}
_UNWRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM)

_log = logging.getLogger(__name__)


def open_cache(
    manifest: BlockMap,
    store: Store,
    config: CacheConfig,
    recorder: Recorder,
    *,
    pool: Store | None = None,
    readers: Readers | None = None,
    open_blocks: Callable[..., BlockStore] = BlockStore,
) -> TieredCache:
    """Opens the cache of one data set, shared with all processes of the node that name the same folders.

    Args:
        store: the lake.
        pool: the store of `cache.tiers.pool.url`; owned by the cache from here on; closed if that cannot be opened.
        open_blocks: for tests.

    Raises:
        ConfigError: the policy is unknown, a tier is wanted and its folder is not named, or a budget that was given in
            bytes cannot hold what is open at once.
        CacheError: a folder cannot be made.
    """
    try:
        if config.policy not in POLICIES:
            raise ConfigError(f"cache.policy={config.policy!r} is not available; choose one of {', '.join(POLICIES)}")
        if not config.wait_s > 0:
            raise ConfigError(f"cache.wait_s={config.wait_s} must be more than 0 seconds")
        if parse_bytes(config.request_bytes, "cache.request_bytes") > PART_BYTES:
            raise ConfigError(
                f"cache.request_bytes={config.request_bytes!r} must be at most {format_bytes(PART_BYTES)} "
                f"({PART_BYTES} bytes), the largest single request; 0 reads each block alone"
            )
        return _Opening(
            manifest, store, config, recorder, pool=pool, readers=readers or Readers(), open_blocks=open_blocks
        ).open()
    except BaseException:
        if pool is not None:
            pool.close()
        raise


class _Opening:
    """The steps of `open_cache`, with what they share."""

    def __init__(
        self,
        manifest: BlockMap,
        store: Store,
        config: CacheConfig,
        recorder: Recorder,
        *,
        pool: Store | None,
        readers: Readers,
        open_blocks: Callable[..., BlockStore],
    ) -> None:
        self._manifest = manifest
        self._store = store
        self._config = config
        self._recorder = recorder
        self._pool = pool
        self._readers = readers
        self._open_blocks = open_blocks
        self._policy = config.policy
        if config.policy == "auto":
            self._policy = "lfu" if readers.uneven else "pin"
        self._leases: list[FileLock] = []
        self._tenancy: Tenancy | None = None
        self._rank = readers.keep_rank or block_hash
        self._is_read_only = False

    def open(self) -> TieredCache:
        try:
            return self._open()
        except BaseException:
            self._leave()
            raise

    def _open(self) -> TieredCache:
        budgets = self._budgets()
        tiers = self._tiers(budgets)
        about = self._about(budgets)
        _log.info("cache: %s", about)
        first = None
        if self._config.dir:
            first = FirstReads(first_reads_path(self._config.dir, self._manifest.identity))
        lake = LakeReader(self._manifest, self._store, self._recorder, first)
        sweep(self._config)
        return TieredCache(
            self._manifest,
            PooledReader(self._manifest, lake, self._open_pool(), first),
            tiers,
            wait_s=self._config.wait_s,
            recorder=self._recorder,
            about=about,
            request_bytes=parse_bytes(self._config.request_bytes, "cache.request_bytes"),
            passing=self._open_passing(tiers),
            on_close=self._leave,
        )

    def _budgets(self) -> list[Budget]:
        """The tiers of the node that are on, the nearest first."""
        if self._policy == "stream":
            return []
        budgets = plan_budgets(self._config, self._manifest.identity)
        prepared = []
        for budget in budgets:
            writable = make_folder(budget.folder)
            if not writable:
                self._is_read_only = True
                _log.warning(
                    "%s belongs to user %d and cannot be written by user %d: blocks that are there are used, others "
                    "are read from farther away every epoch; mount it writable, share it (a folder of a common group "
                    "with mode 2775, jobs with umask 002), or choose another cache.dir",
                    budget.folder,
                    _owner(budget.folder),
                    os.getuid(),
                )
            elif budget.name == "memory":
                self._tenancy = Tenancy(self._config, budget.folder.name, keep=self._config.tiers.memory.keep)
            elif (lease := stay_alive(budget.folder / LOCKS_NAME)) is not None:
                self._leases.append(lease)
            prepared.append(replace(budget, writable=writable).measured())
        for budget in prepared:
            if budget.writable:
                check_budget(
                    budget,
                    policy=self._policy,
                    working_blocks=self._readers.working_blocks,
                    num_blocks=self._manifest.num_blocks,
                    num_bytes=self._manifest.num_bytes,
                )
        return prepared

    def _tiers(self, budgets: list[Budget]) -> list[Tier]:
        tiers = []
        locks = next((budget.folder / LOCKS_NAME for budget in reversed(budgets) if budget.writable), None)
        budgets_bytes = [budget.num_bytes if budget.writable else 0 for budget in budgets]
        ranges = hash_ranges(budgets_bytes, self._share, evicts=self._policy in _EVICTING)
        for budget, (start, stop) in zip(budgets, ranges, strict=True):
            policy, usage = self._policy_of(budget, start, stop)
            tiers.append(
                Tier(
                    budget.name,
                    self._open_blocks(budget.folder, locks=locks, fallocate=budget.hugepages),
                    policy,
                    budget_bytes=budget.num_bytes,
                    used_bytes=budget.used_bytes,
                    num_blocks=self._manifest.num_blocks,
                    num_bytes=self._manifest.num_bytes,
                    recorder=self._recorder,
                    usage=usage,
                )
            )
        return tiers

    def _policy_of(self, budget: Budget, start: float, stop: float) -> tuple[EvictionPolicy, UsageTable | None]:
        if not budget.writable:
            return StreamPolicy(), None
        if self._policy in _EVICTING:
            return _EVICTING[self._policy](stop, start), UsageTable(budget.folder / USAGE_NAME)
        return PinPolicy(stop, start, self._rank), None

    def _share(self, num_bytes: int) -> float:
        return self._readers.kept_share(num_bytes, self._manifest.num_bytes, self._manifest.num_blocks)

    def _open_pool(self) -> Pool | None:
        if self._pool is None:
            return None
        total_bytes = self._manifest.num_bytes
        capacity_bytes = parse_capacity(self._config.tiers.pool.capacity, total_bytes, "cache.tiers.pool.capacity")
        start = 1 - capacity_bytes / max(total_bytes, 1)
        if self._readers.keep_rank is None:
            start = pinned_from(capacity_bytes, total_bytes, self._manifest.num_blocks)
        # From the other end of hash space than the node's tiers: as long as all together hold less than the data set,
        # no block lies in two of them.
        return Pool(self._pool, self._manifest.identity, PinPolicy(1.0, start, self._rank), self._recorder)

    def _open_passing(self, tiers: list[Tier]) -> PassingBlocks | None:
        if self._readers.local_ranks < 2:
            return None
        folder = memory_folder(self._config) / self._manifest.identity / PASSING_NAME
        try:
            if self._tenancy is None:
                self._tenancy = Tenancy(self._config, self._manifest.identity, keep=False)
            if not make_folder(folder):
                return None
        except (CacheError, OSError):
            return None
        locks = tiers[0].blocks.locks if tiers and not self._is_read_only else None
        passing = PassingBlocks(BlockStore(folder, locks=locks), self._config.wait_s, self._recorder)
        passing.sweep()
        return passing

    def _leave(self) -> None:
        for lease in self._leases:
            lease.release()
        if self._tenancy is not None:
            self._tenancy.leave()

    def _about(self, budgets: list[Budget]) -> str:
        total_bytes = self._manifest.num_bytes
        if self._policy == "stream":
            return self._with_pool("policy stream: blocks are used and dropped, every epoch reads the lake")
        if not budgets:
            return self._with_pool(
                "cache.tiers.node.capacity is 0: blocks are used and dropped, every epoch reads the lake"
            )
        why = ""
        if self._config.policy == "auto":
            why = ", chosen by auto: "
            why += (
                "some samples are read more often than others"
                if self._policy == "lfu"
                else "no policy beats it when samples are read once an epoch"
            )
        reads_bytes = int(total_bytes * self._readers.node_share)
        parts, taken_bytes, before = [], 0, 0.0
        for budget in budgets:
            taken_bytes += budget.num_bytes
            share = self._share(taken_bytes)
            parts.append(f"{share - before:.0%} in {budget.folder.parent} (budget {format_bytes(budget.num_bytes)})")
            before = share
        return self._with_pool(
            f"policy {self._policy}{why}: of {format_bytes(reads_bytes)} that this node reads, "
            f"{' and '.join(parts)} stays, the rest is read from farther away every epoch"
        )

    def _with_pool(self, about: str) -> str:
        return about if self._pool is None else f"{about}; pool {self._pool.url}"


def _owner(folder: Path) -> int:
    """The user of the folder, or of the nearest one above that is there."""
    while not folder.exists():
        folder = folder.parent
    return folder.stat().st_uid


def make_folder(folder: Path) -> bool:
    """Makes the folder of a data set and its lock file; False where there is one that cannot be written.

    Raises:
        CacheError: it cannot be made at all; says by whom and what to do.
    """
    try:
        os.close(open_file(folder / LOCKS_NAME))  # with its folder, also while jobs that end take that away
    except OSError as error:
        if error.errno in _UNWRITABLE:
            return False
        raise CacheError(
            f"the cache folder {folder} cannot be made by user {os.getuid()}: {error.strerror or error}; choose a "
            "cache.dir on a local disk that this user can write, or cache.policy=stream"
        ) from error
    return True
