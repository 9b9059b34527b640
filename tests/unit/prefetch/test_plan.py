"""A rank plans its own slots of the global batch, wherever it starts and however large the job is."""

from __future__ import annotations

import time
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from dalipipe.order import EpochOrder, Ids, ShuffleConfig, epoch_order, rank_slots
from dalipipe.order.contract import Order
from dalipipe.order.recipe import orders
from dalipipe.prefetch.plan import StepPlan, StepPlanner
from dalipipe.shards.digest import digest64
from dalipipe.shards.fields import fields_of
from dalipipe.shards.header import (
    HEADER_NAME,
    SHARDS_NAME,
    Header,
    decode_shards,
    encode_header,
    encode_shards,
    identity_of,
)
from dalipipe.shards.manifest import Manifest
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


def open_huge(num_samples: int, num_shards: int = 1000) -> Manifest:
    """A manifest as it is opened from its two files, of shards that are never read."""
    shard_samples = num_samples // num_shards
    shards = encode_shards(
        names=[f"shard-{number:06d}.tar" for number in range(num_shards)],
        num_bytes=[shard_samples * 100_000] * num_shards,
        num_samples=[shard_samples] * num_shards,
        checksums=[1] * num_shards,
        index_checksums=[2] * num_shards,
        index_contents=[3] * num_shards,
    )
    header = Header(
        kind="images",
        fields=fields_of(["jpg", "cls"]),
        classes=(),
        block_samples=BLOCK_SAMPLES,
        num_samples=num_samples,
        num_shards=num_shards,
        num_bytes=num_samples * 100_000,
        shards_checksum=digest64(shards),
    )
    header = replace(header, identity=identity_of(header, decode_shards(shards, header.shards_checksum)))
    return Manifest.open({HEADER_NAME: encode_header(header), SHARDS_NAME: shards}.__getitem__)


def plan_at(num_samples: int, step: int) -> tuple[StepPlan, float, int]:
    """The plan of `step` of rank 63 of 64 in epoch 7, from nothing; the seconds and the peak of memory that it took."""
    open_huge(1_000_000)  # what pyarrow loads at its first use is not counted
    tracemalloc.start()
    try:
        begin_s = time.perf_counter()
        manifest = open_huge(num_samples)
        order = orders(manifest.shapes, batch_size=512, shuffle=ShuffleConfig(), last_batch="drop")
        plan = StepPlanner(order, (7, step), rank_slots(512, 64, 63), manifest.block_of).next_window()[0]
        took_s = time.perf_counter() - begin_s
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert plan.step == step
    np.testing.assert_array_equal(plan.ids, order(7).ids(step, 1)[0][rank_slots(512, 64, 63)])
    return plan, took_s, peak_bytes


def test_resuming_deep_in_a_billion_samples_costs_what_beginning_a_million_costs() -> None:
    """Step 1,000,000 of a manifest of 10**9 samples: under a second, and memory is flat in the number of samples."""
    _, _, small_bytes = plan_at(10**6, 0)
    _, took_s, huge_bytes = plan_at(10**9, 10**6)
    assert took_s < 1
    assert abs(huge_bytes - small_bytes) < 100_000
