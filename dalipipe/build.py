"""The composition root: from plain configuration to wired objects. The only module that knows every room."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dalipipe.cache.config import CacheConfig
from dalipipe.errors import ConfigError
from dalipipe.graphs.config import GraphConfig, QuarantineConfig
from dalipipe.loader.config import LoaderConfig
from dalipipe.loader.loader import Loader as _Loader
from dalipipe.metrics.config import CostConfig, MetricsConfig
from dalipipe.order.config import ShuffleConfig
from dalipipe.prefetch.config import PrefetchConfig
from dalipipe.shards.config import DataConfig
from dalipipe.storage.store import StorageConfig, Store
from dalipipe.telemetry import Recorder
from dalipipe.world import World, detect_world

if TYPE_CHECKING:
    from dalipipe.graphs.contract import BatchSource
    from dalipipe.order.epoch import EpochOrder
    from dalipipe.shards.manifest import Manifest


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
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    cost: CostConfig = field(default_factory=CostConfig)
    device: str = "auto"
    """`cpu`, `cuda:N`, or `auto`: the GPU of this local rank where there is one."""
    assign: str = "static"
    """Which rank loads which slots of the global batch: `static` (by rank number)."""
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
        from dalipipe.graphs.limits import check_config

        world = world or detect_world()
        _check(cfg)
        check_config(cfg.graph, cfg.quarantine, cfg.data.fields, cfg.prefetch.queue_depth)
        device = _device(cfg.device, world)
        recorder = Recorder()
        store, manifest = open_dataset(cfg, recorder)
        _check_fields(cfg.data, manifest)
        from dalipipe.cache.open import open_cache
        from dalipipe.coordination.static import StaticCoordinator

        cache = open_cache(manifest, store, cfg.cache, recorder)
        coordinator = StaticCoordinator(world)
        batch_size, global_batch_size = _batch_sizes(cfg.loader, world)
        slots = coordinator.slots(global_batch_size)

        @lru_cache(maxsize=4)
        def order(epoch: int) -> EpochOrder:
            from dalipipe.order.epoch import epoch_order

            return epoch_order(
                manifest.shape,
                epoch=epoch,
                batch_size=global_batch_size,
                shuffle=cfg.shuffle,
                last_batch=cfg.loader.last_batch,
            )

        def start(epoch: int, step: int) -> BatchSource:
            from dalipipe.graphs.source import open_source
            from dalipipe.prefetch.window import open_prefetcher

            prefetcher = open_prefetcher(
                orders=order,
                start=(epoch, step),
                slots=slots,
                manifest=manifest,
                cache=cache,
                fields=cfg.data.fields,
                config=cfg.prefetch,
                recorder=recorder,
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
            owned=(store, cache, coordinator),
        )
        self.manifest = manifest
        try:
            self._watch(cfg, recorder, world)
        except BaseException:
            self.close()
            raise

    def _watch(self, cfg: LoadConfig, recorder: Recorder, world: World) -> None:
        from dalipipe.metrics.attach import watch

        observer = watch(
            config=cfg.metrics,
            settings=asdict(cfg),
            recorder=recorder,
            steps=self.steps,
            world=world,
            manifest=self.manifest,
            device=self.device,
            run_dir=Path(cfg.run_dir) if cfg.run_dir else None,
        )
        if observer is not None:
            self.own(observer)


def open_dataset(cfg: LoadConfig, recorder: Recorder) -> tuple[Store, Manifest]:
    """Opens the store of `data.url` and its manifest, with shard indices kept on the node."""
    from dalipipe.cache.indices import NodeIndices
    from dalipipe.cache.measured import MeasuredStore
    from dalipipe.shards.manifest import Manifest

    store = MeasuredStore(_open_store(cfg.data, cfg.storage, recorder), recorder)

    def read_index(name: str) -> bytes | memoryview:
        return NodeIndices(Path(cfg.cache.dir, manifest.identity, "indices"), store, recorder).read(name)

    manifest = Manifest.open(store.read, read_index)
    return store, manifest


def open_manifest(data: DataConfig, storage: StorageConfig) -> tuple[Store, Manifest]:
    """Opens the store of `data.url` and its manifest, as `info` and `verify` need it."""
    from dalipipe.shards.manifest import Manifest

    store = _open_store(data, storage)
    return store, Manifest.open(store.read)


def _open_store(data: DataConfig, storage: StorageConfig, recorder: Recorder | None = None) -> Store:
    from dalipipe.storage.open import open_store

    if not data.url:
        raise ConfigError("data.url is required: the folder or bucket prefix that holds manifest.json")
    return open_store(data.url, storage, record=(recorder or Recorder()).add)


def _check(cfg: LoadConfig) -> None:
    if cfg.assign != "static":
        raise ConfigError(f"assign={cfg.assign!r} is not available in this release; use assign=static")
    if not cfg.cache.dir:
        raise ConfigError("cache.dir is required: a folder on the node's fastest disk")


def _check_fields(data: DataConfig, manifest: Manifest) -> None:
    known = [item.name for item in manifest.fields]
    missing = [name for name in data.fields if name not in known]
    if missing:
        raise ConfigError(f"data.fields: {', '.join(missing)} not in the data set, which has {', '.join(known)}")


def _batch_sizes(config: LoaderConfig, world: World) -> tuple[int, int]:
    """(per rank, whole job) from the one that is given."""
    local, total = config.batch_size, config.global_batch_size
    if (local is None) == (total is None):
        raise ConfigError(
            f"give exactly one of loader.batch_size={local} (per rank) and loader.global_batch_size={total} (whole job)"
        )
    if local is not None:
        if local < 1:
            raise ConfigError(f"loader.batch_size={local} must be at least 1")
        return local, local * world.world_size
    assert total is not None
    return total // world.world_size, total


def _device(device: str, world: World) -> Any:
    """The torch device of this rank."""
    import torch

    if device == "auto":
        device = f"cuda:{world.local_rank % torch.cuda.device_count()}" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise ConfigError(f"device={device!r} is not a device; use auto, cpu or cuda:N") from None
    if chosen.type not in ("cpu", "cuda"):
        raise ConfigError(f"device={device!r}: DALI runs on cpu or cuda:N")
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={device!r} but torch sees no GPU; use device=cpu, or mend the driver")
    return torch.device("cuda", chosen.index or 0) if chosen.type == "cuda" else chosen
