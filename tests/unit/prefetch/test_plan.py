"""A rank plans its own slots of the global batch, wherever it starts and however large the job is."""

from __future__ import annotations

import time
import tracemalloc

import numpy as np
import pytest

from dalipipe.order import EpochOrder, Ids, ShuffleConfig, epoch_order, rank_slots
from dalipipe.order.contract import Order
from dalipipe.prefetch.plan import StepPlan, StepPlanner
from dalipipe.shards.shape import DataShape

BLOCK_SAMPLES = 8


def make_order(num_samples: int, batch_size: int, *, epoch: int = 0, last_batch: str = "pad") -> EpochOrder:
    shape = DataShape(num_samples=num_samples, block_samples=BLOCK_SAMPLES, num_bytes=num_samples * 1000)
    return epoch_order(shape, epoch=epoch, batch_size=batch_size, shuffle=ShuffleConfig(), last_batch=last_batch)


class CountingOrder:
    """An order that counts the ids it was asked for."""

    def __init__(self, order: EpochOrder) -> None:
        self._order = order
        self.num_ids = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._order, name)

    def ids(self, step: int, num_steps: int, slots: Ids | None = None) -> Ids:
        found = self._order.ids(step, num_steps, slots)
        self.num_ids += found.size
        return found


def planner(order: Order, slots: Ids, start: tuple[int, int] = (0, 0)) -> StepPlanner:
    return StepPlanner(lambda epoch: order, start, slots, lambda ids: ids // BLOCK_SAMPLES)


def plan_epoch(order: Order, slots: Ids) -> list[StepPlan]:
    plans: list[StepPlan] = []
    mine = planner(order, slots)
    while len(plans) < order.num_steps:
        plans += mine.next_window()
    return plans


def test_a_rank_computes_its_own_ids_and_one_whole_step_where_it_pads() -> None:
    order = make_order(40_001, 1024)
    merged = np.full((order.num_steps, 1024), -1)
    for rank in range(128):
        counting = CountingOrder(order)
        slots = rank_slots(1024, 128, rank)
        plans = plan_epoch(counting, slots)  # type: ignore[arg-type]
        for plan in plans:
            merged[plan.step, slots] = np.where(plan.valid, plan.ids, -1)
        padded = 1024 if not plans[-1].valid.all() else 0
        assert counting.num_ids == order.num_steps * 8 + padded
    np.testing.assert_array_equal(merged, order.ids(0, order.num_steps))


@pytest.mark.parametrize("world_size", [1, 2, 16, 64])
def test_padding_is_the_same_at_every_world_size(world_size: int) -> None:
    order = make_order(1000, 64)
    filled = [plan_epoch(order, rank_slots(64, world_size, rank))[-1].ids for rank in range(world_size)]
    alone = plan_epoch(order, rank_slots(64, 1, 0))[-1].ids
    np.testing.assert_array_equal(np.concatenate(filled), alone)


def test_the_first_plan_deep_in_a_huge_epoch_costs_what_the_first_of_all_costs() -> None:
    """One billion samples, step 1,000,000, no array over samples: the same arithmetic as at step 0."""
    order = make_order(10**9, 512, epoch=7)
    slots = rank_slots(512, 64, 63)
    tracemalloc.start()
    try:
        begin_s = time.perf_counter()
        plan = planner(order, slots, start=(7, 10**6)).next_window()[0]
        took_s = time.perf_counter() - begin_s
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert plan.step == 10**6
    np.testing.assert_array_equal(plan.ids, order.ids(10**6, 1)[0][slots])
    assert took_s < 1
    assert peak_bytes < 8_000_000
