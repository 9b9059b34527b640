"""From configuration to a working cache."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from dalipipe.cache.blockstore import LOCKS_NAME, BlockStore
from dalipipe.cache.config import CacheConfig
from dalipipe.cache.inspect import measure_folder
from dalipipe.cache.lake import BlockMap, LakeReader
from dalipipe.cache.policies import PinPolicy, pinned_share
from dalipipe.cache.tiered import NodeTier, TieredCache
from dalipipe.errors import CacheError, ConfigError
from dalipipe.telemetry import Recorder
from dalipipe.units import format_bytes, parse_capacity

if TYPE_CHECKING:
    from dalipipe.storage.store import Store

AVAILABLE_POLICIES = ("auto", "pin", "stream")

_log = logging.getLogger(__name__)


def open_cache(
    manifest: BlockMap,
    store: Store,
    config: CacheConfig,
    recorder: Recorder,
    *,
    open_blocks: Callable[[Path], BlockStore] = BlockStore,
) -> TieredCache:
    """Opens the cache of one data set, shared with all processes of the node that name the same `cache.dir`.

    Raises:
        ConfigError: the policy is unknown, or a node tier is wanted and `cache.dir` is empty.
        CacheError: the folder cannot be made or written.
    """
    if config.policy not in AVAILABLE_POLICIES:
        raise ConfigError(
            f"cache.policy={config.policy!r} is not available; choose one of {', '.join(AVAILABLE_POLICIES)}"
        )
    lake = LakeReader(manifest, store, recorder)
    node, about = None, "policy stream: blocks are used and dropped, every epoch reads the lake"
    if config.policy != "stream":
        node, about = _open_node(manifest, config, recorder, open_blocks)
    _log.info("cache: %s", about)
    return TieredCache(manifest, lake, node, wait_s=config.wait_s, recorder=recorder, about=about)


def _open_node(
    manifest: BlockMap, config: CacheConfig, recorder: Recorder, open_blocks: Callable[[Path], BlockStore]
) -> tuple[NodeTier | None, str]:
    capacity = config.tiers.node.capacity
    total_bytes = manifest.num_bytes
    if parse_capacity(capacity, total_bytes, "cache.tiers.node.capacity") == 0:
        return None, "cache.tiers.node.capacity is 0: blocks are used and dropped, every epoch reads the lake"
    if not config.dir:
        raise ConfigError(
            f"cache.policy={config.policy} keeps blocks on the node, and cache.dir is empty; name a folder on a local "
            "disk, or choose cache.policy=stream"
        )
    folder = make_folder(Path(config.dir) / manifest.identity)
    used_bytes = measure_folder(folder)[0]
    disk = os.statvfs(folder)
    # What this data set holds already counts as free: a restart keeps the share it chose when the disk was empty.
    room_bytes = disk.f_bavail * disk.f_frsize + used_bytes
    budget_bytes = min(parse_capacity(capacity, room_bytes, "cache.tiers.node.capacity"), room_bytes)
    share = pinned_share(budget_bytes, total_bytes, manifest.num_blocks)
    node = NodeTier(
        open_blocks(folder),
        PinPolicy(share),
        budget_bytes=budget_bytes,
        used_bytes=used_bytes,
        recorder=recorder,
    )
    why = ", chosen by auto: no policy beats it when samples are read once an epoch" if config.policy == "auto" else ""
    about = (
        f"policy pin{why}: {share:.0%} of {format_bytes(total_bytes)} stays in {config.dir} "
        f"(budget {format_bytes(budget_bytes)}), the rest is read from the lake every epoch"
    )
    return node, about


def make_folder(folder: Path) -> Path:
    """Makes the folder of a data set and its lock file.

    Raises:
        CacheError: it cannot be made or written; says by whom and what to do.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        os.close(os.open(folder / LOCKS_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666))
    except OSError as error:
        raise CacheError(
            f"the cache folder {folder} cannot be written by user {os.getuid()}: {error.strerror or error}; choose a "
            "cache.dir on a local disk that this user can write, or cache.policy=stream"
        ) from error
    return folder
