from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dalipipe.errors import ConfigError
from dalipipe.order import EpochOrder, ShuffleConfig, mixed_order
from dalipipe.order.mix import MIX_WINDOW, mix_counts
from dalipipe.order.stream import Stream
from dalipipe.shards.shape import DataShape
from tests.contracts.order import OrderContract


def shape(num_samples: int, block_samples: int) -> DataShape:
    return DataShape(num_samples=num_samples, block_samples=block_samples, num_bytes=num_samples * 10)


@given(weights=st.lists(st.floats(0.01, 1), min_size=1, max_size=8))
def test_counts_fill_the_window_and_stray_from_the_share_by_less_than_one(weights: list[float]) -> None:
    counts = mix_counts({str(number): weight for number, weight in enumerate(weights)})
    assert sum(counts.values()) == MIX_WINDOW
    for count, weight in zip(counts.values(), weights, strict=True):
        assert abs(count - weight / sum(weights) * MIX_WINDOW) < 1


@settings(max_examples=100, deadline=None)
@given(
    data_set=st.builds(shape, st.integers(1, 400), st.integers(1, 12)),
    lanes=st.integers(1, 12),
    window_blocks=st.integers(0, 5),
    exchange=st.floats(0, 1),
    seed=st.integers(0, 2**64),
)
def test_a_stream_goes_through_all_samples_once_before_it_starts_again(
    data_set: DataShape, lanes: int, window_blocks: int, exchange: float, seed: int
) -> None:
    stream = Stream(data_set, seed=seed, lanes=lanes, window_blocks=window_blocks, exchange=exchange)
    num_samples = data_set.num_samples
    # Positions in turn over the lanes: number d is lane d mod L at position d // L.
    number = np.arange(4 * num_samples)
    ids = stream.at(number % lanes, number // lanes).reshape(4, num_samples)
    for epoch in ids:
        assert np.array_equal(np.sort(epoch), np.arange(num_samples))


def test_a_lane_of_a_stream_keeps_its_blocks_over_epochs() -> None:
    # 1,003 samples do not divide by 4 lanes: the lanes that take one more differ from epoch to epoch.
    stream = Stream(shape(1003, 5), seed=1, lanes=4, window_blocks=3, exchange=0.0)
    own = [set((stream.at(np.array([2]), np.arange(250) + 251 * epoch) // 5).tolist()) for epoch in (0, 3)]
    assert len(own[0] & own[1]) >= 50


@settings(max_examples=30, deadline=None)
@given(
    lanes=st.sampled_from([1, 2, 4]),
    weights=st.lists(st.floats(0.05, 1), min_size=2, max_size=4),
    mode=st.sampled_from(["block", "full"]),
    seed=st.integers(0, 2**32),
)
def test_every_window_of_a_lane_has_exactly_the_counts(lanes: int, weights: list[float], mode: str, seed: int) -> None:
    shapes = {name: shape(300 + 50 * number, 4 + number) for number, name in enumerate("abcd"[: len(weights)])}
    mix = dict(zip(shapes, weights, strict=True))
    order = mixed_order(
        shapes,
        mix,
        epoch=0,
        batch_size=4,
        shuffle=ShuffleConfig(lanes=lanes, mode=mode, seed=seed),
        epoch_samples=2 * 4 * MIX_WINDOW,
    )
    bounds = np.cumsum([each.num_samples for each in shapes.values()])
    source = np.searchsorted(bounds, order.ids(0, order.num_steps), side="right")
    lane_slots = 4 // (lanes if mode == "block" else 1)
    for slot in range(0, 4, lane_slots):
        stream = source[:, slot : slot + lane_slots].reshape(-1)
        for window in stream.reshape(-1, MIX_WINDOW):
            assert np.bincount(window, minlength=len(weights)).tolist() == list(mix_counts(mix).values())


@settings(max_examples=15, deadline=None)
@given(
    window_blocks=st.integers(1, 6),
    weights=st.lists(st.floats(0.1, 1), min_size=2, max_size=3),
    seed=st.integers(0, 2**32),
)
def test_a_mix_has_no_more_blocks_open_than_the_windows_of_its_sources(
    window_blocks: int, weights: list[float], seed: int
) -> None:
    K, lanes = 20, 4
    shapes = {name: shape(20_000, K) for name in "abc"[: len(weights)]}
    total_bytes = sum(each.num_bytes for each in shapes.values())
    order = mixed_order(
        shapes,
        dict(zip(shapes, weights, strict=True)),
        epoch=0,
        batch_size=4,
        shuffle=ShuffleConfig(lanes=lanes, window=lanes * window_blocks * K * 10 / total_bytes, seed=seed),
        epoch_samples=4 * 4 * MIX_WINDOW,
    )
    ids = order.ids(0, order.num_steps)
    for lane in range(lanes):
        blocks = ids[:, lane] // K
        assert open_at_once(blocks) <= window_blocks + 2 * len(weights)


def open_at_once(blocks: np.ndarray) -> int:
    """The most blocks that were touched and will be touched again, at any place of a lane."""
    steps = np.arange(len(blocks))
    first, last = (dict(zip(blocks[turn].tolist(), steps[turn].tolist(), strict=True)) for turn in (steps[::-1], steps))
    opened, closed = (np.bincount(list(each.values()), minlength=len(blocks)) for each in (first, last))
    return int((np.cumsum(opened) - np.cumsum(closed)).max())


def test_each_source_is_read_in_its_own_order_whatever_is_mixed_into_it() -> None:
    shapes = {"a": shape(4000, 20), "b": shape(4000, 20), "c": shape(4000, 20)}
    own = []
    for weights in ({"a": 1, "b": 1, "c": 0}, {"a": 1, "b": 0, "c": 3}):
        arguments = {"epoch": 0, "batch_size": 4, "shuffle": ShuffleConfig(lanes=4, mode="full", seed=3)}
        ids = mixed_order(shapes, weights, epoch_samples=2 * 4 * MIX_WINDOW, **arguments).ids(0, 2 * MIX_WINDOW)  # type: ignore[arg-type]
        own.append(ids.reshape(-1)[ids.reshape(-1) < 4000])
    assert len(own[0]) == 2 * len(own[1])
    assert np.array_equal(own[0][: len(own[1])], own[1])


def test_the_patterns_of_many_lanes_and_windows_take_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = {"a": shape(200_000, 20), "b": shape(100_000, 20)}

    def order(lanes: int) -> EpochOrder:
        shuffle = ShuffleConfig(lanes=lanes)
        return mixed_order(
            shapes, {"a": 2, "b": 1}, epoch=0, batch_size=lanes, shuffle=shuffle, epoch_samples=300 * lanes * MIX_WINDOW
        )

    wide, deep = order(2048), order(4)
    monkeypatch.setattr("dalipipe.order.mix._MOST_PATTERNS", 64)
    tracemalloc.start()
    try:
        wide.ids(0, 1)
        assert tracemalloc.get_traced_memory()[1] < 30e6  # 80 MB if all were made at once
        before = tracemalloc.get_traced_memory()[0]
        for window in range(300):
            deep.ids(window * MIX_WINDOW, 1)
        assert tracemalloc.get_traced_memory()[0] - before < 0.5e6  # 2.4 MB if all were kept
    finally:
        tracemalloc.stop()
    assert np.array_equal(deep.ids(0, 5), order(4).ids(0, 5))


def mixed(epoch: int, **changes: object) -> EpochOrder:
    arguments: dict[str, object] = {
        "epoch": epoch,
        "batch_size": 20,
        "shuffle": ShuffleConfig(lanes=4, seed=2, window=0.2, exchange=0.2),
        "epoch_samples": 1010,
    } | changes
    shapes = {"a": shape(437, 6), "b": shape(100, 7)}
    return mixed_order(shapes, {"a": 3, "b": 1}, **arguments)  # type: ignore[arg-type]


def test_each_source_delivers_every_sample_once_before_any_comes_again() -> None:
    # 4 lanes x 1,000 positions of which 3/4 are a's: 3,000 ids of a set of 437, so 6 or 7 of each.
    ids = mixed(0, epoch_samples=4 * MIX_WINDOW).ids(0, 200)
    counts = np.bincount(ids[ids < 437], minlength=437)
    assert counts.sum() == 3000
    assert set(counts.tolist()) == {6, 7}
    counts = np.bincount(ids[ids >= 437] - 437, minlength=100)
    assert set(counts.tolist()) == {10}


def test_epochs_go_on_where_the_last_one_ended() -> None:
    long = mixed(0, epoch_samples=3000).ids(0, 150)
    short = [mixed(epoch, epoch_samples=1010) for epoch in range(3)]
    assert [order.num_steps for order in short] == [50, 50, 50]
    assert np.array_equal(np.concatenate([order.ids(0, 50) for order in short]), long)


def test_a_source_without_weight_never_comes_and_the_signature_tells_mixes_apart() -> None:
    shapes = {"a": shape(437, 6), "b": shape(100, 7)}
    orders = [
        mixed_order(shapes, weights, epoch=0, batch_size=20, shuffle=ShuffleConfig())
        for weights in ({"a": 0, "b": 1}, {"a": 1, "b": 0}, {"a": 1, "b": 1})
    ]
    assert orders[0].ids(0, 26).min() >= 437
    assert orders[1].ids(0, 26).max() < 437
    assert len({order.signature for order in orders}) == 3


@pytest.mark.parametrize(
    ("weights", "changes", "message"),
    [
        ({"a": 1}, {}, r"data.mix weighs \['a'\], but the data sets are \['a', 'b'\]"),
        ({"a": 1, "b": -1}, {}, "at least 0"),
        ({"a": 0, "b": 0}, {}, "one above 0"),
        ({"a": 1, "b": 1e-6}, {}, "data.mix.b=1e-06 is less than one sample in 1000"),
        ({"a": 1, "b": 1}, {"shuffle": ShuffleConfig(mode="none")}, "shuffle.mode=none has no mix"),
        ({"a": 1, "b": 1}, {"epoch_samples": 19}, "loader.epoch_samples=19 .* at least 20"),
    ],
)
def test_a_mix_that_can_never_work_is_refused(
    weights: dict[str, float], changes: dict[str, object], message: str
) -> None:
    shapes = {"a": shape(437, 6), "b": shape(100, 7)}
    arguments: dict[str, object] = {"epoch": 0, "batch_size": 20, "shuffle": ShuffleConfig()} | changes
    with pytest.raises(ConfigError, match=message):
        mixed_order(shapes, weights, **arguments)  # type: ignore[arg-type]


class TestMixedOrder(OrderContract):
    def make_order(self, epoch: int) -> EpochOrder:
        return mixed(epoch)

    def block_of(self, sample: int) -> int:
        return sample // 6 if sample < 437 else 73 + (sample - 437) // 7
