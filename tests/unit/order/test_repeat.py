from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dalipipe.errors import ConfigError
from dalipipe.order import EpochOrder, Repeat, ShuffleConfig, epoch_order
from dalipipe.shards.shape import DataShape
from tests.contracts.order import OrderContract


def counts(num_samples: int, block_samples: int, repeats: list[Repeat], seed: int = 0) -> np.ndarray:
    shape = DataShape(num_samples=num_samples, block_samples=block_samples, num_bytes=num_samples * 10)
    order = epoch_order(
        shape, epoch=1, batch_size=8, shuffle=ShuffleConfig(seed=seed), last_batch="pad", repeats=repeats
    )
    ids = order.ids(0, order.num_steps)
    return np.bincount(ids[ids >= 0], minlength=num_samples)


@settings(max_examples=100, deadline=None)
@given(
    num_samples=st.integers(1, 600),
    block_samples=st.integers(1, 12),
    cuts=st.lists(st.integers(0, 600), min_size=2, max_size=6, unique=True),
    factors=st.lists(st.floats(0, 4), min_size=3, max_size=3),
    seed=st.integers(0, 2**64),
)
def test_every_sample_comes_as_often_as_its_factor_rounded_up_or_down(
    num_samples: int, block_samples: int, cuts: list[int], factors: list[float], seed: int
) -> None:
    num_blocks = -(-num_samples // block_samples)
    edges = sorted({cut % (num_blocks + 1) for cut in cuts})
    ranges = list(zip(edges[::2], edges[1::2], strict=False))
    repeats = [Repeat(start=a, stop=b, factor=factor) for (a, b), factor in zip(ranges, factors, strict=False)]
    assume(repeats)
    named = np.zeros(num_blocks, dtype=bool)
    for part in repeats:
        named[part.start : part.stop] = True
    assume(not named.all() or any(part.factor >= 1 for part in repeats))
    got = counts(num_samples, block_samples, repeats, seed)
    block = np.arange(num_samples) // block_samples
    assert (got[~named[block]] == 1).all()
    for part in repeats:
        inside = got[(block >= part.start) & (block < part.stop)]
        assert inside.min() >= math.floor(part.factor)
        assert inside.max() <= math.ceil(part.factor)


def test_a_fraction_is_that_share_of_blocks_and_the_same_in_every_epoch() -> None:
    got = counts(1000, 10, [Repeat(start=0, stop=50, factor=1.7)])
    per_block = got.reshape(100, 10)
    assert (per_block == per_block[:, :1]).all()
    assert np.bincount(per_block[:50, 0]).tolist() == [0, 15, 35]
    assert (per_block[50:] == 1).all()
    shape = DataShape(num_samples=1000, block_samples=10, num_bytes=1000)
    repeats = [Repeat(start=0, stop=50, factor=1.7)]
    for epoch in (0, 5):
        order = epoch_order(
            shape, epoch=epoch, batch_size=5, shuffle=ShuffleConfig(), last_batch="drop", repeats=repeats
        )
        assert order.num_steps == 270
        assert np.array_equal(np.bincount(order.ids(0, 270).reshape(-1)), got)


@pytest.mark.parametrize(
    ("repeats", "message"),
    [
        ([Repeat(start=0, stop=11, factor=2)], r"blocks \[0, 11\) x 2 must be a range inside the 10 blocks"),
        ([Repeat(start=3, stop=3, factor=2)], r"blocks \[3, 3\)"),
        ([Repeat(start=0, stop=3, factor=-1)], "factor of at least 0"),
        ([Repeat(start=0, stop=3, factor=1), Repeat(start=2, stop=5, factor=1)], r"blocks \[2, 3\) have two factors"),
        ([Repeat(start=0, stop=10, factor=0)], "leaves no sample"),
    ],
)
def test_repeats_that_can_never_work_are_refused(repeats: list[Repeat], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        counts(98, 10, repeats)


class TestRepeatedOrder(OrderContract):
    repeats = (
        Repeat(start=0, stop=20, factor=2.5),
        Repeat(start=40, stop=50, factor=0.5),
        Repeat(start=70, stop=73, factor=3),
    )

    def make_order(self, epoch: int) -> EpochOrder:
        shape = DataShape(num_samples=437, block_samples=6, num_bytes=437)
        shuffle = ShuffleConfig(seed=1, lanes=4, exchange=0.3, window=0.3)
        return epoch_order(shape, epoch=epoch, batch_size=20, shuffle=shuffle, last_batch="pad", repeats=self.repeats)

    def block_of(self, sample: int) -> int:
        return sample // 6
