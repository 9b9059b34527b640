"""The cache of a configuration and what belongs to it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING

from dalipipe.cache.config import CacheConfig
from dalipipe.shards.config import DataConfig
from dalipipe.storage.store import StorageConfig, Store
from dalipipe.telemetry import Recorder
from dalipipe.wiring.config import LoadConfig, check_job
from dalipipe.wiring.dataset import open_dataset

if TYPE_CHECKING:
    from dalipipe.cache.decoded import DecodedSamples
    from dalipipe.cache.warm import WarmReport
    from dalipipe.shards.manifest import Manifest


def open_pool(cfg: LoadConfig) -> Store | None:
    """The store of `cache.tiers.pool.url`, where there is one."""
    from dalipipe.storage.open import open_store

    return open_store(cfg.cache.tiers.pool.url, cfg.storage) if cfg.cache.tiers.pool.url else None


def warm_cache(
    data: DataConfig,
    storage: StorageConfig,
    cache: CacheConfig,
    *,
    threads: int,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> WarmReport:
    """Brings every block of a data set that the tiers of this node keep to the node; see `dalipipe.cache.warm`."""
    from dalipipe.cache.open import open_cache
    from dalipipe.cache.warm import warm

    cfg = LoadConfig(data=data, storage=storage, cache=cache)
    check_job(cfg)
    recorder = Recorder()
    store, manifest, _ = open_dataset(cfg, recorder)
    with closing(store), closing(open_cache(manifest, store, cache, recorder, pool=open_pool(cfg))) as opened:
        return warm(opened, manifest, threads=threads, progress=progress)


def open_decoded(cfg: LoadConfig, manifest: Manifest, recorder: Recorder) -> DecodedSamples | None:
    """The decoded samples in the node's memory, where `cache.tiers.memory.decoded` asks for them.

    Raises:
        ConfigError: the budget is no size.
        CacheError: their folder cannot be made.
    """
    from dalipipe.cache.decoded import DecodedSamples, wants_decoded

    return DecodedSamples(cfg.cache, manifest.identity, recorder=recorder) if wants_decoded(cfg.cache) else None
