from __future__ import annotations

import numpy as np
import pytest

from dalipipe.order import ShuffleConfig, epoch_order
from dalipipe.order.quality import collision_ratio, design_effect, multiset_deviation, recurrence
from dalipipe.shards.shape import DataShape


def permuted(seed: int, num_samples: int, batch_size: int) -> np.ndarray:
    return np.random.default_rng(seed).permutation(num_samples).reshape(-1, batch_size)


def test_a_uniform_permutation_scores_one() -> None:
    one, other = permuted(1, 65_536, 256), permuted(2, 65_536, 256)
    assert collision_ratio(one, 64, 65_536) == pytest.approx(1, abs=0.02)
    assert design_effect(one, 64, 65_536, rho=1.0) == pytest.approx(1, abs=0.02)
    assert recurrence(one, other) == pytest.approx(1, abs=0.02)


def test_manifest_order_scores_as_badly_as_can_be() -> None:
    ids = np.arange(1024).reshape(-1, 16)
    assert collision_ratio(ids, 16, 1024) == pytest.approx(1023 / 15)
    assert design_effect(ids, 16, 1024, rho=1.0) == pytest.approx(1 + 15 * (1 - 15 / 1023))
    assert recurrence(ids, ids) == pytest.approx(1023 / 15)


def test_figures_by_hand() -> None:
    # Groups {0,1} {2,3}; one of two steps has a pair: p = 1/2 of the pairs, by chance 1/3.
    assert collision_ratio(np.array([[0, 1], [2, -1]]), 2, 4) == pytest.approx(3)
    assert collision_ratio(np.array([[0, 1], [1, 2]]), 2, 4) == pytest.approx(1.5)
    assert multiset_deviation(np.array([0, 1, 1, -1]), 4) == pytest.approx(3 / 4)
    assert multiset_deviation(np.array([[3, 1], [0, 2]]), 4) == 0


def test_what_has_no_pairs_has_no_figure() -> None:
    with pytest.raises(ValueError, match="no whole step"):
        collision_ratio(np.array([[0, -1]]), 2, 4)
    with pytest.raises(ValueError, match="do not divide"):
        collision_ratio(np.array([[0, 1]]), 3, 4)
    with pytest.raises(ValueError, match="share a batch"):
        recurrence(np.array([[0], [1]]), np.array([[0], [1]]))


@pytest.mark.parametrize("lanes", [8, 64])
def test_class_sorted_shards_mix_like_a_full_shuffle_at_constant_demand(lanes: int) -> None:
    num_samples = 1024 * 256
    shape = DataShape(num_samples=num_samples, block_samples=8, num_bytes=num_samples * 110_000)
    shuffle = ShuffleConfig(seed=3, window=0.05, lanes=lanes)
    order = epoch_order(shape, epoch=1, batch_size=1024, shuffle=shuffle, last_batch="drop")
    ids = order.ids(0, order.num_steps)
    assert collision_ratio(ids, 256, num_samples) <= 1.1
    assert design_effect(ids, 256, num_samples, rho=0.01) <= 1.01
    use = order.blocks(0, order.num_steps, np.arange(1024))
    new_over_consumed = np.bincount(use.first, minlength=order.num_steps) * 8 / 1024
    assert np.quantile(new_over_consumed[16:-16], 0.99) <= 1.5
