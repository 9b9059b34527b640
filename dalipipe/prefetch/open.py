"""From configuration to a running prefetcher."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from dalipipe.cache.contract import Cache
from dalipipe.errors import ConfigError
from dalipipe.order.contract import Order
from dalipipe.prefetch.assemble import Assembler
from dalipipe.prefetch.cold import SampleRanges
from dalipipe.prefetch.config import PrefetchConfig
from dalipipe.prefetch.plan import StepPlanner
from dalipipe.prefetch.schedule import Schedule
from dalipipe.prefetch.warm import EpochWarmer
from dalipipe.prefetch.window import WindowPrefetcher
from dalipipe.shards.manifest import Manifest
from dalipipe.storage.store import Store
from dalipipe.telemetry import Recorder
from dalipipe.units import format_bytes, parse_capacity

# Of the memory for blocks, what those may take that are read by one request.
_MAX_RUN_SHARE = 0.125


def open_prefetcher(
    *,
    orders: Callable[[int], Order],
    start: tuple[int, int],
    slots: npt.NDArray[np.int64],
    manifest: Manifest,
    cache: Cache,
    fields: Sequence[str],
    config: PrefetchConfig,
    recorder: Recorder,
    store: Store | None = None,
    keeps: Callable[[int], bool] | None = None,
) -> WindowPrefetcher:
    """Starts to prefetch the steps of one rank from `start` = (epoch, step) on, over epochs without end.

    Args:
        orders: gives the order of an epoch.
        slots: int64 [b]: the columns of the global batch that this rank loads.
        fields: the fields of a sample that go into `Step.fields`.
        store: where samples can be read alone, so that the first step need not wait for whole blocks; not without.
        keeps: whether the node keeps a block; needed by `prefetch.whole_epoch`.

    Raises:
        ConfigError: a value of `config` can never work, or the data set has no such field.
    """
    if config.threads < 1:
        raise ConfigError(f"prefetch.threads={config.threads} must be at least 1")
    cold_steps = _cold_steps(config.cold_steps)
    if not config.timeout_s > 0:
        raise ConfigError(f"prefetch.timeout_s={config.timeout_s} must be above 0")
    known = [field.name for field in manifest.fields]
    unknown = [name for name in fields if name not in known]
    if unknown:
        raise ConfigError(f"data.fields names {unknown}, which this data set lacks; it has {', '.join(known)}")
    if config.whole_epoch and keeps is None:
        raise ConfigError("prefetch.whole_epoch=true brings blocks to a cache that keeps them; there is none")
    # One thread would read samples one after the other, and come to no block.
    reads_alone = cold_steps != 0 and config.threads > 1
    place = "" if store is None else f"{store.url}/"
    cap_bytes, mean_bytes = _memory(config, manifest)
    most_blocks = max(1, min(cache.request_bytes, int(_MAX_RUN_SHARE * cap_bytes)) // mean_bytes)
    return WindowPrefetcher(
        StepPlanner(orders, start, slots, manifest.block_of),
        Assembler(manifest, cache, fields, recorder),
        cache,
        Schedule(
            cap_bytes=cap_bytes,
            block_bytes=mean_bytes,
            num_samples=lambda block: _num_samples(manifest, block),
            spare_threads=max(1, config.threads // 2),
            warms=config.whole_epoch,
            most_blocks=most_blocks,
        ),
        config=config,
        block_bytes=manifest.block_bytes,
        where=lambda block: ", ".join(f"{place}{shard}" for shard in manifest.shards_of(block)),
        recorder=recorder,
        aside=None if store is None or not reads_alone else SampleRanges(manifest, store, fields, recorder),
        cold_steps=cold_steps,
        warmer=EpochWarmer(orders, start, slots, keeps, most_blocks)
        if config.whole_epoch and keeps is not None
        else None,
    )


def _cold_steps(value: int | str) -> int | None:
    """`prefetch.cold_steps` as a number; None for `auto`."""
    if value == "auto":
        return None
    try:
        number = int(value)
    except ValueError:
        number = -1
    if number < 0:
        raise ConfigError(f"prefetch.cold_steps={value!r} must be auto or a number of steps from 0")
    return number


def _memory(config: PrefetchConfig, manifest: Manifest) -> tuple[int, int]:
    """The cap on blocks in memory, and the mean block, in bytes."""
    host_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    cap_bytes = parse_capacity(config.memory_cap, host_bytes, "prefetch.memory_cap")
    mean_bytes = -(-manifest.num_bytes // manifest.num_blocks)
    if cap_bytes < mean_bytes:
        raise ConfigError(
            f"prefetch.memory_cap={config.memory_cap!r} ({format_bytes(cap_bytes)}) does not hold one block of this "
            f"data set, {format_bytes(mean_bytes)} on average; give at least {mean_bytes} bytes"
        )
    return cap_bytes, mean_bytes


def _num_samples(manifest: Manifest, block: int) -> int:
    start, stop = manifest.block_samples_range(block)
    return stop - start
