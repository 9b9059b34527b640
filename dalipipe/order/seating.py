"""Which rank sits on which slots of a global batch. Seating never changes the batch, only who loads what."""

from __future__ import annotations

import numpy as np

from dalipipe.errors import ConfigError
from dalipipe.order.hashing import I64


def rank_slots(batch_size: int, world_size: int, rank: int, replicas: int = 1) -> I64:
    """The slots of `rank` when ranks sit in order of their number.

    Contiguous slots keep a lane (whose slots are contiguous too) on as few ranks as can be.

    Args:
        batch_size: B, the global batch.
        world_size: W, ranks of the job.
        rank: in [0, W).
        replicas: that many consecutive ranks (a tensor- or sequence-parallel group) see the same samples.

    Returns:
        int64 [B * replicas / W], ascending.

    Raises:
        ConfigError: the ranks do not form whole groups, or the batch does not divide by their number; names the
            nearest values that work.
    """
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank={rank} must be in [0, world_size={world_size})")
    if replicas < 1 or world_size % replicas:
        valid = [d for d in range(1, world_size + 1) if world_size % d == 0]
        nearest = " or ".join(str(d) for d in sorted(sorted(valid, key=lambda d: abs(d - replicas))[:2]))
        raise ConfigError(
            f"replicas={replicas} must divide the world of {world_size} ranks into whole groups; nearest: {nearest}"
        )
    num_groups = world_size // replicas
    if batch_size < 1 or batch_size % num_groups:
        below = max(batch_size, 0) // num_groups * num_groups
        nearest = " or ".join(str(size) for size in (below, below + num_groups) if size > 0)
        raise ConfigError(
            f"loader.global_batch_size={batch_size} must divide by the {num_groups} ranks (or groups of replicas) that "
            f"load different samples; nearest: {nearest}, or set loader.batch_size (per rank) instead"
        )
    num_slots = batch_size // num_groups
    first = rank // replicas * num_slots
    return np.arange(first, first + num_slots, dtype=np.int64)
