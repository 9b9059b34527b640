"""All parts of one rank's loader, opened together and closed together where one of them cannot be opened."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dalipipe.telemetry import Recorder
from dalipipe.wiring.config import LoadConfig, check_job
from dalipipe.wiring.dataset import check_fields, find_repeats, open_dataset
from dalipipe.wiring.position import find_state, open_publisher
from dalipipe.wiring.ranks import batch_sizes, choose_device, open_coordinator
from dalipipe.wiring.tiers import open_decoded, open_pool
from dalipipe.world import World

if TYPE_CHECKING:
    from dalipipe.cache.decoded import DecodedSamples
    from dalipipe.cache.tiered import TieredCache
    from dalipipe.coordination.contract import Coordinator
    from dalipipe.graphs.contract import BatchSource
    from dalipipe.graphs.device.tier import DeviceTier
    from dalipipe.loader.publish import Published, StatePublisher
    from dalipipe.order.epoch import EpochOrder
    from dalipipe.prefetch.config import PrefetchConfig
    from dalipipe.shards.manifest import Manifest
    from dalipipe.storage.store import Store


@dataclass(frozen=True, kw_only=True)
class LoaderParts:
    """What a loader is made of; it closes them."""

    cfg: LoadConfig
    world: World
    device: Any
    recorder: Recorder
    store: Store
    manifest: Manifest
    order: Callable[[int], EpochOrder]
    batch_size: int
    slots: npt.NDArray[np.int64]
    """int64 [b]: the columns of the global batch that this rank loads."""
    cache: TieredCache
    coordinator: Coordinator
    kept: DecodedSamples | None
    tier: DeviceTier | None
    publisher: StatePublisher | None
    resumed: Published | None

    @property
    def owned(self) -> tuple[Any, ...]:
        """What is closed with the loader, last first; the store and the publisher come before them."""
        return (self.cache, self.coordinator, *(one for one in (self.kept, self.tier) if one is not None))


def open_parts(cfg: LoadConfig, world: World) -> LoaderParts:
    """Opens what the configuration asks for. Raises as `Loader` says; nothing stays open then."""
    from dalipipe.cache.decoded import wants_decoded
    from dalipipe.cache.open import open_cache
    from dalipipe.cache.readers import cache_readers
    from dalipipe.graphs.device.tier import open_device_tier
    from dalipipe.graphs.limits import check_config, check_kept
    from dalipipe.order.recipe import orders
    from dalipipe.order.seating import rank_slots

    check_job(cfg)
    check_config(cfg.graph, cfg.quarantine, cfg.data.fields, cfg.prefetch.queue_depth)
    device = choose_device(cfg.device, world)
    if wants_decoded(cfg.cache):
        check_kept(cfg.graph, str(device))
    recorder = Recorder()
    with ExitStack() as opened:
        tier = open_device_tier(cfg.graph, str(device), cfg.cache.tiers.device.capacity, recorder)
        if tier is not None:
            opened.callback(tier.close)
        store, manifest, sets = open_dataset(cfg, recorder)
        opened.callback(store.close)
        check_fields(cfg.data, sets)
        resumed = find_state(cfg)
        batch_size, global_batch_size = batch_sizes(cfg.loader, world)
        rank_slots(global_batch_size, world.world_size, world.rank, cfg.loader.replicas)  # refused before anything else
        order = orders(
            manifest.shapes,
            batch_size=global_batch_size,
            shuffle=cfg.shuffle,
            last_batch=cfg.loader.last_batch,
            mix=cfg.data.mix,
            repeats=find_repeats(cfg.data, sets),
            epoch_samples=cfg.loader.epoch_samples,
        )
        readers = cache_readers(order(0).signature, manifest.shape, world, replicas=cfg.loader.replicas)
        cache = open_cache(manifest, store, cfg.cache, recorder, pool=open_pool(cfg), readers=readers)
        opened.callback(cache.close)
        kept = open_decoded(cfg, manifest, recorder)
        if kept is not None:
            opened.callback(kept.close)
        coordinator = open_coordinator(cfg, world, order(0), manifest, cache)
        opened.callback(coordinator.close)
        parts = LoaderParts(
            cfg=cfg,
            world=world,
            device=device,
            recorder=recorder,
            store=store,
            manifest=manifest,
            order=order,
            batch_size=batch_size,
            slots=coordinator.slots(global_batch_size),
            cache=cache,
            coordinator=coordinator,
            kept=kept,
            tier=tier,
            publisher=open_publisher(cfg, world, recorder),
            resumed=resumed,
        )
        opened.pop_all()  # the loader closes them from here on
    return parts


def _prefetch_config(cfg: LoadConfig) -> PrefetchConfig:
    """`prefetch.*`; with a pool a run starts from whole blocks, unless a number says otherwise: samples that are read
    alone would leave the lake a second time, and where the pool has their block they need not leave it at all."""
    if cfg.cache.tiers.pool.url and cfg.prefetch.cold_steps == "auto":
        return replace(cfg.prefetch, cold_steps=0)
    return cfg.prefetch


def start_source(parts: LoaderParts, epoch: int, step: int) -> BatchSource:
    """The endless source of this rank's batches from (epoch, step) on."""
    from dalipipe.graphs.origin import largest_image, origin_of
    from dalipipe.graphs.source import open_source
    from dalipipe.prefetch.open import open_prefetcher

    cfg, manifest, recorder = parts.cfg, parts.manifest, parts.recorder
    prefetcher = open_prefetcher(
        orders=parts.order,
        start=(epoch, step),
        slots=parts.slots,
        manifest=manifest,
        cache=parts.cache,
        fields=cfg.data.fields,
        config=_prefetch_config(cfg),
        recorder=recorder,
        store=parts.store,
        keeps=None if cfg.cache.policy == "stream" else parts.cache.keeps,
    )
    try:
        return open_source(
            prefetcher,
            graph=cfg.graph,
            quarantine=cfg.quarantine,
            fields=cfg.data.fields,
            seed=cfg.shuffle.seed,
            device=str(parts.device),
            queue_depth=cfg.prefetch.queue_depth,
            num_samples=manifest.num_samples,
            run_dir=Path(cfg.run_dir) if cfg.run_dir else None,
            recorder=recorder,
            local_ranks=parts.world.local_world_size,
            origin=partial(origin_of, manifest),
            size_hint=largest_image(manifest) if parts.device.type == "cuda" else None,
            kept=parts.kept,
            tier=parts.tier,
        )
    except BaseException:
        prefetcher.close()
        raise
