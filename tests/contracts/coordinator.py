"""What every `Coordinator` must do; an implementation's test inherits this class and provides `make`."""

from __future__ import annotations

import numpy as np
import pytest

from dalipipe.coordination.contract import Coordinator
from dalipipe.errors import ConfigError
from dalipipe.world import World


class CoordinatorContract:
    """Inherit and override `make`."""

    def make(self, world: World) -> Coordinator:
        raise NotImplementedError

    @pytest.mark.parametrize(("world_size", "batch_size"), [(1, 1), (1, 7), (2, 64), (3, 12), (8, 256), (64, 64)])
    def test_the_slots_of_all_ranks_are_the_batch(self, world_size: int, batch_size: int) -> None:
        slots = []
        for rank in range(world_size):
            coordinator = self.make(World(rank=rank, world_size=world_size))
            mine = coordinator.slots(batch_size)
            coordinator.close()
            coordinator.close()
            assert mine.dtype == np.int64
            assert len(mine) == batch_size // world_size
            assert (np.diff(mine) > 0).all()
            slots.append(mine)
        assert sorted(np.concatenate(slots).tolist()) == list(range(batch_size))

    def test_a_batch_that_does_not_divide_is_refused_with_the_nearest_that_do(self) -> None:
        with pytest.raises(ConfigError) as caught:
            self.make(World(rank=1, world_size=6)).slots(100)
        assert "96" in str(caught.value)
        assert "102" in str(caught.value)
