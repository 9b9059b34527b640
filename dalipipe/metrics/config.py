"""What a benchmark runs (`bench.*`)."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from dalipipe.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    """`bench.*`."""

    epochs: int = 1
    steps: int = 0
    """Steps of each epoch that are measured; 0 = whole epochs."""
    warmup_steps: int = 2
    """Steps before the clock starts (the first batch is reported apart as `first_batch_s`)."""
    step_s: float = 0.0
    """Seconds of an emulated accelerator step after each batch (a sleep); AU is undefined and 0 without it."""
    spin_batches: int = 8
    """`spin`: batches that are held in memory and replayed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsConfig:
    """`metrics.*`: what is told about a run, and where. All of it needs a port, a textfile or a `run_dir`."""

    port: int = 0
    """Prometheus over HTTP on this port + the local rank; 0 = none."""
    host: str = "0.0.0.0"
    """The address that the port listens on."""
    textfile: str = ""
    """A file for node_exporter's textfile collector, rewritten every `every_s`; `{rank}` in it is replaced, and is
    required when there is more than one rank on the node."""
    ledger: bool = True
    """Whether steps are written to `run_dir/ledger` (parquet)."""
    every_s: float = 5.0
    """Seconds between two writes of the run folder and the textfile: what a crash loses."""
    phases: str = "marks"
    """Where the trainer's rows come from: `marks` (`with dalipipe.step("forward")`), or `profiler`: torch.profiler
    looks at a few steps in every `profile_every` and unmarked time is split by what it saw."""
    profile_every: int = 200
    nvtx: bool = True
    """Whether our stages are NVTX ranges on a GPU host, for Nsight Systems."""
    gpu: bool = True
    """Whether NVML is asked for the GPU's activity, where there is a driver."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostConfig:
    """`cost.*`: prices in one currency of your choice; 0 leaves that part out."""

    gpu_hour: float = 0.0
    """One GPU for an hour."""
    disk_gb_month: float = 0.0
    """One GB (10^9 bytes) of the node cache's disk for 30 days."""
    egress_gb: float = 0.0
    """One GB (10^9 bytes) out of the lake."""
    requests_1k: float = 0.0
    """A thousand requests to the lake."""

    def prices(self) -> dict[str, float]:
        """By name.

        Raises:
            ConfigError: one is below 0 or no number.
        """
        found: dict[str, float] = asdict(self)
        for name, price in found.items():
            if not 0 <= price < math.inf:
                raise ConfigError(f"cost.{name}={price} must be a price of at least 0, or 0 to leave that part out")
        return found
