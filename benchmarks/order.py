"""Does the order mix as well as a full shuffle, at constant demand and at no cost?

Run: python benchmarks/order.py
"""

from __future__ import annotations

import time

import numpy as np

from dalipipe.order import EpochOrder, ShuffleConfig, epoch_order
from dalipipe.order.quality import collision_ratio, design_effect, multiset_deviation, recurrence
from dalipipe.shards.shape import DataShape

NUM_SHARDS, SHARD_SAMPLES, BATCH_SIZE, BLOCK_SAMPLES = 1024, 256, 1024, 8
SAMPLE_BYTES = 110_000


def make_order(num_samples: int, epoch: int, lanes: int, batch_size: int = BATCH_SIZE) -> EpochOrder:
    """The order of `num_samples` samples of 110 kB in blocks of 8, with a window of 5 %."""
    shape = DataShape(num_samples=num_samples, block_samples=BLOCK_SAMPLES, num_bytes=num_samples * SAMPLE_BYTES)
    shuffle = ShuffleConfig(seed=3, window=0.05, lanes=lanes)
    return epoch_order(shape, epoch=epoch, batch_size=batch_size, shuffle=shuffle, last_batch="partial")


def print_quality(lanes: int) -> None:
    """One line of mixing figures: every shard is a class of its own, the worst case."""
    num_samples = NUM_SHARDS * SHARD_SAMPLES
    epochs = [order.ids(0, order.num_steps) for order in (make_order(num_samples, epoch, lanes) for epoch in (0, 1))]
    ratios = [collision_ratio(ids, SHARD_SAMPLES, num_samples) for ids in epochs]
    effects = [design_effect(ids, SHARD_SAMPLES, num_samples, rho=0.01) for ids in epochs]
    deviation = max(multiset_deviation(ids, num_samples) for ids in epochs)
    print(
        f"L={lanes:3d}  R={max(ratios):.3f}  DEFF(rho=.01)={max(effects):.4f}  "
        f"recurrence={recurrence(*epochs):.3f}  multiset deviation={deviation:.0f}"
    )


def print_demand(lanes: int) -> None:
    """New bytes that a step needs over the bytes that it consumes, after the window has filled."""
    order = make_order(NUM_SHARDS * SHARD_SAMPLES, 1, lanes)
    use = order.blocks(0, order.num_steps, np.arange(BATCH_SIZE, dtype=np.int64))
    ratio = np.bincount(use.first, minlength=order.num_steps) * BLOCK_SAMPLES / BATCH_SIZE
    # The last block of a lane enters when the window starts to drain; the window filled over as many steps.
    ramp = order.num_steps * 5 // 100 + 1
    steady = ratio[ramp : order.num_steps - ramp]
    print(
        f"L={lanes:3d}  new / consumed bytes after ramp-in: mean={steady.mean():.3f}  "
        f"p99={np.quantile(steady, 0.99):.3f}  max={steady.max():.3f}  (while the window fills: max={ratio.max():.1f})"
    )


def print_speed(num_samples: int) -> None:
    """Time an index when 8,192 are planned at once: best and median of 30."""
    order = make_order(num_samples, 1, 64)
    times_s = []
    for number in range(30):
        step = order.num_steps * (number + 1) // 32
        start_s = time.perf_counter()
        order.ids(step, 8)
        times_s.append(time.perf_counter() - start_s)
    best_ns, median_ns = (value / 8192 * 1e9 for value in (min(times_s), float(np.median(times_s))))
    print(f"N={num_samples:.0e}  {best_ns:.0f} ns an index at best, {median_ns:.0f} ns at the median")


def print_resume() -> None:
    """Time from nothing to the ids of step 10**6 of 10**9 samples (a batch of 512, so that there is such a step)."""
    start_s = time.perf_counter()
    ids = make_order(10**9, 1, 64, batch_size=512).ids(10**6, 1)
    print(f"resume at step 1,000,000 of N=1e+09: {(time.perf_counter() - start_s) * 1e3:.2f} ms to {ids.size} ids")


if __name__ == "__main__":
    for num_lanes in (8, 64):
        print_quality(num_lanes)
    for num_lanes in (8, 64):
        print_demand(num_lanes)
    for size in (10**6, 10**9, 10**12):
        print_speed(size)
    print_resume()
