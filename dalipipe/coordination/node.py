"""Seating by what the nodes hold: a node that comes back, whatever its ranks are now, loads the lanes it has cached."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from dalipipe.coordination.board import Board
from dalipipe.errors import ConfigError
from dalipipe.order.contract import Ids, Order
from dalipipe.order.seating import rank_slots, seats_by_nearness, slots_of_seat
from dalipipe.world import World

_SAMPLED_STEPS = 64
_WORD = np.dtype("<i4")


def lane_nearness(
    order: Order, num_lanes: int, block_of: Callable[[Ids], Ids], is_near: Callable[[int], bool]
) -> npt.NDArray[np.int64]:
    """int64 [L]: of 64 blocks of each lane, spread over the epoch, how many are near. Costs 64 L look-ups."""
    steps = np.unique(np.linspace(0, order.num_steps - 1, min(_SAMPLED_STEPS, order.num_steps)).astype(np.int64))
    slots = np.arange(num_lanes, dtype=np.int64) * (order.batch_size // num_lanes)
    found = np.zeros(num_lanes, dtype=np.int64)
    for step in steps.tolist():
        ids = order.ids(step, 1, slots)[0]
        found += [sample >= 0 and is_near(block) for sample, block in zip(ids, block_of(ids).tolist(), strict=True)]
    return found


class NodeCoordinator:
    """Gives each node the lanes of which it holds most; see `seats_by_nearness`.

    The first rank of each node posts what is near, rank 0 seats all and posts the plan: one value a node and one for
    all, so that traffic grows with the number of ranks and not with its square. Agreed once, at the start.

    Args:
        world: this process's place; ranks are numbered node by node, as many on each.
        board: where the ranks post and read.
        nearness: int64 [L], how much of each lane this node holds; asked on the first rank of each node.
        replicas: that many consecutive ranks load the same samples.
    """

    def __init__(
        self, world: World, board: Board, nearness: Callable[[], npt.NDArray[np.int64]], *, replicas: int = 1
    ) -> None:
        if world.world_size % world.local_world_size or world.local_world_size % max(replicas, 1):
            raise ConfigError(
                f"assign=node seats whole nodes: {world.world_size} ranks must be nodes of {world.local_world_size}, "
                f"each of whole groups of loader.replicas={replicas}; use assign=static"
            )
        self._world = world
        self._board = board
        self._nearness = nearness
        self._replicas = replicas

    def slots(self, batch_size: int) -> npt.NDArray[np.int64]:
        """int64 [batch_size * replicas / world_size], ascending; see `Coordinator.slots`.

        Raises:
            ConfigError: as `Coordinator.slots`.
            CoordinationError: a rank did not post in time.
        """
        world, per_node = self._world, self._world.local_world_size
        rank_slots(batch_size, world.world_size, world.rank, self._replicas)  # the same batches are refused as anywhere
        num_nodes = world.world_size // per_node
        if world.rank % per_node == 0:
            self._board.post(f"near/{world.rank // per_node}", self._nearness().astype(_WORD).tobytes())
        if world.rank == 0:
            near = np.stack([np.frombuffer(self._board.read(f"near/{node}"), _WORD) for node in range(num_nodes)])
            seats = seats_by_nearness(near.astype(np.int64), batch_size, per_node, self._replicas)
            self._board.post("seats", seats.astype(_WORD).tobytes())
        agreed = np.frombuffer(self._board.read("seats"), _WORD).astype(np.int64)
        return slots_of_seat(agreed, world.rank, per_node, self._replicas)

    def close(self) -> None:
        """Leaves the board. Idempotent."""
        self._board.close()
