"""The order that a configuration asks for."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict

import numpy as np
import pytest

from dalipipe.errors import ConfigError
from dalipipe.order import EpochOrder, Extra, Repeat, ShuffleConfig, epoch_order
from dalipipe.order.recipe import orders
from dalipipe.shards.shape import DataShape
from tests.contracts.order import OrderContract

A = DataShape(num_samples=437, block_samples=6, num_bytes=4370)
B = DataShape(num_samples=100, block_samples=7, num_bytes=1000)
SHUFFLE = ShuffleConfig(lanes=4, seed=2, window=0.2)


def test_one_set_is_its_own_epoch() -> None:
    order = orders({"": A}, batch_size=20, shuffle=SHUFFLE, last_batch="pad")
    plain = epoch_order(A, epoch=3, batch_size=20, shuffle=SHUFFLE, last_batch="pad")
    np.testing.assert_array_equal(order(3).ids(0, 22), plain.ids(0, 22))
    assert order(3) is order(3)


def test_epoch_samples_cut_an_endless_stream_that_has_each_sample_once_before_any_comes_again() -> None:
    order = orders({"": A}, batch_size=4, shuffle=SHUFFLE, last_batch="drop", epoch_samples=103)
    ids = np.concatenate([order(epoch).ids(0, order(epoch).num_steps).reshape(-1) for epoch in range(9)])
    assert order(0).num_steps == 25
    assert np.array_equal(np.sort(ids[:436]), np.setdiff1d(np.arange(437), [*set(range(437)) - set(ids[:436])]))
    assert len(set(ids[:436].tolist())) == 436
    assert order(0).signature.recipe.startswith("stream ")


def test_hot_samples_of_a_set_in_a_mix_share_its_weight() -> None:
    order = orders(
        {"a": A, "b": B},
        batch_size=4,
        shuffle=SHUFFLE,
        last_batch="drop",
        mix={"a": 1, "b": 1},
        repeats={"b": [Repeat(start=0, stop=5, factor=3.0), Extra(ids=np.arange(90, 100), copies=2.0)]},
        epoch_samples=8000,
    )(0)
    ids = order.ids(0, order.num_steps).reshape(-1)
    counts = Counter((ids[ids >= 437] - 437).tolist())
    # One round of b is 35 x 3 + 55 + 10 x 3 = 190 deliveries; 4,000 of them are a little over 21 rounds.
    assert sum(counts.values()) == 4000
    rounds = 4000 / 190
    for sample in range(100):
        factor = 3 if sample < 35 or sample >= 90 else 1
        assert abs(counts[sample] - factor * rounds) <= factor
    assert ":repeat" in order.signature.recipe


@pytest.mark.parametrize("name", ["a data set with a long name", "データセット"])
def test_a_recipe_of_any_length_leaves_a_state_under_1_kb(name: str) -> None:
    shapes = {f"{name} {number}": B for number in range(40)}
    mixes = [{**dict.fromkeys(shapes, 1.0), next(reversed(shapes)): last} for last in (1.0, 2.0)]
    signatures = [
        orders(shapes, batch_size=4, shuffle=SHUFFLE, last_batch="drop", mix=mix)(0).signature for mix in mixes
    ]
    assert len(json.dumps(asdict(signatures[0]))) < 800
    assert signatures[0] != signatures[1]


@pytest.mark.parametrize("last_batch", ["partial", "pad"])
def test_data_without_end_have_no_tail(last_batch: str) -> None:
    for changes in ({"epoch_samples": 100}, {"mix": {"": 1.0}}):
        with pytest.raises(ConfigError, match=r"set loader\.last_batch=drop"):
            orders({"": A}, batch_size=4, shuffle=SHUFFLE, last_batch=last_batch, **changes)  # type: ignore[arg-type]


def test_what_cannot_work_is_refused_before_the_first_epoch() -> None:
    with pytest.raises(ConfigError, match="nearest that do"):
        orders({"": A}, batch_size=6, shuffle=SHUFFLE, last_batch="drop")


class TestEndlessOrder(OrderContract):
    def make_order(self, epoch: int) -> EpochOrder:
        return orders({"": A}, batch_size=20, shuffle=SHUFFLE, last_batch="drop", epoch_samples=210)(epoch)

    def block_of(self, sample: int) -> int:
        return sample // 6

    def test_next_block_stays_among_the_blocks_that_the_epoch_reads(self) -> None:
        """An epoch is a part of the set here, and the lane's next block may lie beyond it: it is a block of the set."""
        order = self.make_order(2)
        assert {order.next_block(block) for block in range(A.num_blocks)} <= set(range(A.num_blocks))
