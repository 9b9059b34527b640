from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dalipipe.errors import ConfigError
from dalipipe.order import rank_slots
from dalipipe.order.seating import seats_by_nearness, slots_of_seat


@given(groups=st.integers(1, 32), replicas=st.integers(1, 8), num_slots=st.integers(1, 16))
def test_groups_share_out_the_batch_and_replicas_see_the_same(groups: int, replicas: int, num_slots: int) -> None:
    batch_size, world_size = groups * num_slots, groups * replicas
    seats = [rank_slots(batch_size, world_size, rank, replicas) for rank in range(world_size)]
    assert np.array_equal(np.concatenate(seats[::replicas]), np.arange(batch_size))
    for rank, seat in enumerate(seats):
        assert np.array_equal(seat, seats[rank // replicas * replicas])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((100, 8, 0, 1), "global_batch_size=100 must divide by the 8 ranks .* nearest: 96 or 104"),
        ((4, 8, 0, 1), "global_batch_size=4 .* nearest: 8,"),
        ((100, 8, 0, 3), "replicas=3 must divide the world of 8 ranks .* nearest: 2 or 4"),
        ((100, 8, 8, 1), r"rank=8 must be in \[0, world_size=8\)"),
    ],
)
def test_what_does_not_divide_is_refused_with_the_nearest(arguments: tuple[int, int, int, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rank_slots(*arguments)


@st.composite
def jobs(draw: st.DrawFn) -> tuple[int, int, int, int, int]:
    """nodes, ranks a node, replicas, lanes, batch size."""
    replicas = draw(st.integers(1, 3))
    ranks_per_node = replicas * draw(st.integers(1, 4))
    nodes = draw(st.integers(1, 6))
    groups = nodes * ranks_per_node // replicas
    lanes = draw(st.integers(1, 12))
    return nodes, ranks_per_node, replicas, lanes, math.lcm(groups, lanes) * draw(st.integers(1, 3))


@settings(max_examples=150, deadline=None)
@given(job=jobs(), data=st.data())
def test_seats_by_nearness_give_every_slot_to_one_group_and_every_rank_as_many(
    job: tuple[int, int, int, int, int], data: st.DataObject
) -> None:
    nodes, ranks_per_node, replicas, lanes, batch_size = job
    row = st.lists(st.integers(0, 9), min_size=lanes, max_size=lanes)
    near = np.array(data.draw(st.lists(row, min_size=nodes, max_size=nodes)))
    seats = seats_by_nearness(near, batch_size, ranks_per_node, replicas)
    world_size = nodes * ranks_per_node
    slots = [slots_of_seat(seats, rank, ranks_per_node, replicas) for rank in range(world_size)]
    for rank in range(world_size):
        assert slots[rank].size == batch_size * replicas // world_size
        assert (np.diff(slots[rank]) > 0).all()
        np.testing.assert_array_equal(slots[rank], slots[rank // replicas * replicas])
    assert np.array_equal(np.sort(np.concatenate(slots[::replicas])), np.arange(batch_size))
    nothing = seats_by_nearness(near * 0, batch_size, ranks_per_node, replicas)
    for rank in range(world_size):
        by_number = rank_slots(batch_size, world_size, rank, replicas)
        np.testing.assert_array_equal(slots_of_seat(nothing, rank, ranks_per_node, replicas), by_number)


def test_nodes_that_come_back_in_another_order_get_their_lanes_again() -> None:
    nodes, lanes, batch_size = 4, 8, 64
    before = seats_by_nearness(np.zeros((nodes, lanes), dtype=np.int64), batch_size, 2)
    by_lane = before.reshape(lanes, -1)
    held = np.array([[int((by_lane[lane] == node).any()) for lane in range(lanes)] for node in range(nodes)])
    order = [2, 0, 3, 1]
    after = seats_by_nearness(held[order] * 64, batch_size, 2)
    assert [order[node] for node in after.tolist()] == before.tolist()


def test_a_lane_that_two_nodes_hold_goes_to_the_one_that_holds_more() -> None:
    near = np.array([[5, 9], [6, 60]])
    assert seats_by_nearness(near, 4, 1).tolist() == [0, 0, 1, 1]
    near = np.array([[7, 9], [6, 6]])
    assert seats_by_nearness(near, 4, 1).tolist() == [1, 1, 0, 0]
