"""What `dalipipe plan` is asked (`plan.*`)."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, fields
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True, init=False)
class PlanConfig:
    """`plan.*`. What a run folder tells (`plan.from`) need not be said again; what is said goes before it."""

    gpus: Any = None
    """GPUs of the job, a rank each: a number, or a list such as [8,64,512] for a table; null: those of one node."""
    gpus_per_node: int = 8
    gpu_read_rate: int | float | str | None = None
    """What one GPU consumes while it never waits: bytes a second (`1.5GB`, or a number), or samples a second
    (`"2500 samples"`). Gives the step time; give this or `step_s`."""
    step_s: float | None = None
    """Seconds of one training step on `loader.batch_size` samples, waiting for data left out."""
    decode_s: float | None = None
    """Seconds in which a rank decodes one batch, while the step before trains; null: 0, or what the run took."""
    cover_s: float = 180.0
    """How long a node's cache is to feed its GPUs: node cache = GPUs of the node x read rate x this."""
    epochs: int = 0
    """How often the data are read; 1: once, so that nothing is worth keeping. 0 = many times."""
    samples: int = 0
    """Samples of a data set that is not packed yet; 0: `data.url` (or the run) tells."""
    sample_bytes: int | float | str = 0
    """Mean bytes of a sample that is not packed yet."""
    block_bytes: int | float | str = "auto"
    """As `pack.block_bytes`, for a data set that is not packed yet."""
    shard_bytes: int | float | str = "512MiB"
    """As `pack.shard_bytes`, for a data set that is not packed yet."""
    latency_s: float | None = None
    """Median seconds until a request to the lake is answered, its transfer left out; null: 0.05, or as in the run."""
    latency_p99_s: float | None = None
    """The latency that one request in a hundred exceeds, retries and hedges included; null: 6 times the median."""
    lake_bandwidth: int | float | str | None = None
    """Bytes a second that the lake gives to all nodes together; null: no limit. (`storage.bandwidth` limits a node.)"""
    disk_bandwidth: int | float | str | None = "4GB"
    """Bytes a second that a node reads from its own cache; null: no limit."""
    disk_bytes: int | float | str = 0
    """A node's disk, of which `cache.tiers.node.capacity` may be a fraction; 0: the cache is what `cover_s` asks."""
    nodes: int = 0
    """`cross_node_reads`: nodes that own whole shards or runs of samples; 0: those of the job."""
    steps: int = 0
    """Steps that are simulated at each place of an epoch; 0 = as many as take a few seconds."""

    # The run folder. A word of Python's own cannot be written as a field, only be one.
    __annotations__["from"] = str
    vars()["from"] = field(default="", repr=False, compare=False)

    def __init__(self, **values: Any) -> None:
        known = {item.name: item for item in fields(self)}
        for name in values.keys() - known.keys():
            raise TypeError(f"PlanConfig has no field {name!r}")
        for name, item in known.items():
            assert item.default is not MISSING
            object.__setattr__(self, name, values.get(name, item.default))

    @property
    def run(self) -> str:
        """`plan.from`: the folder of a run to calibrate from; empty: none."""
        return str(getattr(self, "from"))
