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
