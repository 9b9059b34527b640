from __future__ import annotations

import doctest
import itertools
import tracemalloc
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dalipipe.errors import ConfigError
from dalipipe.order import EpochOrder, ShuffleConfig, epoch_order, rank_slots
from dalipipe.shards.shape import DataShape
from tests.contracts.order import OrderContract


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    num_samples: int
    block_samples: int
    batch_size: int
    shuffle: ShuffleConfig
    epoch: int

    def order(self, last_batch: str = "pad") -> EpochOrder:
        shape = DataShape(
            num_samples=self.num_samples, block_samples=self.block_samples, num_bytes=self.num_samples * 1000
        )
        return epoch_order(
            shape, epoch=self.epoch, batch_size=self.batch_size, shuffle=self.shuffle, last_batch=last_batch
        )


@st.composite
def cases(draw: st.DrawFn, modes: tuple[str, ...] = ("block", "block", "block", "full", "none")) -> Case:
    batch_size = draw(st.integers(1, 96))
    lanes = [number for number in range(1, batch_size + 1) if batch_size % number == 0]
    return Case(
        num_samples=draw(st.integers(1, 3000)),
        block_samples=draw(st.integers(1, 40)),
        batch_size=batch_size,
        epoch=draw(st.integers(0, 9)),
        shuffle=ShuffleConfig(
            mode=draw(st.sampled_from(modes)),
            seed=draw(st.integers(-(2**64), 2**65)),
            window=draw(st.one_of(st.floats(0, 1), st.integers(2, 4_000_000), st.just("64KiB"), st.just("0.2"))),
            lanes=draw(st.one_of(st.just("auto"), st.sampled_from(lanes))),
            exchange=draw(st.floats(0, 1)),
        ),
    )


PINNED_IDS = [
    [32, 34, 33, 25, 43, 42, 40, 47],
    [24, 35, 26, 36, 44, 28, 41, 45],
    [37, 18, 27, 38, 29, 46, 30, 2],
    [17, 6, 5, 16, 0, 13, 3, 15],
    [39, 20, 21, 19, 31, 12, 9, 11],
    [7, 23, 4, 22, 1, 14, 10, 8],
    [48, 49, -1, -1, -1, -1, -1, -1],
]


def scan(order: EpochOrder) -> np.ndarray:
    return order.ids(0, order.num_steps)


@settings(max_examples=200, deadline=None)
@given(case=cases())
def test_every_sample_comes_exactly_once_an_epoch(case: Case) -> None:
    ids = scan(case.order())
    assert np.array_equal(np.sort(ids[ids >= 0]), np.arange(case.num_samples))


@settings(max_examples=50, deadline=None)
@given(case=cases(), data=st.data())
def test_a_run_resumed_anywhere_goes_on_as_if_it_had_not_stopped(case: Case, data: st.DataObject) -> None:
    ids = scan(case.order())
    step = data.draw(st.integers(0, len(ids)))
    resumed = case.order()
    assert np.array_equal(resumed.ids(step, resumed.num_steps - step), ids[step:])


