from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dalipipe.order import uniforms


@given(
    seed=st.integers(-(2**63), 2**64),
    epoch=st.integers(0, 10**6),
    ids=st.lists(st.integers(0, 2**62), min_size=1, max_size=20),
)
def test_uniforms_depend_on_seed_epoch_and_id_alone(seed: int, epoch: int, ids: list[int]) -> None:
    together = uniforms(seed, epoch, np.array(ids), 5)
    assert together.dtype == np.float32
    assert together.shape == (len(ids), 5)
    assert (together >= 0).all()
    assert (together < 1).all()
    for row, sample in zip(together, ids, strict=True):
        assert np.array_equal(uniforms(seed, epoch, np.array([sample]), 3)[0], row[:3])


def test_uniforms_differ_between_seeds_epochs_ids_and_columns() -> None:
    ids = np.arange(1000)
    draws = [uniforms(seed, epoch, ids, 8) for seed in (0, 1) for epoch in (0, 1)]
    assert np.unique(np.concatenate(draws)).size > 31_900


def test_uniforms_are_uniform_and_uncorrelated() -> None:
    draws = uniforms(7, 3, np.arange(200_000), 4).astype(np.float64)
    counts = np.histogram(draws, bins=64, range=(0, 1))[0]
    expected = draws.size / 64
    assert ((counts - expected) ** 2 / expected).sum() < 63 + 6 * (2 * 63) ** 0.5
    correlation = np.corrcoef(draws.T)[np.triu_indices(4, 1)]
    assert np.abs(correlation).max() < 6 / 200_000**0.5
    neighbours = np.corrcoef(draws[:-1, 0], draws[1:, 0])[0, 1]
    assert abs(neighbours) < 6 / 200_000**0.5


def test_the_values_are_part_of_the_format() -> None:
    assert uniforms(1, 2, np.array([0, 10**12]), 2).tolist() == [
        [0.31947076320648193, 0.24856144189834595],
        [0.28253495693206787, 0.9783213138580322],
    ]
