"""Which blocks a tier keeps. Pure: a policy answers, the tier acts.

With every sample read once an epoch no policy can hit more than C/N, and never evicting reaches it, while LRU hits
c + (1 - c) ln(1 - c) and rewrites the disk all the time (c = C/N; both follow from stack distances of independent
uniform permutations). So `pin` is the default, and `lru` and `lfu` are for sets whose samples are read unevenly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from dalipipe.cache.contract import Entry

_MASK = (1 << 64) - 1
_MAX_SORTED = 1 << 20
# In a scan the counts of two blocks differ by at most 2: one use of this epoch, and one that halving counts rounds off.
_HOTTER_BY = 3


def block_hash(block: int) -> float:
    """A uniform number in [0, 1) that depends on the block alone: SplitMix64's finaliser (Steele et al., 2014)."""
    x = (block + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return ((x ^ (x >> 31)) >> 11) / (1 << 53)


def block_hashes(num_blocks: int) -> npt.NDArray[np.float64]:
    """`block_hash` of the blocks [0, num_blocks): float64 [num_blocks]."""
    x = np.arange(num_blocks, dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    hashes: npt.NDArray[np.float64] = ((x ^ (x >> np.uint64(31))) >> np.uint64(11)) / np.float64(1 << 53)
    return hashes


def pinned_share(capacity_bytes: int, total_bytes: int, num_blocks: int) -> float:
    """The share of hash space whose blocks fit `capacity_bytes` when all blocks are of the same size.

    Exact by number of blocks as long as their hashes are sorted in a moment; beyond that the law of large numbers
    does it (a part in a thousand at 2**20 blocks). The tier stops at its budget where sizes differ.
    """
    if total_bytes <= 0 or capacity_bytes >= total_bytes:
        return 1.0
    share = max(0.0, capacity_bytes / total_bytes)
    if num_blocks > _MAX_SORTED:
        return share
    return float(np.sort(block_hashes(num_blocks))[int(share * num_blocks)])


def pinned_from(capacity_bytes: int, total_bytes: int, num_blocks: int) -> float:
    """As `pinned_share` from the other end of hash space: the blocks from there on fit."""
    if total_bytes <= 0 or capacity_bytes >= total_bytes:
        return 0.0
    share = max(0.0, capacity_bytes / total_bytes)
    num_kept = int(share * num_blocks)
    if num_blocks > _MAX_SORTED or not num_kept:
        return 1.0 - share
    return float(np.sort(block_hashes(num_blocks))[num_blocks - num_kept])


def hash_ranges(
    budgets_bytes: Sequence[int], share: Callable[[int], float], *, evicts: bool
) -> list[tuple[float, float]]:
    """Which part [start, stop) of hash space each tier of a node takes, the nearest first.

    Args:
        budgets_bytes: what each may hold.
        share: up to where in hash space blocks fit so many bytes.
        evicts: a policy that evicts shares all of hash space out; one that does not leaves out the rest.
    """
    ranges, start, taken_bytes = [], 0.0, 0
    all_bytes = sum(budgets_bytes)
    for num_bytes in budgets_bytes:
        taken_bytes += num_bytes
        stop = taken_bytes / max(all_bytes, 1) if evicts else share(taken_bytes)
        ranges.append((start, stop))
        start = max(start, stop) if num_bytes else start
    return ranges


class PinPolicy:
    """Keeps the blocks whose rank lies in [start, stop), and never evicts: the same ones in every job and on restart.

    Ranges that follow each other make tiers exclusive without any account of what lies where. The rank is a hash, or
    what the order says where it spreads kept blocks evenly.
    """

    def __init__(self, stop: float, start: float = 0.0, rank: Callable[[int], float] = block_hash) -> None:
        self.start = start
        self.stop = stop
        self._rank = rank

    @property
    def name(self) -> str:
        return "pin"

    def admits(self, block: int) -> bool:
        return self.start <= self._rank(block) < self.stop

    def victims(self, entries: Sequence[Entry], need_bytes: int, newcomer_uses: int | None = None) -> Sequence[int]:  # noqa: ARG002
        return ()


class StreamPolicy:
    """Keeps nothing: blocks live as long as somebody holds them."""

    @property
    def name(self) -> str:
        return "stream"

    def admits(self, block: int) -> bool:  # noqa: ARG002
        return False

    def victims(self, entries: Sequence[Entry], need_bytes: int, newcomer_uses: int | None = None) -> Sequence[int]:  # noqa: ARG002
        return ()


class LruPolicy:
    """Keeps every newcomer and drops what was used longest ago.

    Two tiers share the blocks out by hash, as with `pin`: [start, stop) is this tier's part.
    """

    def __init__(self, stop: float = 1.0, start: float = 0.0) -> None:
        self.start = start
        self.stop = stop

    @property
    def name(self) -> str:
        return "lru"

    def admits(self, block: int) -> bool:
        return self.start <= block_hash(block) < self.stop

    def victims(self, entries: Sequence[Entry], need_bytes: int, newcomer_uses: int | None = None) -> Sequence[int]:  # noqa: ARG002
        return _shortest_prefix(sorted(entries, key=lambda entry: (entry.last_use_s, entry.block)), need_bytes)


class LfuPolicy:
    """Drops what was used least often, the longest unused first among equals, and only for a newcomer that was used
    clearly more often: three times more, so that a scan, in which all counts are nearly equal, replaces nothing.

    Counts stay when a block is dropped, and are halved in time (`UsageTable.age`). [start, stop) as for `lru`.
    """

    def __init__(self, stop: float = 1.0, start: float = 0.0) -> None:
        self.start = start
        self.stop = stop

    @property
    def name(self) -> str:
        return "lfu"

    def admits(self, block: int) -> bool:
        return self.start <= block_hash(block) < self.stop

    def victims(self, entries: Sequence[Entry], need_bytes: int, newcomer_uses: int | None = None) -> Sequence[int]:
        ranked: Iterable[Entry] = sorted(entries, key=lambda entry: (entry.uses, entry.last_use_s, entry.block))
        if newcomer_uses is not None:
            ranked = (entry for entry in ranked if entry.uses + _HOTTER_BY <= newcomer_uses)
        return _shortest_prefix(ranked, need_bytes)


def _shortest_prefix(ranked: Iterable[Entry], need_bytes: int) -> Sequence[int]:
    victims: list[int] = []
    freed = 0
    for entry in ranked:
        if freed >= need_bytes:
            break
        victims.append(entry.block)
        freed += entry.num_bytes
    return victims if freed >= need_bytes else ()
