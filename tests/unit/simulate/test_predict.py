"""Whole jobs in made-up time: what must come out whatever the model."""

from __future__ import annotations

import dataclasses
import math
from time import process_time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dalipipe.order.config import ShuffleConfig
from dalipipe.prefetch.config import PrefetchConfig
from dalipipe.shards.shape import DataShape
from dalipipe.simulate.evicting import hit_profile
from dalipipe.simulate.job import Job, Sample, simulate
from dalipipe.simulate.latency import LognormalLatency
from dalipipe.simulate.predict import predict
from dalipipe.simulate.tiers import kept_share

BLOCK_SAMPLES, SAMPLE_BYTES = 8, 10_000
NO_LATENCY = LognormalLatency(0.0, 0.0)


def make_job(num_samples: int = 4096, **changes: Any) -> Job:
    """One GPU, a step of 0.1 s on 8 samples, and a lake without limits. No sample is read twice at the start."""
    num_bytes = num_samples * SAMPLE_BYTES
    job = Job(
        shape=DataShape(num_samples=num_samples, block_samples=BLOCK_SAMPLES, num_bytes=num_bytes),
        num_nodes=1,
        ranks_per_node=1,
        batch_size=8,
        shuffle=ShuffleConfig(),
        prefetch=PrefetchConfig(cold_steps=0),
        memory_cap_bytes=1 << 32,
        last_batch="drop",
        epoch_samples=None,
        replicas=1,
        policy="pin",
        budgets={"node": num_bytes // 2},
        step_s=0.1,
        decode_s=0.0,
        latency=NO_LATENCY,
        lake_rate=None,
        link_rate=None,
        disk_rate=None,
        threads=32,
    )
    return dataclasses.replace(job, **changes)


def needs(job: Job) -> float:
    """Bytes a second that the whole job reads while it never waits."""
    return job.gpu_rate * job.num_gpus


def test_pin_finds_the_share_that_fits() -> None:
    job = make_job(8192, budgets={"node": int(0.3 * 8192 * SAMPLE_BYTES)})
    outcome = predict(job)
    assert "every step of 2 epochs" in outcome.about
    assert outcome.first.hit_ratio == 0.0
    assert outcome.later.hit_ratio == pytest.approx(0.3, abs=0.02)
    assert outcome.first.lake_bytes == job.shape.num_bytes
    assert outcome.first.read_again == 1.0


def test_pin_is_exact_where_only_a_part_is_simulated() -> None:
    shape = DataShape(num_samples=10**9, block_samples=BLOCK_SAMPLES, num_bytes=10**9 * SAMPLE_BYTES)
    share = 0.4
    nodes = 4
    budget = int(share * shape.num_bytes / nodes)
    job = make_job(
        shape=shape,
        num_nodes=nodes,
        ranks_per_node=4,
        budgets={"node": budget},
        shuffle=ShuffleConfig(lanes=64, window="1GB"),
    )
    outcome = predict(dataclasses.replace(job, batch_size=16), num_steps=6)
    assert outcome.later.hit_ratio == pytest.approx(share, abs=1e-6)
    read = outcome.later.num_steps * 16 * 16 * SAMPLE_BYTES
    assert outcome.later.lake_bytes == pytest.approx((1 - share) * read, rel=1e-6)
    assert outcome.first.lake_bytes == pytest.approx(read, rel=1e-6)


@pytest.mark.parametrize(
    ("share", "num_blocks", "tolerance"),
    [
        (0.6, 400, 0.06),
        *(pytest.param(share, 2000, 0.025, marks=pytest.mark.slow) for share in (0.1, 0.35, 0.6, 0.9)),
    ],
)
def test_lru_finds_what_stack_distances_say(share: float, num_blocks: int, tolerance: float) -> None:
    num_samples = num_blocks * BLOCK_SAMPLES
    job = make_job(num_samples, policy="lru", budgets={"node": int(share * num_samples * SAMPLE_BYTES)})
    found = hit_profile(job, seed=0)
    assert found.mean == pytest.approx(share + (1 - share) * math.log(1 - share), abs=tolerance)
    assert found.at(0.0) > found.at(0.95)


def test_a_cache_of_less_than_a_block_in_five_hundred_finds_what_fits() -> None:
    shape = DataShape(num_samples=10**7, block_samples=BLOCK_SAMPLES, num_bytes=10**7 * SAMPLE_BYTES)
    job = make_job(shape=shape, policy="lfu", budgets={"node": shape.num_bytes // 1024}, num_nodes=64)
    found = hit_profile(dataclasses.replace(job, shuffle=ShuffleConfig(lanes=64)), seed=0)
    assert found.mean == pytest.approx(64 / 1024, abs=0.01)


@given(shares=st.lists(st.integers(0, 4096 * SAMPLE_BYTES), min_size=2, max_size=2))
def test_more_cache_never_finds_less(shares: list[int]) -> None:
    low, high = sorted(shares)
    job = make_job()
    assert kept_share({"node": low}, job.shape, job.readers()) <= kept_share({"node": high}, job.shape, job.readers())


def test_more_cache_never_lowers_hits_of_a_simulated_epoch() -> None:
    found = [
        predict(make_job(2048, budgets={"node": int(share * 2048 * SAMPLE_BYTES)})).later.hit_ratio
        for share in (0.1, 0.3, 0.5, 0.7, 1.0)
    ]
    assert found == sorted(found)
    assert found[-1] == 1.0


def test_more_of_the_lake_never_lowers_utilisation() -> None:
    job = make_job(2048, policy="stream", budgets={}, latency=LognormalLatency(0.05, 0.3))
    found = [predict(dataclasses.replace(job, lake_rate=share * needs(job))) for share in (0.3, 0.6, 0.9, 1.2, 2, 8)]
    for epoch in ("first", "later"):
        au = [getattr(outcome, epoch).au for outcome in found]
        assert au == sorted(au)
        assert au[0] < 0.7
        assert au[-1] > 0.99
    assert 0.25 < found[0].first.au < 0.4


@given(shares=st.lists(st.floats(0.2, 3.0), min_size=2, max_size=2), seed=st.integers(0, 1000), streams=st.booleans())
@settings(max_examples=15, deadline=None)
def test_no_pair_of_lakes_has_the_slower_one_ahead(shares: list[float], seed: int, streams: bool) -> None:
    job = make_job(1024, latency=LognormalLatency(0.05, 0.3), prefetch=PrefetchConfig())
    if streams:
        job = dataclasses.replace(job, policy="stream", budgets={})
    slow, fast = (
        predict(dataclasses.replace(job, lake_rate=share * needs(job)), seed=seed) for share in sorted(shares)
    )
    assert slow.first.au <= fast.first.au + 1e-3
    assert slow.later.au <= fast.later.au + 1e-3


def test_a_lake_that_gives_half_feeds_half() -> None:
    job = make_job(4096, policy="stream", budgets={})
    outcome = predict(dataclasses.replace(job, lake_rate=needs(job) / 2))
    assert outcome.first.au == pytest.approx(0.5, abs=0.03)
    # Blocks come in lumps, one for each lane: few steps wait, and long.
    assert 10 < sum(outcome.first.stalls.values()) < 100


def test_samples_that_are_read_alone_at_the_start_bring_the_first_batch_sooner() -> None:
    job = make_job(2048, policy="stream", budgets={}, latency=LognormalLatency(0.01, 0.02))
    blocks = predict(dataclasses.replace(job, lake_rate=2 * needs(job)))
    alone = predict(dataclasses.replace(job, lake_rate=2 * needs(job), prefetch=PrefetchConfig()))
    assert alone.first.first_wait_s < 0.7 * blocks.first.first_wait_s


def test_nothing_waits_for_a_perfect_lake() -> None:
    outcome = predict(make_job(2048, policy="stream", budgets={}))
    assert outcome.first.au == outcome.later.au == pytest.approx(1.0)
    assert not sum(outcome.later.stalls.values())


def test_decoding_slower_than_training_is_what_counts() -> None:
    outcome = predict(make_job(2048, decode_s=0.2))
    assert outcome.later.au == pytest.approx(0.5, abs=0.01)


def test_the_node_link_and_disk_count_like_the_lake() -> None:
    job = make_job(4096, policy="stream", budgets={})
    linked = predict(dataclasses.replace(job, link_rate=needs(job) / 2))
    assert linked.first.au == pytest.approx(0.5, abs=0.03)
    kept = make_job(4096, budgets={"node": 4096 * SAMPLE_BYTES}, disk_rate=needs(job) / 2)
    slow_disk = predict(kept)
    assert slow_disk.first.au > 0.95
    assert slow_disk.later.au == pytest.approx(0.5, abs=0.08)


def test_memory_before_disk() -> None:
    half = 2048 * SAMPLE_BYTES // 2
    slow = make_job(2048, disk_rate=1000.0, budgets={"memory": 2048 * SAMPLE_BYTES})
    assert predict(slow).later.au == pytest.approx(1.0)
    both = predict(make_job(2048, budgets={"memory": half, "node": half}))
    assert both.later.hit_ratio == 1.0
    assert both.later.lake_bytes == 0


def test_the_same_seed_gives_the_same_answer() -> None:
    job = make_job(1024, latency=LognormalLatency(0.2, 3.0), lake_rate=1.2 * needs(make_job()))
    assert predict(job, seed=3) == predict(job, seed=3)
    assert predict(job, seed=3) != predict(job, seed=4)


def test_a_tail_costs_a_large_job_more() -> None:
    """The slowest of many requests is slower: in lock-step, more ranks wait for it."""
    shape = DataShape(num_samples=10**7, block_samples=BLOCK_SAMPLES, num_bytes=10**7 * SAMPLE_BYTES)
    au = []
    for num_nodes in (1, 256):
        job = make_job(
            shape=shape,
            num_nodes=num_nodes,
            ranks_per_node=2,
            policy="stream",
            budgets={},
            latency=LognormalLatency(0.05, 0.5),
            prefetch=PrefetchConfig(depth=10),
            shuffle=ShuffleConfig(lanes=2 * num_nodes),
        )
        au.append(predict(job, num_steps=32).first.au)
    assert au[0] > au[1] + 0.02


def test_ranks_that_share_lanes_ask_for_blocks_again() -> None:
    shape = DataShape(num_samples=10**6, block_samples=BLOCK_SAMPLES, num_bytes=10**6 * SAMPLE_BYTES)
    job = make_job(shape=shape, num_nodes=8, ranks_per_node=2, policy="stream", budgets={})
    apart = predict(dataclasses.replace(job, shuffle=ShuffleConfig(lanes=16)), num_steps=24)
    shared = predict(dataclasses.replace(job, shuffle=ShuffleConfig(lanes=4)), num_steps=24)
    assert apart.later.read_again == 1.0
    assert shared.later.read_again > 2.0
    assert shared.later.lake_bytes > 2 * apart.later.lake_bytes


def test_ranks_that_share_the_lanes_of_their_node_read_the_lake_once() -> None:
    job = make_job(262_144, num_nodes=16, ranks_per_node=4, batch_size=32, shuffle=ShuffleConfig(lanes=16))
    job = dataclasses.replace(job, budgets={"node": job.shape.num_bytes})
    outcome = predict(job, num_steps=48)
    assert "4 of 64 GPUs" in outcome.about
    assert outcome.first.read_again > 2
    assert outcome.first.lake_bytes == pytest.approx(job.shape.num_bytes, rel=0.15)
    assert outcome.later.lake_bytes == 0


def test_open_blocks_above_the_memory_cap_are_fetched_again() -> None:
    shape = DataShape(num_samples=10**6, block_samples=BLOCK_SAMPLES, num_bytes=10**6 * SAMPLE_BYTES)
    job = make_job(shape=shape, policy="stream", budgets={}, memory_cap_bytes=20_000_000)
    assert predict(job, num_steps=60).later.read_again > 1.5
    assert predict(dataclasses.replace(job, memory_cap_bytes=10**9), num_steps=60).later.read_again == 1.0


@pytest.mark.parametrize("num_samples", [10**7, 10**9, 10**15])
def test_jobs_that_ask_for_nearly_every_block_again_are_simulated_in_seconds(num_samples: int) -> None:
    """Eight GPUs of 256 samples a step, 4 GiB of memory, and open blocks that take from a little more to far more."""
    shape = DataShape(num_samples=num_samples, block_samples=38, num_bytes=num_samples * 110_000)
    job = make_job(
        shape=shape,
        ranks_per_node=8,
        batch_size=256,
        policy="stream",
        budgets={},
        latency=LognormalLatency(0.05, 0.3),
        step_s=0.1,
    )
    begun_s = process_time()
    outcome = predict(job)
    assert process_time() - begun_s < 25, "a third of it on a machine of 2024"
    assert 1.5 < outcome.later.read_again <= 38.5
    assert outcome.later.au < 0.97
    assert "of 8 GPUs" in outcome.about


def test_eight_thousand_gpus() -> None:
    shape = DataShape(num_samples=10**9, block_samples=32, num_bytes=10**9 * 100_000)
    job = make_job(
        shape=shape,
        num_nodes=4096,
        ranks_per_node=2,
        batch_size=128,
        policy="stream",
        budgets={},
        latency=LognormalLatency(0.02, 0.1),
        shuffle=ShuffleConfig(lanes=8192),
        prefetch=PrefetchConfig(depth=40),
        step_s=0.5,
    )
    found = {}
    for share in (0.5, 2.0):
        outcome = predict(dataclasses.replace(job, lake_rate=share * needs(job)), num_steps=64)
        assert "on 2 of 8,192 GPUs" in outcome.about
        found[share] = outcome.later
    assert found[2.0].lake_bytes == pytest.approx(found[2.0].num_steps * 8192 * 128 * 100_000)
    assert found[0.5].au < 0.65
    assert found[2.0].au > 0.9


def test_steps_of_a_small_job_are_the_orders_own() -> None:
    """Every block of the epoch is brought for the step that needs it first, and once."""
    job = make_job(1024, policy="stream", budgets={}, latency=LognormalLatency(0.01, 0.02))
    order = job.orders()(0)
    use = order.blocks(0, order.num_steps, np.arange(8))
    traces = simulate(job, sample=Sample(nodes=(0,), ranks_a_node=1), start=(0, 0), num_steps=order.num_steps)
    first = [0] * order.num_steps
    for step in use.first.tolist():
        first[step] += 1
    assert [trace.lake_blocks for trace in traces] == first
