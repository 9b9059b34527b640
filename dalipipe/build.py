"""The composition root: from plain configuration to wired objects. The only module that knows every room."""

from __future__ import annotations

import itertools
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dalipipe.cache.config import CacheConfig
from dalipipe.errors import ConfigError, StateError
from dalipipe.graphs.config import GraphConfig, QuarantineConfig
from dalipipe.loader.config import LoaderConfig, StateConfig
from dalipipe.loader.loader import Loader as _Loader
from dalipipe.metrics.config import CostConfig, MetricsConfig
from dalipipe.order.config import ShuffleConfig
from dalipipe.prefetch.config import PrefetchConfig
from dalipipe.shards.config import DataConfig, repeats_by_source, source_urls
from dalipipe.storage.store import StorageConfig, Store
from dalipipe.telemetry import Recorder
from dalipipe.world import World, detect_world, store_address

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dalipipe.cache.contract import Cache
    from dalipipe.cache.decoded import DecodedSamples
    from dalipipe.cache.warm import WarmReport
    from dalipipe.coordination.contract import Coordinator
    from dalipipe.graphs.contract import BatchSource
    from dalipipe.loader.publish import Published, StatePublisher
    from dalipipe.order.epoch import EpochOrder
    from dalipipe.order.repeat import Extra, Repeat
    from dalipipe.shards.manifest import Manifest


# Loaders that this process opened: every rank opens them in the same order, so the numbers agree.
_openings = itertools.count()


