from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dalipipe.order.feistel import invert, permute
from dalipipe.order.hashing import Purpose, fold, seed_key


@given(size=st.integers(1, 5000), seed=st.integers(-(2**70), 2**70))
def test_a_permutation_takes_every_value_once_and_inverts(size: int, seed: int) -> None:
    index = np.arange(size)
    key = seed_key(seed, Purpose.ROW)
    image = permute(index, size, key)
    assert np.array_equal(np.sort(image), index)
    assert np.array_equal(invert(image, size, key), index)


@given(size=st.integers(2**40, 2**62), start=st.integers(0, 2**40 - 100), seed=st.integers(0, 2**64))
def test_sizes_that_fit_in_no_memory_are_permuted_too(size: int, start: int, seed: int) -> None:
    index = np.arange(start, start + 100)
    key = seed_key(seed, Purpose.ROW)
    image = permute(index, size, key)
    assert np.unique(image).size == 100
    assert image.min() >= 0
    assert image.max() < size
    assert np.array_equal(invert(image, size, key), index)


@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=20), seed=st.integers(0, 2**64))
def test_sizes_and_keys_may_differ_by_index(sizes: list[int], seed: int) -> None:
    size = np.repeat(sizes, sizes)
    index = np.concatenate([np.arange(each) for each in sizes])
    group = np.repeat(np.arange(len(sizes)), sizes)
    keys = fold(seed_key(seed, Purpose.FRAME), group)
    together = permute(index, size, keys)
    for number, each in enumerate(sizes):
        alone = permute(np.arange(each), each, fold(seed_key(seed, Purpose.FRAME), number))
        assert np.array_equal(together[group == number], alone)


@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 2**64))
def test_each_place_is_equally_likely(seed: int) -> None:
    size, num_keys = 24, 20_000
    keys = fold(seed_key(seed, Purpose.ROW), np.arange(num_keys))
    images = permute(np.arange(size)[:, None], size, keys[None, :])
    counts = np.stack([np.bincount(row, minlength=size) for row in images])
    expected = num_keys / size
    # Chi-squared over (size - 1)**2 degrees of freedom; 6 standard deviations above the mean.
    chi2 = float(((counts - expected) ** 2 / expected).sum())
    freedom = (size - 1) ** 2
    assert chi2 < freedom + 6 * (2 * freedom) ** 0.5
