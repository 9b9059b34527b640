"""The dataclass behind each primary config."""

from __future__ import annotations

from dataclasses import dataclass, field

from dalipipe.build import LoadConfig
from dalipipe.cache.config import CacheConfig
from dalipipe.engines.config import RayConfig
from dalipipe.loader.config import LoaderConfig
from dalipipe.metrics.config import BenchConfig, CostConfig
from dalipipe.order.config import ShuffleConfig
from dalipipe.packing.config import IndexConfig, PackConfig, PreviewConfig
from dalipipe.prefetch.config import PrefetchConfig
from dalipipe.shards.config import DataConfig
from dalipipe.simulate.config import PlanConfig
from dalipipe.storage.store import StorageConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PackJob:
    """`dalipipe pack`."""

    source: str = ""
    target: str = ""
    engine: str = "local"
    """`local` (processes of this machine) or `ray`."""
    pack: PackConfig = field(default_factory=PackConfig)
    ray: RayConfig = field(default_factory=RayConfig)
    storage: StorageConfig = field(default_factory=StorageConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectJob:
    """`dalipipe info` and `dalipipe verify`."""

    data: DataConfig = field(default_factory=DataConfig)
    storage: StorageConfig = field(default_factory=StorageConfig)
    decode: str = "sample"
    """`verify`: which images are decoded: `none`, `sample` (the first of up to 8 blocks of every shard) or `all`."""
    checksums: str = "none"
    """`verify`: add checksums that the manifest does not know: `all` (of what is read and found whole), `kept` (of what
    this node read first, by its cache; nothing is read or checked) or `none`. It stays the same data set."""
    repair: bool = False
    """`verify`: make damaged indices again, fetch damaged shards from `repair_from`, leave out what cannot be mended,
    and add checksums as `checksums=all` does."""
    repair_from: str = ""
    """`verify`: the URL of a whole copy of the data set."""
    workers: int = 0
    """`verify`: shards checked at once; 0 = one per CPU, 1 = in this process."""
    cache: CacheConfig = field(default_factory=CacheConfig)
    """`verify`: `cache.dir` is where this node keeps the checksums of what it read first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexJob:
    """`dalipipe index`."""

    source: str = ""
    """The folder or bucket prefix that holds the tars."""
    target: str = ""
    """Where the manifest goes; empty: beside the tars."""
    index: IndexConfig = field(default_factory=IndexConfig)
    storage: StorageConfig = field(default_factory=StorageConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeJob:
    """`dalipipe merge`."""

    sources: list[str] = field(default_factory=list)
    """The data sets, in order."""
    target: str = ""
    """Where the manifest over all of them goes; their shards stay where they are."""
    checksums: bool = False
    """Read every shard once for the checksums of blocks that are cut anew."""
    overwrite: bool = False
    storage: StorageConfig = field(default_factory=StorageConfig)


@dataclass(frozen=True, kw_only=True)
class PreviewJob(LoadConfig):
    """`dalipipe preview`: the keys of `train`, and `preview.*`."""

    preview: PreviewConfig = field(default_factory=PreviewConfig)


@dataclass(frozen=True, kw_only=True)
class BenchJob(LoadConfig):
    """`dalipipe bench` and `dalipipe spin`: the keys of `train`, and `bench.*`."""

    bench: BenchConfig = field(default_factory=BenchConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheJob:
    """`dalipipe cache`."""

    action: str = "stat"
    """`stat`, `warm` (bring all that this node keeps of the data set at `data.url`), `verify` or `clear`."""
    cache: CacheConfig = field(default_factory=CacheConfig)
    data: DataConfig = field(default_factory=DataConfig)
    """`warm`: which data set."""
    storage: StorageConfig = field(default_factory=StorageConfig)
    threads: int = 8
    """`warm`: fetches at once."""
    drop: bool = False
    """`verify`: drop corrupt blocks, so that they are fetched again."""
    force: bool = False
    """`clear`: drop blocks of data sets that a running job uses, too."""
    first_reads: bool = False
    """`clear`: also forget the checksums of what was read first (where manifests know none), as when tars were replaced
    on purpose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoJob:
    """`dalipipe demo`."""

    dir: str = ".dalipipe-demo"
    """Where the lake, the shards and the cache of the demo lie; made anew where they do not fit."""
    photos: str = ""
    """A folder of photographs to crop the lake from; empty: those of the scikit-image package."""
    images: int = 768
    size: int = 96
    """Height and width of what the net sees, in pixels."""
    batch_size: int = 32
    epochs: int = 2
    seed: int = 0
    device: str = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorJob:
    """`dalipipe doctor`."""

    run: str = ""
    """A run folder, metrics ports (`HOST:PORT`, `HOST:PORT-PORT`, comma-separated), or `env` (also when empty)."""
    seconds: float = 5.0
    """How long a live job is watched."""
    torch: bool = True
    """`env`: ask torch about the GPU (its import takes seconds)."""
    cost: CostConfig = field(default_factory=CostConfig)
    data: DataConfig = field(default_factory=DataConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    storage: StorageConfig = field(default_factory=StorageConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopJob:
    """`dalipipe top`."""

    run: str = ""
    """A run folder, or metrics ports (`HOST:PORT`, `HOST:PORT-PORT`, comma-separated)."""
    every_s: float = 2.0
    """Seconds between two looks."""
    times: int = 0
    """How often to look; 0 = until Ctrl-C."""
    svg: str = ""
    """A file that gets the last view as an SVG picture."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportJob:
    """`dalipipe report`."""

    run: str = ""
    """A run folder."""
    out: str = ""
    """The HTML file; by default `report.html` in the run folder."""
    cost: CostConfig = field(default_factory=CostConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class InfoJob:
    """`dalipipe info`."""

    data: DataConfig = field(default_factory=DataConfig)
    storage: StorageConfig = field(default_factory=StorageConfig)
    nodes: int = 0
    """Also which shards two nodes read when so many nodes each own an equal run of samples; 0 = not."""
    quality: bool = False
    """Also how well the set will mix under `shuffle` and `loader`: collision ratio, design effect, recurrence, rho."""
    shuffle: ShuffleConfig = field(default_factory=ShuffleConfig)
    loader: LoaderConfig = field(default_factory=LoaderConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanJob:
    """`dalipipe plan`: the keys of `train` that decide what is read and when, and `plan.*`."""

    plan: PlanConfig = field(default_factory=PlanConfig)
    data: DataConfig = field(default_factory=DataConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    shuffle: ShuffleConfig = field(default_factory=ShuffleConfig)
    prefetch: PrefetchConfig = field(default_factory=PrefetchConfig)
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    storage: StorageConfig = field(default_factory=StorageConfig)
    cost: CostConfig = field(default_factory=CostConfig)


JOBS: dict[str, type] = {
    "train": LoadConfig,
    "eval": LoadConfig,
    "multimodal": LoadConfig,
    "pack": PackJob,
    "index": IndexJob,
    "merge": MergeJob,
    "preview": PreviewJob,
    "info": InfoJob,
    "verify": InspectJob,
    "bench": BenchJob,
    "spin": BenchJob,
    "cache": CacheJob,
    "demo": DemoJob,
    "doctor": DoctorJob,
    "top": TopJob,
    "report": ReportJob,
    "plan": PlanJob,
}
