"""The shipped cache of a node without its bytes: policies, budgets, sets and usage are real, the files are not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from dalipipe.cache.blockstore import SET_BLOCKS, TRAILER_BYTES, BlockStore
from dalipipe.cache.lake import Extent, Fetched
from dalipipe.cache.policies import LfuPolicy, LruPolicy, PinPolicy, hash_ranges
from dalipipe.cache.pool import PooledReader
from dalipipe.cache.readers import Readers
from dalipipe.cache.tier import Tier
from dalipipe.cache.tiered import TieredCache
from dalipipe.cache.usage import USAGE_NAME, UsageTable
from dalipipe.filelocks import FileLock
from dalipipe.shards.shape import DataShape
from dalipipe.telemetry import Recorder

_EVICTING: dict[str, type[LruPolicy] | type[LfuPolicy]] = {"lru": LruPolicy, "lfu": LfuPolicy}
_WAIT_S = 1.0


class NoBytes:
    """Memory of any size that is never touched."""

    def __init__(self, largest_bytes: int) -> None:
        self._memory = np.zeros(largest_bytes, np.uint8).data.toreadonly()

    def __call__(self, num_bytes: int) -> memoryview:
        return self._memory[:num_bytes]


class EvenBlocks:
    """The blocks of a data set that is known by its shape: all as large as the mean, the last by its samples."""

    def __init__(self, shape: DataShape) -> None:
        self._shape = shape
        self.mean_bytes = max(1, round(shape.num_bytes / shape.num_samples * shape.block_samples))
        rest = shape.num_samples - (shape.num_blocks - 1) * shape.block_samples
        self._last_bytes = max(1, round(shape.num_bytes / shape.num_samples * rest))

    @property
    def identity(self) -> str:
        """There are no files to name."""
        return "simulated"

    @property
    def num_blocks(self) -> int:
        """Blocks of the data set."""
        return self._shape.num_blocks

    @property
    def num_bytes(self) -> int:
        """Bytes of the data set."""
        return self._shape.num_bytes

    def block_bytes(self, block: int) -> int:
        """Bytes of a block."""
        return self._last_bytes if block == self._shape.num_blocks - 1 else self.mean_bytes

    def num_samples(self, block: int) -> int:
        """Samples of a block."""
        start = block * self._shape.block_samples
        return min(self._shape.block_samples, self._shape.num_samples - start)

    def extents(self, block: int) -> Sequence[Extent]:  # noqa: ARG002
        """There are no files to read."""
        raise AssertionError("a simulated block lies in no file")


class _Lock(FileLock):
    """Nobody else is there."""

    def __init__(self) -> None:
        super().__init__(-1)


class _NamedBlocks(BlockStore):
    """A block store that remembers names. `was_kept` tells which blocks an earlier epoch left."""

    def __init__(self, folder: Path, no_bytes: NoBytes, was_kept: Callable[[int], bool]) -> None:
        super().__init__(folder, boot_s=0.0)
        self._no_bytes = no_bytes
        self._was_kept = was_kept
        self._sets: dict[int, dict[int, int]] = {}

    def contains(self, block: int) -> bool:
        return block in self._sets.get(block // SET_BLOCKS, ()) or self._was_kept(block)

    def open(self, block: int, num_bytes: int) -> memoryview | None:
        return self._no_bytes(num_bytes) if self.contains(block) else None

    def lock(self, block: int, wait_s: float) -> FileLock | None:  # noqa: ARG002
        return _Lock()

    def write(self, block: int, data: memoryview) -> None:
        self._sets.setdefault(block // SET_BLOCKS, {})[block] = len(data) + TRAILER_BYTES

    def drop(self, block: int) -> None:
        self._sets.get(block // SET_BLOCKS, {}).pop(block, None)

    def sizes(self, number: int) -> list[tuple[int, int]]:
        return list(self._sets.get(number, {}).items())


class CountingLake(PooledReader):
    """Gives every block, and counts."""

    def __init__(self, blocks: EvenBlocks, no_bytes: NoBytes) -> None:
        self._blocks = blocks
        self._no_bytes = no_bytes
        self.num_read = 0

    def read(self, run: Sequence[int]) -> dict[int, Fetched]:
        """The blocks, from the lake."""
        self.num_read += len(run)
        return {block: Fetched(self._no_bytes(self._blocks.block_bytes(block)), "lake") for block in run}

    def fill(self, found: Mapping[int, Fetched]) -> None:
        """There is no pool."""

    def close(self) -> None:
        """Nothing is open."""


def kept_share(budgets: dict[str, int], shape: DataShape, readers: Readers) -> float:
    """The share of what this node reads that `pin` keeps in all its tiers together."""
    return readers.kept_share(sum(budgets.values()), shape.num_bytes, shape.num_blocks)


def open_tiers(
    shape: DataShape,
    *,
    policy: str,
    budgets: dict[str, int],
    readers: Readers,
    folder: Path,
    clock: Callable[[], float],
    warm: Callable[[int], bool] | None,
) -> tuple[TieredCache, CountingLake]:
    """The cache of one node, and the lake behind it.

    Args:
        policy: pin, lru, lfu or stream.
        budgets: bytes by tier, the nearest first.
        folder: an empty folder for the usage tables of policies that evict.
        warm: with `pin`: epochs went before, and of the blocks that are to be kept those are there for which `warm`
            is true; None: the cache is empty.
    """
    blocks = EvenBlocks(shape)
    no_bytes, recorder = NoBytes(max(blocks.mean_bytes, 1)), Recorder()
    lake = CountingLake(blocks, no_bytes)
    tiers = []
    if policy != "stream":
        ranges = hash_ranges(
            list(budgets.values()),
            lambda num_bytes: readers.kept_share(num_bytes, shape.num_bytes, shape.num_blocks),
            evicts=policy in _EVICTING,
        )
        for (name, num_bytes), (start, stop) in zip(budgets.items(), ranges, strict=True):
            own = folder / name
            own.mkdir(parents=True)
            pinned = PinPolicy(stop, start, readers.keep_rank) if readers.keep_rank else PinPolicy(stop, start)
            evicting = _EVICTING[policy](stop, start) if policy in _EVICTING else None
            keeps = warm if warm is not None and evicting is None else None
            tiers.append(
                Tier(
                    name,
                    _NamedBlocks(own, no_bytes, _both(pinned.admits, keeps)),
                    evicting or pinned,
                    budget_bytes=num_bytes,
                    used_bytes=num_bytes if keeps is not None else 0,
                    num_blocks=shape.num_blocks,
                    num_bytes=shape.num_bytes,
                    recorder=recorder,
                    usage=UsageTable(own / USAGE_NAME, clock) if evicting is not None else None,
                )
            )
    return TieredCache(blocks, lake, tiers, wait_s=_WAIT_S, recorder=recorder, about=policy), lake


def _both(admits: Callable[[int], bool], keeps: Callable[[int], bool] | None) -> Callable[[int], bool]:
    if keeps is None:
        return lambda _block: False
    return lambda block: admits(block) and keeps(block)
