"""What a benchmark runs (`bench.*`)."""

from __future__ import annotations

from dataclasses import dataclass


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
