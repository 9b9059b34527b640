"""Caches of several tiers over one small data set."""

from __future__ import annotations

from pathlib import Path

from dalipipe.cache.config import CacheConfig, MemoryConfig, PoolConfig, TierConfig, TiersConfig
from dalipipe.cache.open import open_cache
from dalipipe.cache.readers import Readers
from dalipipe.cache.tiered import TieredCache
from dalipipe.shards.manifest import Manifest
from dalipipe.storage.local import LocalStore
from dalipipe.storage.store import StorageConfig
from dalipipe.telemetry import Recorder
from tests.support.lake import MemoryLake, image_set

NUM_SAMPLES = 800
ALONE = Readers()


def configure(
    root: Path,
    *,
    policy: str = "auto",
    node: int | float | str = 0,
    memory: int | float | str = 0,
    pool: int | float | str = 0,
    keep: bool = False,
) -> CacheConfig:
    return CacheConfig(
        dir=str(root / "node"),
        policy=policy,
        tiers=TiersConfig(
            node=TierConfig(capacity=node),
            memory=MemoryConfig(capacity=memory, dir=str(root / "memory"), keep=keep),
            pool=PoolConfig(url=str(root / "pool") if pool else "", capacity=pool),
        ),
    )


def open_tiers(
    manifest: Manifest, lake: MemoryLake, config: CacheConfig, *, readers: Readers = ALONE, **options: object
) -> tuple[TieredCache, Recorder]:
    recorder = Recorder()
    url = config.tiers.pool.url
    pool = LocalStore(url, StorageConfig()) if url else None
    return open_cache(manifest, lake, config, recorder, pool=pool, readers=readers, **options), recorder  # type: ignore[arg-type]


def scan(cache: TieredCache, manifest: Manifest, blocks: list[int] | None = None) -> list[str]:
    tiers = []
    folder = image_set(NUM_SAMPLES, num_bytes=60)
    for block in range(manifest.num_blocks) if blocks is None else blocks:
        with cache.get(block) as view:
            assert bytes(view.memory) == folder.block(manifest, block)
            tiers.append(view.tier)
    return tiers
