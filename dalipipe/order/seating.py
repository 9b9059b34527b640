"""Which rank sits on which slots of a global batch. Seating never changes the batch, only who loads what."""

from __future__ import annotations

import math

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


def seats_by_nearness(near: I64, batch_size: int, ranks_per_node: int, replicas: int = 1) -> I64:
    """Which node loads which slot when lanes go to the nodes that hold most of them.

    Greedy: pairs of node and lane in order of what is near, most first (ties by lane, then by node), and each node
    takes of the lane what is free of both. Where nothing is near, that is `rank_slots`.

    Args:
        near: int64 [nodes, L], how much of each lane each node holds, in any unit.
        batch_size: B; L and the groups of replicas divide it.
        ranks_per_node: the same on all nodes, whole groups of replicas.
        replicas: consecutive ranks that see the same samples.

    Returns:
        int64 [B], the node of each slot; every node has as many slots.
    """
    num_nodes, num_lanes = near.shape
    node_slots = batch_size // num_nodes
    # The largest run of slots that lies in one lane and can be one rank's.
    unit = math.gcd(batch_size // num_lanes, node_slots * replicas // ranks_per_node)
    free_lane = np.full(num_lanes, batch_size // num_lanes // unit)
    free_node = np.full(num_nodes, node_slots // unit)
    seats = np.full((num_lanes, batch_size // num_lanes // unit), -1, dtype=np.int64)
    lanes, nodes = np.divmod(np.arange(num_lanes * num_nodes), num_nodes)
    for pair in np.argsort(-near[nodes, lanes], kind="stable"):
        lane, node = lanes[pair], nodes[pair]
        taken = min(free_lane[lane], free_node[node])
        first = seats.shape[1] - free_lane[lane]
        seats[lane, first : first + taken] = node
        free_lane[lane] -= taken
        free_node[node] -= taken
    return seats.reshape(-1).repeat(unit)


def slots_of_seat(seats: I64, rank: int, ranks_per_node: int, replicas: int = 1) -> I64:
    """int64 [b], ascending: the slots of `rank` among those of its node (`seats` as of `seats_by_nearness`)."""
    own = np.flatnonzero(seats == rank // ranks_per_node)
    groups = own.reshape(ranks_per_node // replicas, -1)
    mine: I64 = groups[rank % ranks_per_node // replicas]
    return mine
