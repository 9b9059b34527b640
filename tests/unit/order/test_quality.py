from __future__ import annotations

import numpy as np
import pytest

from dalipipe.order import EpochOrder, ShuffleConfig, epoch_order
from dalipipe.order.quality import (
    collision_ratio,
    design_effect,
    group_correlation,
    measure,
    multiset_deviation,
    recurrence,
)
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


def test_groups_of_any_sizes() -> None:
    # Shards of 1, 3 and 2 samples: 4 of 15 pairs share one.
    starts = np.array([0, 1, 4, 6])
    assert collision_ratio(np.array([[1, 2, 3], [0, 4, 1]]), starts, 6) == pytest.approx((3 / 6) / (4 / 15))
    assert collision_ratio(np.arange(1024).reshape(-1, 16), np.arange(0, 1025, 16), 1024) == pytest.approx(1023 / 15)
    with pytest.raises(ValueError, match="hold no pair"):
        collision_ratio(np.array([[0, 1]]), np.arange(3), 2)


def test_label_correlation_of_groups() -> None:
    groups = np.repeat(np.arange(50), 40)
    assert group_correlation(groups % 10, groups) == pytest.approx(1)
    rng = np.random.default_rng(0)
    assert group_correlation(rng.integers(0, 10, 2000), groups) == pytest.approx(0, abs=0.01)
    # Half of each group is of the group's own label, the other half anything: rho is about a quarter.
    mixed = np.where(np.arange(2000) % 2 == 0, groups, rng.integers(0, 50, 2000))
    assert group_correlation(mixed, groups) == pytest.approx(0.25, abs=0.03)
    for labels, same in ((groups * 0, groups), (groups, groups * 0), (np.arange(50), np.arange(50)), (groups[:0],) * 2):
        assert group_correlation(labels, same) is None


@pytest.mark.parametrize("max_ids", [1 << 21, 4096])
def test_measure_says_all_of_small_sets_and_the_ratios_of_large_ones(max_ids: int) -> None:
    shape = DataShape(num_samples=16_384, block_samples=8, num_bytes=16_384)

    def order(epoch: int) -> EpochOrder:
        return epoch_order(shape, epoch=epoch, batch_size=256, shuffle=ShuffleConfig(window=0.5), last_batch="drop")

    found = measure(order, np.arange(0, 16_385, 256), 8, rho=0.5, max_ids=max_ids)
    assert found.collision_ratio == pytest.approx(1, abs=0.15)
    assert found.design_effect is not None
    assert abs(found.design_effect - 1) < 0.3
    whole = max_ids > 16_384
    assert found.num_steps == (64 if whole else 16)
    assert (found.multiset_deviation == 0) is whole
    assert (found.recurrence is not None) is whole


def test_samples_without_company_have_no_ratio() -> None:
    shape = DataShape(num_samples=8, block_samples=1, num_bytes=8)
    found = measure(
        lambda epoch: epoch_order(shape, epoch=epoch, batch_size=2, shuffle=ShuffleConfig(), last_batch="drop"),
        np.arange(9),
        1,
        rho=1.0,
    )
    assert found.collision_ratio is None
    assert found.block_collision_ratio is None
