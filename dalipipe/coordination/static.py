"""Seating by rank number: no messages, no agreement needed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dalipipe.order.seating import rank_slots
from dalipipe.world import World


class StaticCoordinator:
    """Gives every rank a contiguous run of slots in order of rank numbers.

    Args:
        world: this process's place in the job.
        replicas: that many consecutive ranks load the same samples (a tensor-parallel group).
    """

    def __init__(self, world: World, *, replicas: int = 1) -> None:
        self._world = world
        self._replicas = replicas

    def slots(self, batch_size: int) -> npt.NDArray[np.int64]:
        """int64 [batch_size * replicas / world_size], ascending; see `Coordinator.slots`. Raises ConfigError."""
        return rank_slots(batch_size, self._world.world_size, self._world.rank, self._replicas)

    def close(self) -> None:
        """Holds nothing; there for the contract. Idempotent."""
