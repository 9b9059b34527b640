"""Batches and where their state is kept (`loader.*`, `state.*`)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderConfig:
    """`loader.*`: exactly one of the two batch sizes is given."""

    batch_size: int | None = None
    """Samples a step per rank."""
    global_batch_size: int | None = None
    """Samples a step in the whole job."""
    last_batch: str = "drop"
    """The samples that do not fill a step: `drop`, `partial` (a shorter last batch) or `pad` (repeats real samples
    and adds `valid`, bool [b])."""
    epoch_samples: int | None = None
    """Samples of an epoch in the whole job, rounded down to whole steps: the data then run on without end, and the next
    epoch goes on where this one stopped. None: an epoch is the data set (with `data.mix`: all sets together)."""
    replicas: int = 1
    """That many consecutive ranks (a tensor- or sequence-parallel group) get the same batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateConfig:
    """`state.*`: the loader's position on shared storage."""

    url: str = ""
    """A folder or bucket prefix, one for each job, where rank 0 publishes the loader's state; empty: nowhere."""
    every_s: float = 60.0
    """Seconds between publications; 0: as often as the store takes them."""
