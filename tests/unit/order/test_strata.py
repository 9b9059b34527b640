"""Blocks that a node keeps, spread evenly between those that it streams."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dalipipe.cache.policies import block_hash
from dalipipe.errors import ConfigError
from dalipipe.order import ShuffleConfig, epoch_order
from dalipipe.order.hashing import Purpose, fold, seed_key
from dalipipe.order.repeat import Repeat
from dalipipe.order.sequence import signature_lanes
from dalipipe.order.strata import Strata
from dalipipe.shards.shape import DataShape


@st.composite
def sizes(draw: st.DrawFn) -> tuple[int, int, int, int]:
    num_rows = draw(st.integers(2, 150))
    lanes = draw(st.integers(1, 16))
    return num_rows, draw(st.integers(1, num_rows - 1)), lanes, draw(st.integers(0, lanes - 1))


@settings(deadline=None, max_examples=40)
@given(size=sizes(), seed=st.integers(0, 2**32))
def test_every_row_comes_once_evenly_by_kind_and_can_be_found_again(size: tuple[int, int, int, int], seed: int) -> None:
    num_rows, num_kept, lanes, lane = size
    strata = Strata(num_rows=num_rows, num_kept=num_kept, lanes=lanes)
    key = fold(seed_key(seed, Purpose.ROW), lane)
    rows = strata.row(np.arange(num_rows), np.array([lane]), key)
    assert sorted(rows.tolist()) == list(range(num_rows))
    assert [strata.entry(row, lane, key) for row in rows.tolist()] == list(range(num_rows))
    streamed = np.concatenate([[0], np.cumsum(rows >= num_kept)])
    share = 1 - num_kept / num_rows
    for span in (1, 7, num_rows // 2):
        counts = streamed[span:] - streamed[:-span] if span else np.zeros(1)
        assert np.abs(counts - share * span).max(initial=0) < 1 + 1e-9


SHAPE = DataShape(num_samples=12_003, block_samples=8, num_bytes=12_003 * 100)


def order(epoch: int, kept: float, seed: int = 1, **options: object) -> object:
    shuffle = ShuffleConfig(seed=seed, lanes=16, window=0.02, kept=kept, **options)  # type: ignore[arg-type]
    return epoch_order(SHAPE, epoch=epoch, batch_size=64, shuffle=shuffle, last_batch="partial")


@pytest.mark.parametrize("kept", [0.0, 0.3, 1.0])
def test_every_sample_comes_once_and_the_next_block_is_the_one_that_follows(kept: float) -> None:
    one = order(2, kept)
    ids = one.ids(0, one.num_steps)  # type: ignore[attr-defined]
    assert sorted(ids[ids >= 0].tolist()) == list(range(SHAPE.num_samples))
    seen, block = set(), 5
    for _ in range(SHAPE.num_blocks):
        block = one.next_block(block)  # type: ignore[attr-defined]
        seen.add(block)
    assert len(seen) > SHAPE.num_blocks // 17


def demand(epoch: int, kept: float, seed: int) -> np.ndarray:
    """New streamed blocks in every 8 steps (64 blocks open, half of them streamed), ramps left out."""
    one = order(epoch, kept, seed)
    rank = signature_lanes(SHAPE, one.signature).keep_rank if kept else block_hash  # type: ignore[attr-defined]
    use = one.blocks(0, one.num_steps, np.arange(64))  # type: ignore[attr-defined]
    streamed = np.array([rank(block) >= 0.5 for block in use.blocks.tolist()])
    counts = np.bincount(use.first[streamed], minlength=one.num_steps)[40:-40]  # type: ignore[attr-defined]
    return np.convolve(counts, np.ones(8), "valid")


@pytest.mark.parametrize(("epoch", "seed"), [(0, 1), (3, 9)])
def test_the_lake_sees_an_even_demand_where_chance_would_make_bursts(epoch: int, seed: int) -> None:
    even, chance = demand(epoch, 0.5, seed), demand(epoch, 0.0, seed)
    assert abs(even.mean() - 32) < 1
    assert even.std() < 0.6 * chance.std()
    assert even.max() < chance.max()


def test_which_blocks_are_kept_does_not_depend_on_the_seed() -> None:
    ranks = [signature_lanes(SHAPE, order(0, 0.5, seed).signature).keep_rank for seed in (1, 77)]  # type: ignore[attr-defined]
    assert [ranks[0](block) for block in range(200)] == [ranks[1](block) for block in range(200)]


def test_ranks_are_spread_evenly() -> None:
    rank = signature_lanes(SHAPE, order(0, 0.4).signature).keep_rank  # type: ignore[attr-defined]
    ranks = np.sort([rank(block) for block in range(SHAPE.num_blocks)])
    assert np.abs(ranks - np.arange(SHAPE.num_blocks) / SHAPE.num_blocks).max() < 0.01


@pytest.mark.parametrize("options", [{"kept": 1.5}, {"kept": 0.5, "exchange": 0.1}, {"kept": 0.5, "mode": "full"}])
def test_what_cannot_be_even_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"shuffle\.kept"):
        epoch_order(SHAPE, epoch=0, batch_size=64, shuffle=ShuffleConfig(**options), last_batch="drop")  # type: ignore[arg-type]


def test_hot_samples_and_kept_blocks_do_not_go_together() -> None:
    with pytest.raises(ConfigError, match=r"data\.repeat"):
        epoch_order(
            SHAPE,
            epoch=0,
            batch_size=64,
            shuffle=ShuffleConfig(kept=0.5),
            last_batch="drop",
            repeats=[Repeat(start=0, stop=10, factor=2)],
        )