@settings(max_examples=25, deadline=None)
@given(case=cases())
def test_ranks_of_any_world_together_see_the_same_global_batches(case: Case) -> None:
    order = case.order()
    ids = scan(order)
    for world_size in (size for size in range(1, 65) if case.batch_size % size == 0):
        slots = [rank_slots(case.batch_size, world_size, rank) for rank in range(world_size)]
        parts = [order.ids(0, order.num_steps, own) for own in slots]
        assert np.array_equal(np.concatenate(parts, axis=1), ids)
        used = set(itertools.chain(*(order.blocks(0, order.num_steps, own).blocks.tolist() for own in slots)))
        assert used == set((ids[ids >= 0] // case.block_samples).tolist())


@settings(max_examples=50, deadline=None)
@given(case=cases())
def test_the_tail_policies_differ_in_the_last_step_alone(case: Case) -> None:
    pad = scan(case.order("pad"))
    assert np.array_equal(scan(case.order("partial")), pad)
    assert len(pad) == -(-case.num_samples // case.batch_size)
    num_whole = case.num_samples // case.batch_size
    if num_whole:
        assert np.array_equal(scan(case.order("drop")), pad[:num_whole])
    else:
        with pytest.raises(ConfigError, match=f"{case.num_samples} samples do not fill one global batch"):
            case.order("drop")


@settings(max_examples=50, deadline=None)
@given(case=cases(modes=("block", "full")))
def test_following_next_block_never_ends(case: Case) -> None:
    order = case.order()
    num_blocks = -(-case.num_samples // case.block_samples)
    following = [order.next_block(block) for block in range(num_blocks)]
    assert all(0 <= block < num_blocks for block in following)
    # A lane of several blocks leads away from each of them.
    own = [block for block, other in enumerate(following) if block == other]
    lanes = order.signature.lanes
    assert len(own) <= (lanes if lanes and num_blocks // lanes <= 1 else 1)


def test_next_block_is_the_block_that_the_lane_opens_next() -> None:
    shuffle = ShuffleConfig(lanes=2, window=0.0, exchange=0.5)
    order = epoch_order(
        DataShape(num_samples=160, block_samples=4, num_bytes=160),
        epoch=3,
        batch_size=2,
        shuffle=shuffle,
        last_batch="drop",
    )
    # With a window of one block a lane reads block after block.
    for slot in (0, 1):
        opened = order.blocks(0, order.num_steps, np.array([slot])).blocks.tolist()
        assert len(opened) == 20
        assert [order.next_block(block) for block in opened] == opened[1:] + opened[:1]


def lane_blocks(exchange: float, epoch: int, lanes: int = 4) -> list[set[int]]:
    shuffle = ShuffleConfig(lanes=lanes, exchange=exchange, seed=5)
    shape = DataShape(num_samples=8000, block_samples=10, num_bytes=8000)
    order = epoch_order(shape, epoch=epoch, batch_size=lanes, shuffle=shuffle, last_batch="drop")
    return [set(order.blocks(0, order.num_steps, np.array([slot])).blocks.tolist()) for slot in range(lanes)]


def test_a_lane_keeps_its_blocks_over_epochs_without_exchange() -> None:
    assert lane_blocks(0.0, epoch=0) == lane_blocks(0.0, epoch=7)


def test_exchange_deals_that_share_of_a_lane_anew() -> None:
    home = lane_blocks(0.0, epoch=0)
    for epoch in (0, 1, 6):
        # A quarter of the lanes is dealt, and a dealt block finds its own lane again once in four.
        kept = [len(own & now) / 200 for own, now in zip(home, lane_blocks(0.25, epoch), strict=True)]
        assert all(0.75 <= share <= 1 for share in kept)
        assert np.mean(kept) == pytest.approx(0.75 + 0.25 / 4, abs=0.03)
    mixed = [len(own & now) / 200 for own, now in zip(home, lane_blocks(1.0, epoch=1), strict=True)]
    assert np.mean(mixed) == pytest.approx(0.25, abs=0.06)


def test_epochs_and_seeds_differ() -> None:
    shape = DataShape(num_samples=10_000, block_samples=10, num_bytes=10_000)
    scans = [
        scan(
            epoch_order(
                shape, epoch=epoch, batch_size=50, shuffle=ShuffleConfig(seed=seed, mode=mode), last_batch="drop"
            )
        )
        for seed in (0, 1)
        for epoch in (0, 1)
        for mode in ("block", "full")
    ]
    for one, other in itertools.combinations(scans, 2):
        assert (one == other).mean() < 0.01


def test_without_shuffle_samples_come_as_the_manifest_lists_them() -> None:
    order = epoch_order(
        DataShape(num_samples=10, block_samples=3, num_bytes=10),
        epoch=4,
        batch_size=4,
        shuffle=ShuffleConfig(mode="none"),
        last_batch="pad",
    )
    assert scan(order).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, -1, -1]]
    assert order.next_block(3) == 0


def test_a_window_wider_than_a_batch_and_a_block_keeps_the_samples_of_a_block_apart() -> None:
    shape = DataShape(num_samples=40_960, block_samples=8, num_bytes=40_960)
    for lanes in (8, 64):
        P, g = 2 * (64 // lanes + 8), 64 // lanes
        window = lanes * 8 * P
        shuffle = ShuffleConfig(lanes=lanes, window=window)
        order = epoch_order(shape, epoch=0, batch_size=64, shuffle=shuffle, last_batch="drop")
        assert order.signature.window_blocks == P >= g + 8
        steady = order.ids(100, 400) // 8
        assert all(np.unique(step).size == 64 for step in steady)


def test_never_more_blocks_are_open_than_the_window_has() -> None:
    shape = DataShape(num_samples=20_000, block_samples=10, num_bytes=20_000)
    shuffle = ShuffleConfig(lanes=4, window=0.1)
    order = epoch_order(shape, epoch=0, batch_size=16, shuffle=shuffle, last_batch="partial")
    use = order.blocks(0, order.num_steps, np.arange(16))
    open_blocks = [int(((use.first <= step) & (use.last >= step)).sum()) for step in range(order.num_steps)]
    # The step itself touches blocks at both ends of the window.
    assert max(open_blocks) <= 4 * (order.signature.window_blocks + 16)


@pytest.mark.parametrize("num_samples", [10**9, 10**12])
def test_nothing_grows_with_the_number_of_samples(num_samples: int) -> None:
    shape = DataShape(num_samples=num_samples, block_samples=8, num_bytes=num_samples * 110_000)
    tracemalloc.start()
    try:
        order = epoch_order(shape, epoch=3, batch_size=1024, shuffle=ShuffleConfig(), last_batch="drop")
        ids = order.ids(order.num_steps - 8, 8)
        middle = order.ids(order.num_steps // 2, 8)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert np.unique(np.concatenate([ids, middle])).size == 2 * 8192
    assert ids.min() >= 0
    assert ids.max() < num_samples
    assert peak_bytes < 4_000_000


@pytest.mark.parametrize(
    ("values", "batch_size", "message"),
    [
        ({"lanes": 7}, 32, "shuffle.lanes=7 must divide the global batch of 32 .* nearest that do: 4 or 8"),
        ({"lanes": 64}, 32, "shuffle.lanes=64 .* 32"),
        ({"lanes": 0}, 32, "shuffle.lanes=0 .* 1"),
        ({"lanes": "many"}, 32, "shuffle.lanes='many' is neither a number nor 'auto'"),
        ({"mode": "random"}, 32, "shuffle.mode='random' is not one of block, full, none"),
        ({"exchange": 1.5}, 32, "shuffle.exchange=1.5"),
        ({"window": "much"}, 32, "shuffle.window='much'"),
        ({}, 0, "loader.global_batch_size=0"),
        ({}, 2000, "1000 samples do not fill one global batch of 2000 .*at most 1000, or loader.last_batch=partial"),
    ],
)
def test_what_can_never_work_is_refused_with_the_numbers(
    values: dict[str, object], batch_size: int, message: str
) -> None:
    shape = DataShape(num_samples=1000, block_samples=4, num_bytes=1000)
    with pytest.raises(ConfigError, match=message):
        epoch_order(
            shape,
            epoch=0,
            batch_size=batch_size,
            shuffle=ShuffleConfig(**values),
            last_batch="drop",  # type: ignore[arg-type]
        )


def test_an_unknown_tail_policy_an_empty_set_and_a_negative_epoch_are_refused() -> None:
    shape = DataShape(num_samples=10, block_samples=4, num_bytes=10)
    with pytest.raises(ConfigError, match=r"loader.last_batch='keep' is not one of drop, partial, pad"):
        epoch_order(shape, epoch=0, batch_size=2, shuffle=ShuffleConfig(), last_batch="keep")
    with pytest.raises(ConfigError, match="epoch=-1"):
        epoch_order(shape, epoch=-1, batch_size=2, shuffle=ShuffleConfig(), last_batch="drop")
    empty = DataShape(num_samples=0, block_samples=4, num_bytes=0)
    with pytest.raises(ConfigError, match="nothing to order"):
        epoch_order(empty, epoch=0, batch_size=2, shuffle=ShuffleConfig(), last_batch="pad")


def test_the_order_is_part_of_the_format() -> None:
    # A saved state counts on it: whoever changes these numbers breaks every resume.
    shape = DataShape(num_samples=50, block_samples=4, num_bytes=50)
    shuffle = ShuffleConfig(seed=3, lanes=2, window=0.5, exchange=0.5)
    order = epoch_order(shape, epoch=1, batch_size=8, shuffle=shuffle, last_batch="pad")
    assert scan(order).tolist() == PINNED_IDS


def test_the_worked_example_of_the_documentation_is_true() -> None:
    page = Path(__file__).parents[3] / "docs" / "order.md"
    result = doctest.testfile(str(page), module_relative=False)
    assert result.attempted > 5
    assert result.failed == 0


class TestBlockOrder(OrderContract):
    mode = "block"

    def make_order(self, epoch: int) -> EpochOrder:
        shape = DataShape(num_samples=437, block_samples=6, num_bytes=437)
        shuffle = ShuffleConfig(mode=self.mode, seed=1, lanes=4, exchange=0.3, window=0.3)
        return epoch_order(shape, epoch=epoch, batch_size=20, shuffle=shuffle, last_batch="pad")

    def block_of(self, sample: int) -> int:
        return sample // 6


class TestFullOrder(TestBlockOrder):
    mode = "full"


class TestManifestOrder(TestBlockOrder):
    mode = "none"
