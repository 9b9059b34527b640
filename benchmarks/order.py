"""Does the order mix as well as a full shuffle, at constant demand on the lake, and at no cost?

    python benchmarks/order.py [--json] [--quick]

Mixing: 1,024 shards of 256 samples, each shard a class of its own (the worst case), global batch 1,024, blocks of 8,
and a window of 5 % of the data in total. Peers with the same memory, run here: a buffer that gives a random one of its
samples for each that comes in, over shards in random order; and a pool of whole shards that is filled, shuffled and
drained. The floor is a uniform permutation. Demand: new bytes that a step needs over the bytes that it consumes, once
the window has filled. Cost: time an index, against `numpy.random.permutation` of as many; and what one of 1,024 ranks
pays for a step, against planning the whole global batch. --quick takes fewer repetitions.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from dalipipe.order import EpochOrder, ShuffleConfig, epoch_order, rank_slots
from dalipipe.order.quality import collision_ratio, design_effect, multiset_deviation, recurrence
from dalipipe.shards.shape import DataShape

NUM_SHARDS, SHARD_SAMPLES, BATCH_SIZE, BLOCK_SAMPLES = 1024, 256, 1024, 8
NUM_SAMPLES = NUM_SHARDS * SHARD_SAMPLES
SAMPLE_BYTES = 110_000
WINDOW = 0.05

Ids = npt.NDArray[np.int64]


def make_order(num_samples: int, epoch: int, lanes: int, batch_size: int = BATCH_SIZE) -> EpochOrder:
    """The order of `num_samples` samples of 110 kB in blocks of 8, with a window of 5 %."""
    shape = DataShape(num_samples=num_samples, block_samples=BLOCK_SAMPLES, num_bytes=num_samples * SAMPLE_BYTES)
    shuffle = ShuffleConfig(seed=3, window=WINDOW, lanes=lanes)
    return epoch_order(shape, epoch=epoch, batch_size=batch_size, shuffle=shuffle, last_batch="drop")


def permutation(epoch: int) -> Ids:
    """Every sample anywhere: the floor."""
    return np.random.default_rng([9, epoch]).permutation(NUM_SAMPLES)


def buffer_shuffle(epoch: int) -> Ids:
    """Shards in random order through a buffer of 5 %: each sample that comes in pushes out a random one."""
    rng = np.random.default_rng([9, epoch])
    stream = (rng.permutation(NUM_SHARDS)[:, None] * SHARD_SAMPLES + np.arange(SHARD_SAMPLES)).reshape(-1)
    size = int(WINDOW * NUM_SAMPLES)
    buffer = stream[:size].copy()
    places = rng.integers(0, size, NUM_SAMPLES - size)
    out = np.empty(NUM_SAMPLES - size, dtype=np.int64)
    for number, (place, sample) in enumerate(zip(places.tolist(), stream[size:].tolist(), strict=True)):
        out[number] = buffer[place]
        buffer[place] = sample
    return np.concatenate([out, rng.permutation(buffer)])


def pool_shuffle(epoch: int) -> Ids:
    """Whole shards, 5 % at a time: a pool is filled, shuffled and drained before the next is filled."""
    rng = np.random.default_rng([9, epoch])
    shards = rng.permutation(NUM_SHARDS)
    size = int(WINDOW * NUM_SHARDS)
    pools = [shards[start : start + size] for start in range(0, NUM_SHARDS, size)]
    return np.concatenate(
        [rng.permutation((pool[:, None] * SHARD_SAMPLES + np.arange(SHARD_SAMPLES)).reshape(-1)) for pool in pools]
    )


def mixing(ids: Callable[[int], Ids]) -> dict[str, float]:
    """The worse of two epochs for each figure."""
    epochs = [ids(epoch).reshape(-1, BATCH_SIZE) for epoch in (0, 1)]
    return {
        "R": max(collision_ratio(each, SHARD_SAMPLES, NUM_SAMPLES) for each in epochs),
        "DEFF": max(design_effect(each, SHARD_SAMPLES, NUM_SAMPLES, rho=0.01) for each in epochs),
        "recurrence": recurrence(*epochs),
        "multiset deviation": max(multiset_deviation(each, NUM_SAMPLES) for each in epochs),
    }


def demand(ids: Ids, group_samples: int) -> dict[str, float]:
    """New bytes a step needs over bytes it consumes, when the unit of reading is `group_samples`."""
    steps = np.arange(ids.size) // BATCH_SIZE
    first = np.unique(ids // group_samples, return_index=True)[1]
    ratio = np.bincount(steps[first], minlength=int(steps[-1]) + 1) * group_samples / BATCH_SIZE
    # The window fills at the start and drains at the end, over about as many steps as it holds.
    ramp = int(WINDOW * ratio.size) + 1
    steady = ratio[ramp:-ramp]
    return {"new/consumed mean": float(steady.mean()), "new/consumed p99": float(np.quantile(steady, 0.99))}


def ns_an_index(call: Callable[[int], int], repetitions: int) -> float:
    """The best of some repetitions; `call` returns how many indices it computed."""
    best = float("inf")
    for number in range(repetitions):
        begin_s = time.perf_counter()
        count = call(number)
        best = min(best, (time.perf_counter() - begin_s) / count * 1e9)
    return best


def cost(repetitions: int) -> dict[str, float]:
    """Nanoseconds an index when 8,192 are planned at once, and their ratio to a table of numpy's."""
    found: dict[str, float] = {}
    table = ns_an_index(lambda number: np.random.default_rng(number).permutation(10**6).size, max(3, repetitions // 8))
    for num_samples in (10**6, 10**9, 10**12):
        order = make_order(num_samples, 1, 64)
        span = max(1, order.num_steps - 8)
        found[f"ns an index, N=1e{len(str(num_samples)) - 1}"] = ns_an_index(
            lambda number, order=order, span=span: order.ids(number * 7919 % span, 8).size,  # type: ignore[misc]
            repetitions,
        )
    found["ns an index, numpy.random.permutation(1e6)"] = table
    found["order / numpy, N=1e6"] = found["ns an index, N=1e6"] / table
    return found


def rank_share(repetitions: int) -> dict[str, float]:
    """What a step costs one of 1,024 ranks (batch 8 each), planned in its own windows, against the whole batch."""
    world_size, batch_size = 1024, 8192
    order = make_order(10**9, 1, 64, batch_size=batch_size)
    slots = rank_slots(batch_size, world_size, 700)
    num_steps = 8192 // slots.size
    own = ns_an_index(lambda number: order.ids(number, num_steps, slots).shape[0], repetitions)
    whole = ns_an_index(lambda number: order.ids(number, 1).shape[0], repetitions)
    return {"us a step, own slots": own / 1e3, "us a step, whole batch": whole / 1e3, "whole / own": whole / own}


def resume_ms() -> float:
    """Milliseconds from nothing to the ids of step 10**6 of 10**9 samples."""
    begin_s = time.perf_counter()
    make_order(10**9, 1, 64, batch_size=512).ids(10**6, 1)
    return (time.perf_counter() - begin_s) * 1e3


def measure(repetitions: int) -> dict[str, dict[str, float]]:
    """All figures by row."""
    rows: dict[str, dict[str, float]] = {}
    for lanes in (8, 64):

        def ordered(epoch: int, lanes: int = lanes) -> Ids:
            order = make_order(NUM_SAMPLES, epoch, lanes)
            return order.ids(0, order.num_steps).reshape(-1)

        rows[f"this order, {lanes} lanes"] = mixing(ordered) | demand(ordered(1), BLOCK_SAMPLES)
    rows["uniform permutation"] = mixing(permutation)
    rows["buffer over shards"] = mixing(buffer_shuffle) | demand(buffer_shuffle(1), SHARD_SAMPLES)
    rows["pool of whole shards"] = mixing(pool_shuffle) | demand(pool_shuffle(1), SHARD_SAMPLES)
    rows["cost"] = cost(repetitions)
    rows["one rank of 1,024"] = rank_share(repetitions)
    rows["resume"] = {"ms to the ids of step 1e6 of N=1e9": resume_ms()}
    return rows


def main() -> None:
    """Prints one line a row, or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    rows = measure(5 if args.quick else 40)
    if args.json:
        print(json.dumps(rows))
        return
    for name, figures in rows.items():
        print(f"{name:<22} {'  '.join(f'{label} {value:.4g}' for label, value in figures.items())}")


if __name__ == "__main__":
    main()