@dataclass(frozen=True, kw_only=True)
class LoadConfig:
    """Everything that `dalipipe.load` composes; each part is documented beside the class it configures."""

    data: DataConfig = field(default_factory=DataConfig)
    storage: StorageConfig = field(default_factory=StorageConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    shuffle: ShuffleConfig = field(default_factory=ShuffleConfig)
    prefetch: PrefetchConfig = field(default_factory=PrefetchConfig)
    graph: GraphConfig = field(default_factory=GraphConfig)
    quarantine: QuarantineConfig = field(default_factory=QuarantineConfig)
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    state: StateConfig = field(default_factory=StateConfig)
    resume: str = "none"
    """`none`, `auto` (go on from the state at `state.url`, or begin where there is none), or the URL of a state."""
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    cost: CostConfig = field(default_factory=CostConfig)
    device: str = "auto"
    """`cpu`, `cuda:N`, or `auto`: the GPU of this local rank where there is one."""
    assign: str = "static"
    """Which rank loads which slots of the global batch: `static` (by rank number), or `node` (nodes get the lanes of
    which they have most in their cache; the ranks agree once at the start, at MASTER_ADDR:MASTER_PORT)."""
    run_dir: str | None = None
    """Where the run's records go (ledger, figures, events, `quarantine.jsonl`); none are written without it."""


class Loader(_Loader):
    """A `dalipipe.loader` wired from a configuration: what `dalipipe.load` returns.

    Args:
        cfg: as composed by `dalipipe.load`, or made by hand.
        world: this process's place in the job; read from the launcher's variables by default.

    Raises:
        ConfigError: values that can never work together; names the keys and the nearest valid values.
        ManifestError: there is no data set at `data.url`, or it is torn.
        StorageError: `data.url` cannot be read.
    """

    def __init__(self, cfg: LoadConfig, *, world: World | None = None) -> None:
        from dalipipe.cache.decoded import wants_decoded
        from dalipipe.graphs.device.tier import open_device_tier
        from dalipipe.graphs.limits import check_config, check_kept

        world = world or detect_world()
        _check(cfg)
        check_config(cfg.graph, cfg.quarantine, cfg.data.fields, cfg.prefetch.queue_depth)
        device = choose_device(cfg.device, world)
        if wants_decoded(cfg.cache):
            check_kept(cfg.graph, str(device))
        recorder = Recorder()
        tier = open_device_tier(cfg.graph, str(device), cfg.cache.tiers.device.capacity, recorder)
        store, manifest, parts = open_dataset(cfg, recorder)
        _check_fields(cfg.data, parts)
        resumed = find_state(cfg)
        from dalipipe.cache.open import open_cache
        from dalipipe.cache.readers import cache_readers
        from dalipipe.order.recipe import orders
        from dalipipe.order.seating import rank_slots

        batch_size, global_batch_size = _batch_sizes(cfg.loader, world)
        rank_slots(global_batch_size, world.world_size, world.rank, cfg.loader.replicas)  # refused before anything else

        order = orders(
            manifest.shapes,
            batch_size=global_batch_size,
            shuffle=cfg.shuffle,
            last_batch=cfg.loader.last_batch,
            mix=cfg.data.mix,
            repeats=find_repeats(cfg.data, parts),
            epoch_samples=cfg.loader.epoch_samples,
        )

        readers = cache_readers(order(0).signature, manifest.shape, world, replicas=cfg.loader.replicas)
        cache = open_cache(manifest, store, cfg.cache, recorder, pool=open_pool(cfg), readers=readers)
        kept = open_decoded(cfg, manifest, recorder)
        coordinator = open_coordinator(cfg, world, order(0), manifest, cache)
        slots = coordinator.slots(global_batch_size)

        def start(epoch: int, step: int) -> BatchSource:
            from dalipipe.graphs.origin import largest_image, origin_of
            from dalipipe.graphs.source import open_source
            from dalipipe.prefetch.open import open_prefetcher

            prefetcher = open_prefetcher(
                orders=order,
                start=(epoch, step),
                slots=slots,
                manifest=manifest,
                cache=cache,
                fields=cfg.data.fields,
                config=cfg.prefetch,
                recorder=recorder,
                store=store,
                keeps=cache.keeps if cfg.cache.policy in ("auto", "pin") else None,
            )
            try:
                return open_source(
                    prefetcher,
                    graph=cfg.graph,
                    quarantine=cfg.quarantine,
                    fields=cfg.data.fields,
                    seed=cfg.shuffle.seed,
                    device=str(device),
                    queue_depth=cfg.prefetch.queue_depth,
                    num_samples=manifest.num_samples,
                    run_dir=Path(cfg.run_dir) if cfg.run_dir else None,
                    recorder=recorder,
                    local_ranks=world.local_world_size,
                    origin=partial(origin_of, manifest),
                    size_hint=largest_image(manifest) if device.type == "cuda" else None,
                    kept=kept,
                    tier=tier,
                )
            except BaseException:
                prefetcher.close()
                raise

        super().__init__(
            start=start,
            num_steps=order(0).num_steps,
            identity=manifest.identity,
            order=order(0).signature,
            batch_size=batch_size,
            device=device,
            ahead=cfg.prefetch.device_batches,
            timeout_s=cfg.prefetch.timeout_s,
            recorder=recorder,
            publisher=open_publisher(cfg, world, recorder),
            waited_on=(store,),
            owned=(cache, coordinator, *(one for one in (kept, tier) if one is not None)),
        )
        self.manifest = manifest
        self._tier = tier
        try:
            self._watch(cfg, recorder, world)
        except BaseException:
            self.close()
            raise
        if resumed is not None:
            try:
                self.load_state_dict(resumed.state)
            except BaseException:
                self.close()
                raise

    def release_device_cache(self, num_bytes: int | None = None) -> int:
        """Gives GPU memory of `cache.tiers.device` back to the model; see `DeviceTier.release`. From any thread.

        Args:
            num_bytes: at least so many; None = all.

        Returns: the bytes that were freed; 0 where there is no such tier.
        """
        return 0 if self._tier is None else self._tier.release(num_bytes)

    def _watch(self, cfg: LoadConfig, recorder: Recorder, world: World) -> None:
        from dalipipe.metrics.attach import watch

        watching = watch(
            config=cfg.metrics,
            settings=asdict(cfg),
            recorder=recorder,
            steps=self.steps,
            world=world,
            manifest=self.manifest,
            device=self.device,
            run_dir=Path(cfg.run_dir) if cfg.run_dir else None,
        )
        for item in watching:
            self.own(item)


def open_dataset(cfg: LoadConfig, recorder: Recorder) -> tuple[Store, Manifest, dict[str, Manifest]]:
    """Opens the store and the manifest that the data are read through, and the manifest of each set of a mix.

    Shard indices are kept on the node, with those of whoever reads the same set alone.
    """
    from dalipipe.shards.union import join_manifests
    from dalipipe.storage.union import UnionStore

    stores: dict[str, Store] = {}
    parts: dict[str, Manifest] = {}
    try:
        for name, url in source_urls(cfg.data).items():
            stores[name], parts[name] = _open_part(replace(cfg.data, url=url), cfg, recorder)
        if not cfg.data.mix:
            return stores[""], parts[""], parts

        def read_index(name: str) -> bytes | memoryview:
            part = max((part for part in parts if name.startswith(f"{part}/")), key=len)
            return parts[part].read_index(name[len(part) + 1 :])

        return UnionStore(stores), join_manifests(parts, read_index), parts
    except BaseException:
        for store in stores.values():
            store.close()
        raise


def _open_part(data: DataConfig, cfg: LoadConfig, recorder: Recorder) -> tuple[Store, Manifest]:
    from dalipipe.cache.indices import NodeIndices
    from dalipipe.cache.measured import MeasuredStore
    from dalipipe.shards.manifest import Manifest

    store = MeasuredStore(_open_store(data, cfg.storage, recorder), recorder)

    def read_index(name: str) -> bytes | memoryview:
        return NodeIndices(Path(cfg.cache.dir, manifest.identity, "indices"), store, recorder).read(name)

    manifest = Manifest.open(store.read, read_index)
    return store, manifest


def find_repeats(data: DataConfig, parts: Mapping[str, Manifest]) -> dict[str, list[Repeat | Extra]]:
    """What `data.repeat` names, by set, as blocks and samples.

    Raises:
        ConfigError: a name is unknown or ambiguous, or a class is to come less often than once.
    """
    from dalipipe.order.repeat import Extra, Repeat
    from dalipipe.shards.selection import select

    found: dict[str, list[Repeat | Extra]] = {}
    for part, factors in repeats_by_source(data).items():
        for name, factor in factors.items():
            chosen = select(parts[part], name)
            own = found.setdefault(part, [])
            own += [Repeat(start=start, stop=stop, factor=factor) for start, stop in chosen.blocks]
            if chosen.samples is not None:
                if factor < 1:
                    raise ConfigError(
                        f"data.repeat.{name}={factor}: a class can come more often, not less: its samples share blocks "
                        "with others; leave it out when packing, or name shards"
                    )
                own.append(Extra(ids=chosen.samples, copies=factor - 1))
    return found


def open_manifest(data: DataConfig, storage: StorageConfig) -> tuple[Store, Manifest]:
    """Opens the store of `data.url` and its manifest, as `info` and `verify` need it."""
    from dalipipe.shards.manifest import Manifest

    store = _open_store(data, storage)
    return store, Manifest.open(store.read)


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
    _check(cfg)
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


def open_coordinator(cfg: LoadConfig, world: World, order: EpochOrder, manifest: Manifest, cache: Cache) -> Coordinator:
    """Who says which slots this rank loads (`assign`).

    Raises:
        ConfigError: `assign=node` with ranks that are no whole nodes, or that have nowhere to meet.
        CoordinationError: the place where they meet does not answer.
    """
    from dalipipe.coordination.board import TcpBoard
    from dalipipe.coordination.node import NodeCoordinator, lane_nearness
    from dalipipe.coordination.static import StaticCoordinator

    lanes = order.signature.lanes
    # One node, or no lanes to be near to: there is nothing to agree on.
    if cfg.assign == "static" or not lanes or world.local_world_size == world.world_size:
        return StaticCoordinator(world, replicas=cfg.loader.replicas)
    host, port, restarts = store_address()
    board = TcpBoard(
        host,
        port,
        prefix=f"dalipipe/{restarts}/{next(_openings)}/{manifest.identity}",
        timeout_s=cfg.prefetch.timeout_s,
    )
    return NodeCoordinator(
        world,
        board,
        lambda: lane_nearness(order, lanes, manifest.block_of, cache.contains),
        replicas=cfg.loader.replicas,
    )


def find_state(cfg: LoadConfig) -> Published | None:
    """The published state that `resume` asks for; None when it asks for none, or `auto` finds none.

    Raises:
        ConfigError: `resume=auto` without a `state.url`.
        StateError: there are states and none is whole, or `resume` names a URL without one.
        StorageError: the URL cannot be read; beginning anew instead would lose the position.
    """
    from dalipipe.loader.publish import read_published
    from dalipipe.storage.open import open_store

    if cfg.resume in ("none", ""):
        return None
    url = cfg.state.url if cfg.resume == "auto" else cfg.resume
    if not url:
        raise ConfigError("resume=auto goes on from the state at state.url, which is empty; name a shared folder there")
    with closing(open_store(url, cfg.storage)) as store:
        found = read_published(store)
    if found is None and cfg.resume != "auto":
        raise StateError(f"resume={cfg.resume}: no loader state there; give the state.url of an earlier run, or 'auto'")
    return found


def open_publisher(cfg: LoadConfig, world: World, recorder: Recorder) -> StatePublisher | None:
    """What publishes the state to `state.url`: on rank 0, when there is one.

    Raises:
        ConfigError: a period that can never work.
        StorageError: the URL cannot be read or written.
    """
    from dalipipe.loader.publish import StatePublisher, next_number
    from dalipipe.storage.open import open_store

    if not cfg.state.every_s >= 0:
        raise ConfigError(f"state.every_s={cfg.state.every_s} must be at least 0 seconds")
    if not cfg.state.url or world.rank != 0:
        return None
    store = open_store(cfg.state.url, cfg.storage)
    return StatePublisher(store, every_s=cfg.state.every_s, first_number=next_number(store), recorder=recorder)


def _open_store(data: DataConfig, storage: StorageConfig, recorder: Recorder | None = None) -> Store:
    from dalipipe.shards.virtual import DatasetStore
    from dalipipe.storage.open import open_store

    if not data.url:
        raise ConfigError("data.url is required: the folder or bucket prefix that holds manifest.json")
    record = (recorder or Recorder()).add
    return DatasetStore(data.url, lambda url: open_store(url, storage, record=record))


def _check(cfg: LoadConfig) -> None:
    if cfg.assign not in ("static", "node"):
        raise ConfigError(f"assign={cfg.assign!r} is not available in this release; use assign=static or assign=node")
    if not cfg.cache.dir:
        raise ConfigError("cache.dir is required: a folder on the node's fastest disk")


def _check_fields(data: DataConfig, parts: Mapping[str, Manifest]) -> None:
    for part, manifest in parts.items():
        known = [item.name for item in manifest.fields]
        missing = [name for name in data.fields if name not in known]
        if missing:
            which = f"the data set {part!r} of the mix" if part else "the data set"
            raise ConfigError(f"data.fields: {', '.join(missing)} not in {which}, which has {', '.join(known)}")


def _batch_sizes(config: LoaderConfig, world: World) -> tuple[int, int]:
    """(per rank, whole job) from the one that is given. Ranks of one group of replicas count once."""
    local, total = config.batch_size, config.global_batch_size
    if (local is None) == (total is None):
        raise ConfigError(
            f"give exactly one of loader.batch_size={local} (per rank) and loader.global_batch_size={total} (whole job)"
        )
    # Whether the groups come out even is judged where the slots are dealt.
    num_groups = max(1, world.world_size // max(1, config.replicas))
    if local is not None:
        if local < 1:
            raise ConfigError(f"loader.batch_size={local} must be at least 1")
        return local, local * num_groups
    assert total is not None
    return total // num_groups, total


def choose_device(device: str, world: World) -> Any:
    """The torch device of this rank.

    Raises:
        ConfigError: there is no such device.
    """
    import torch

    if device == "auto" and torch.cuda.is_available():
        # Without a launcher that tells the local rank, the trainer's own choice of a device is the best that is known.
        number = world.local_rank if world.local_world_size > 1 else torch.cuda.current_device()
        device = f"cuda:{number % torch.cuda.device_count()}"
    elif device == "auto":
        device = "cpu"
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise ConfigError(f"device={device!r} is not a device; use auto, cpu or cuda:N") from None
    if chosen.type not in ("cpu", "cuda"):
        raise ConfigError(f"device={device!r}: DALI runs on cpu or cuda:N")
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={device!r} but torch sees no GPU; use device=cpu, or mend the driver")
    return torch.device("cuda", chosen.index or 0) if chosen.type == "cuda" else chosen
