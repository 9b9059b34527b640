from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dalipipe.errors import ConfigError
from dalipipe.order import rank_slots


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
