"""Windows are arithmetic: always inside, spread as they should be, and the same for both backends."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dalipipe.graphs.config import GraphConfig
from dalipipe.graphs.crop import NUM_UNIFORMS, centre_start, middle, plan_windows, random_resized_crop, shorter_side
from dalipipe.order.hashing import uniforms

SIDES = st.integers(1, 20_000)
SCALE, RATIO = [0.08, 1.0], [0.75, 4 / 3]


def _draws(num: int, seed: int = 0) -> np.ndarray:
    return uniforms(seed, 0, np.arange(num, dtype=np.int64), NUM_UNIFORMS)


@settings(deadline=None)
@given(sizes=st.lists(st.tuples(SIDES, SIDES), min_size=1, max_size=20), seed=st.integers(0, 2**31))
def test_random_windows_lie_inside_the_image(sizes: list[tuple[int, int]], seed: int) -> None:
    """Whatever the aspect: DALI's slice raises for the whole batch when a window does not."""
    array = np.array(sizes, np.int32)
    start, shape = random_resized_crop(array, _draws(len(array), seed), scale=SCALE, ratio=RATIO)
    assert (start >= 0).all()
    assert (shape >= 1).all()
    assert (start + shape <= array).all()


@settings(deadline=None)
@given(u=st.floats(0, 1, exclude_max=True, width=32), size=st.tuples(SIDES, SIDES))
def test_extreme_draws_stay_inside(u: float, size: tuple[int, int]) -> None:
    """All uniforms at one value, the largest float below 1 included."""
    array = np.array([size], np.int32)
    draws = np.full((1, NUM_UNIFORMS), u, np.float32)
    start, shape = random_resized_crop(array, draws, scale=SCALE, ratio=RATIO)
    assert (start >= 0).all()
    assert (start + shape <= array).all()


def test_area_ratio_and_place_are_spread_as_asked() -> None:
    """20,000 crops of a large square, where every try fits unless the area is near 1."""
    num, side = 20_000, 4096
    sizes = np.full((num, 2), side, np.int32)
    start, shape = random_resized_crop(sizes, _draws(num), scale=[0.1, 0.5], ratio=RATIO)
    area = shape.astype(float).prod(axis=1) / side**2
    log_ratio = np.log(shape[:, 1] / shape[:, 0])
    assert abs(area.mean() - 0.3) < 0.005
    assert abs(np.quantile(area, 0.25) - 0.2) < 0.01
    assert abs(log_ratio.mean()) < 0.005
    assert abs(log_ratio.std() - (np.log(RATIO[1]) - np.log(RATIO[0])) / 12**0.5) < 0.005
    place = start / (sizes - shape + 1)
    assert abs(place.mean() - 0.5) < 0.01
    assert abs(np.corrcoef(place[:, 0], place[:, 1])[0, 1]) < 0.03


def test_a_line_falls_back_to_a_legal_centre() -> None:
    """No try fits a 2 x 8000 image: the window is its middle, 4:3 as far as pixels go."""
    start, shape = random_resized_crop(np.array([[2, 8000]], np.int32), _draws(1), scale=[0.5, 1], ratio=RATIO)
    assert shape.tolist() == [[2, 3]]
    assert abs(start[0, 1] - 3998) <= 1


def test_flips_follow_their_probability() -> None:
    """0 never, 1 always, 0.5 half."""
    sizes = np.full((4000, 2), 64, np.int32)
    means = [plan_windows(GraphConfig(flip=p), sizes, _draws(4000)).mirror.mean() for p in (0.0, 0.5, 1.0)]
    assert means[0] == 0
    assert means[2] == 1
    assert abs(means[1] - 0.5) < 0.03


@settings(deadline=None)
@given(size=st.tuples(SIDES, SIDES), target=st.integers(8, 512))
def test_eval_sizes_bound_memory_and_keep_the_centre(size: tuple[int, int], target: int) -> None:
    """The short side is met exactly, and no aspect makes a giant of the long one."""
    array = np.array([size], np.int32)
    start, shape = middle(array)
    resized = shorter_side(shape, target)
    assert resized.min() == target
    assert resized.max() <= 17 * target
    assert (start * 2 + shape == array).all()
    assert (centre_start(resized, target) >= 0).all()


def test_regions_are_the_windows_in_train_and_the_centre_in_eval() -> None:
    """What a GPU resizes is what a CPU decodes."""
    sizes = np.array([[375, 500], [600, 400]], np.int32)
    train = plan_windows(GraphConfig(), sizes, _draws(2))
    begin, end = train.region(224, np.arange(2))
    assert np.allclose(begin, train.start)
    assert np.allclose(end, train.start + train.shape)
    evaluated = plan_windows(GraphConfig(name="image_eval"), sizes, _draws(2))
    begin, end = evaluated.region(224, np.arange(2))
    assert np.abs((begin + end) / 2 - sizes / 2).max() <= 1
    assert np.allclose(end - begin, sizes.min(axis=1, keepdims=True) * 224 / 256, rtol=2e-3)
    exact = plan_windows(GraphConfig(name="image_eval"), sizes, _draws(2), fractions=True)
    assert np.allclose(exact.region(224, np.arange(2)), (begin, end))
    seen = evaluated.start + evaluated.shape
    assert (seen >= end).all()
    assert (seen <= sizes).all()
    assert seen.prod(axis=1).tolist() < (sizes.prod(axis=1) * 0.9).tolist()


@settings(deadline=None)
@given(size=st.tuples(SIDES, SIDES), short=st.integers(1, 600), part=st.floats(0, 1), scaled=st.booleans())
def test_what_evaluation_sees_is_inside_and_no_more(
    size: tuple[int, int], short: int, part: float, scaled: bool
) -> None:
    """With fractions the same pixels are shown, what the filters see of them is decoded, and little beside it."""
    graph = GraphConfig(
        name="image_eval", size=max(1, int(part * short)), resize_shorter=short, jpeg_scale="auto" if scaled else "off"
    )
    sizes = np.array([size], np.int32)
    whole, exact = plan_windows(graph, sizes, _draws(1)), plan_windows(graph, sizes, _draws(1), fractions=True)
    assert np.array_equal(whole.scale, exact.scale)
    assert (exact.reduce <= whole.reduce).all()
    shown, shown_too = whole.region(graph.size, np.arange(1)), exact.region(graph.size, np.arange(1))
    assert np.allclose(shown, shown_too, rtol=1e-6)
    factor = exact.reduce[:, None]
    support = np.maximum(exact.scale, factor)
    centre = exact.begin + exact.scale / 2
    low, high = centre - support, centre + (graph.size - 1) * exact.scale + support
    assert (exact.start >= 0).all()
    assert (exact.start % factor == 0).all()
    assert (exact.start + exact.shape <= sizes).all()
    first, aspect_limit = middle(sizes)
    assert ((low >= -1e-9) | (exact.start == first)).all()
    assert ((high <= exact.shape + 1e-9) | (exact.start + exact.shape == first + aspect_limit)).all()
    assert (exact.shape <= high - low + 2 * factor + 1e-9).all()
    assert (exact.begin >= 0).all()
    assert (exact.begin + graph.size * exact.scale <= exact.shape + 1e-9).all()


def test_a_photographs_middle_is_all_that_evaluation_decodes() -> None:
    """224 of 256: 1.46 source pixels each, and the reach of the filter."""
    sizes = np.array([[375, 500]], np.int32)
    exact = plan_windows(GraphConfig(name="image_eval"), sizes, _draws(1), fractions=True)
    assert exact.start.tolist() == [[22, 84]]
    assert exact.shape.tolist() == [[331, 331]]
