from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dalipipe.errors import ConfigError
from dalipipe.order import EpochOrder, Extra, Repeat, Repeats, ShuffleConfig, epoch_order
from dalipipe.shards.shape import DataShape
from tests.contracts.order import OrderContract


def counts(num_samples: int, block_samples: int, repeats: Repeats, seed: int = 0) -> np.ndarray:
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
    repeats: Repeats = (
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


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.tuples(st.integers(2, 400), st.integers(1, 12)),
    chosen=st.sets(st.integers(0, 399), min_size=1, max_size=60),
    copies=st.floats(0, 3),
    doubled=st.booleans(),
    seed=st.integers(0, 2**64),
)
def test_extra_copies_come_beside_what_blocks_bring(
    sizes: tuple[int, int], chosen: set[int], copies: float, doubled: bool, seed: int
) -> None:
    num_samples, block_samples = sizes
    ids = np.array(sorted({number % num_samples for number in chosen}))
    num_blocks = -(-num_samples // block_samples)
    base = [Repeat(start=0, stop=num_blocks, factor=2.0)] if doubled else []
    got = counts(num_samples, block_samples, [*base, Extra(ids=ids, copies=copies)], seed)
    got -= 2 if doubled else 1
    others = np.delete(got, ids)
    assert not others.any()
    assert got[ids].sum() == round(copies * ids.size)
    assert got[ids].min() >= math.floor(copies)
    assert got[ids].max() <= math.ceil(copies)


def test_extra_copies_name_themselves_in_the_signature() -> None:
    shape = DataShape(num_samples=100, block_samples=4, num_bytes=100)
    signatures = {
        epoch_order(
            shape,
            epoch=0,
            batch_size=4,
            shuffle=ShuffleConfig(),
            last_batch="drop",
            repeats=[Extra(ids=np.array(ids), copies=copies)],
        ).signature
        for ids, copies in (([1, 2], 1.0), ([1, 3], 1.0), ([1, 2], 2.0))
    }
    assert len(signatures) == 3
    with pytest.raises(ConfigError, match=r"0 samples 1\.0 times more"):
        counts(100, 4, [Extra(ids=np.array([], dtype=np.int64), copies=1.0)])


class TestOrderWithExtraCopies(TestRepeatedOrder):
    repeats = (*TestRepeatedOrder.repeats, Extra(ids=np.arange(3, 437, 5), copies=1.5))
