"""What a loader is wired from."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from dalipipe.cache.config import CacheConfig
from dalipipe.errors import ConfigError
from dalipipe.graphs.config import GraphConfig, QuarantineConfig
from dalipipe.loader.config import LoaderConfig, StateConfig
from dalipipe.masking import masked
from dalipipe.metrics.config import CostConfig, MetricsConfig
from dalipipe.order.config import ShuffleConfig
from dalipipe.prefetch.config import PrefetchConfig
from dalipipe.shards.config import DataConfig
from dalipipe.storage.store import StorageConfig


@dataclass(frozen=True, kw_only=True, repr=False)
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

    def __repr__(self) -> str:
        shown = (f"{part.name}={getattr(self, part.name)!r}" for part in fields(self))
        return masked(f"LoadConfig({', '.join(shown)})")


def check_job(cfg: LoadConfig) -> None:
    """Refuses what no part of the job could judge alone.

    Raises:
        ConfigError: names the key and the valid values.
    """
    if cfg.assign not in ("static", "node"):
        raise ConfigError(f"assign={cfg.assign!r} is not available in this release; use assign=static or assign=node")
    if not cfg.cache.dir:
        raise ConfigError("cache.dir is required: a folder on the node's fastest disk")
    cfg.cost.prices()
