from __future__ import annotations

from dalipipe.coordination.static import StaticCoordinator
from dalipipe.world import World
from tests.contracts.coordinator import CoordinatorContract


class TestStatic(CoordinatorContract):
    def make(self, world: World) -> StaticCoordinator:
        return StaticCoordinator(world)

    def test_slots_are_contiguous_by_rank_number(self) -> None:
        assert StaticCoordinator(World(rank=2, world_size=4)).slots(12).tolist() == [6, 7, 8]

    def test_replicas_see_the_same_samples(self) -> None:
        slots = [StaticCoordinator(World(rank=r, world_size=4), replicas=2).slots(8).tolist() for r in range(4)]
        assert slots == [[0, 1, 2, 3], [0, 1, 2, 3], [4, 5, 6, 7], [4, 5, 6, 7]]
