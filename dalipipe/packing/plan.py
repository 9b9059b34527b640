"""Which sample goes into which shard: pure arithmetic, the same for any number of workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from dalipipe.errors import ConfigError
from dalipipe.packing.config import PackConfig
from dalipipe.shards.tar import RECORD_BYTES
from dalipipe.units import parse_bytes

MIN_SHARD_BYTES, MAX_SHARD_BYTES = 2**20, 2**32
MAX_BLOCK_BYTES = 4 * 2**20
BLOCKS_PER_SHARD = 32
KINDS = ("images", "tars")
DOTS = ("first", "last")
FORMATS = ("jpeg", "jpg", "webp", "png")
_CHECKS = ("decode", "header", "none")
_PASSES = ("auto", "1", "2")

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """order: int64 [N], the samples (numbers in the listing) in manifest order. cuts: int64 [shards + 1], shard i
    holds order[cuts[i]:cuts[i + 1]]. block_samples: K. num_bytes: about what all shards will take."""

    order: Ints
    cuts: Ints
    block_samples: int
    num_bytes: int

    @property
    def num_shards(self) -> int:
        """Shards, none of them empty."""
        return len(self.cuts) - 1


def check_config(config: PackConfig, *, prefix: str = "pack") -> None:
    """Refuses values that can never work.

    Args:
        prefix: what the keys begin with for the user.

    Raises:
        ConfigError: names the key, the value and the valid ones.
    """
    for name, value, valid in (
        ("kind", config.kind, KINDS),
        ("check", config.check, _CHECKS),
        ("dots", config.dots, DOTS),
        ("passes", config.passes, _PASSES),
        ("reencode", config.reencode, ("", *FORMATS)),
    ):
        if value not in valid:
            raise ConfigError(f"pack.{name}={value!r} is not one of {', '.join(one or repr(one) for one in valid)}")
    if config.labels and config.kind != "images":
        raise ConfigError(f"pack.labels={config.labels!r} goes with image files; tars hold their labels themselves")
    if config.resize < 0 or config.groups < 0 or not 1 <= config.quality <= 100:
        raise ConfigError(
            f"pack.resize={config.resize} and pack.groups={config.groups} must be at least 0, "
            f"pack.quality={config.quality} 1 to 100"
        )
    if config.groups and not config.shuffle:
        raise ConfigError(
            f"pack.groups={config.groups} needs pack.shuffle=true, else each group would hold other classes"
        )
    if config.device != "cpu" and not (config.device.startswith("cuda") and config.reencode in ("jpeg", "jpg")):
        raise ConfigError(
            f"pack.device={config.device!r}: images are encoded again on cpu, or on cuda:N with pack.reencode=jpeg"
        )
    if config.workers < 0:
        raise ConfigError(f"pack.workers={config.workers} must be at least 0 (0: one per CPU)")
    shard_bytes = parse_bytes(config.shard_bytes, f"{prefix}.shard_bytes")
    if not MIN_SHARD_BYTES <= shard_bytes <= MAX_SHARD_BYTES:
        raise ConfigError(f"{prefix}.shard_bytes={config.shard_bytes!r} must be 1MiB to 4GiB; 512MiB suits most lakes")
    if config.block_bytes != "auto":
        block_bytes = parse_bytes(config.block_bytes, f"{prefix}.block_bytes")
        if not 1 <= block_bytes <= shard_bytes:
            raise ConfigError(
                f"{prefix}.block_bytes={config.block_bytes!r} must be 'auto', or at least 1 and at most "
                f"{prefix}.shard_bytes={config.shard_bytes!r}"
            )


def make_plan(names: Sequence[str], sizes: Ints, *, members: Ints, config: PackConfig) -> Plan:
    """Deals samples to shards of about equal bytes, the fewest that hold `pack.shard_bytes` each.

    Args:
        names: N >= 1 names, sorted. sizes: int64 [N], content bytes of each sample, all members together.
        members: int64 [N], how many members each has; every one takes a header and is padded.
    """
    order = shuffled(names, config.seed) if config.shuffle else np.arange(len(names), dtype=np.int64)
    padded = -(-sizes // RECORD_BYTES) * RECORD_BYTES
    weights = (padded + RECORD_BYTES * (2 * members - 1))[order]
    total = int(weights.sum())
    num_shards = max(1, -(-total // parse_bytes(config.shard_bytes, "pack.shard_bytes")))
    if config.groups:
        num_shards = -(-num_shards // config.groups) * config.groups
    num_shards = min(len(names), num_shards)
    if config.groups and num_shards % config.groups:
        raise ConfigError(f"pack.groups={config.groups} is more than the {len(names)} samples can fill")
    return Plan(
        order=order,
        cuts=balanced_cuts(weights, num_shards),
        block_samples=block_samples(len(names), num_shards, total, config.block_bytes),
        num_bytes=total,
    )


def shard_names(num_shards: int, groups: int) -> list[str]:
    """`shard-000000.tar`, …, in order; with groups each an equal run of them in a folder of its own."""
    names = [f"shard-{i:06d}.tar" for i in range(num_shards)]
    if not groups:
        return names
    each = num_shards // groups
    return [f"group-{i // each:03d}/{name}" for i, name in enumerate(names)]


def shuffled(paths: Sequence[str], seed: int) -> Ints:
    """int64 [N]: a permutation that depends on the seed and the names alone (sorted by a keyed hash of each), so it
    is the same with every numpy, and a file more or less moves no other."""
    hashes = [keyed_hash(path, seed) for path in paths]
    return np.argsort(np.asarray(hashes, np.uint64), kind="stable").astype(np.int64)


def keyed_hash(name: str, seed: int) -> int:
    """What a shuffled data set is sorted by: xxh3-64 of the name under the seed."""
    return xxhash.xxh3_64_intdigest(name.encode("utf-8", "surrogatepass"), seed % 2**64)


def balanced_cuts(weights: Ints, num_parts: int) -> Ints:
    """int64 [num_parts + 1]: cuts a sequence of N >= num_parts weights into non-empty runs of about equal weight."""
    totals = np.cumsum(weights)
    cuts = np.zeros(num_parts + 1, np.int64)
    targets = [int(totals[-1]) * part // num_parts for part in range(1, num_parts)]
    cuts[1:-1] = np.searchsorted(totals, targets, side="left") + 1
    cuts[-1] = len(weights)
    steps = np.arange(num_parts + 1)
    grown = np.maximum.accumulate(cuts - steps) + steps  # strictly increasing
    return np.minimum(grown, len(weights) - steps[::-1])


def block_samples(num_samples: int, num_shards: int, num_bytes: int, block_bytes: int | float | str) -> int:
    """K: samples of a block of `block_bytes`; `auto` is at most 4 MiB, so that one request fetches it, and at most a
    32nd of a shard's samples, so that a window of few blocks mixes well."""
    mean_bytes = max(1, num_bytes // num_samples)
    per_shard = max(1, num_samples // num_shards)
    if block_bytes == "auto":
        return max(1, min(MAX_BLOCK_BYTES // mean_bytes, per_shard // BLOCKS_PER_SHARD))
    return max(1, min(parse_bytes(block_bytes, "pack.block_bytes") // mean_bytes, per_shard))
