"""Which blocks a tier keeps. Pure: a policy answers, the tier acts.

With every sample read once an epoch no policy can hit more than C/N, and never evicting reaches it, while LRU hits
c + (1 - c) ln(1 - c) and rewrites the disk all the time (c = C/N; both follow from stack distances of independent
uniform permutations). So `pin` is the default, and `lru` and `lfu` are for sets whose samples are read unevenly.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Entry = tuple[int, int, float]

_MASK = (1 << 64) - 1
_MAX_SORTED = 1 << 20


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


class PinPolicy:
    """Keeps the blocks whose hash lies below `share`, and never evicts: the same ones in every job and on restart."""

    def __init__(self, share: float) -> None:
        self.share = share

    @property
    def name(self) -> str:
        return "pin"

    def admits(self, block: int) -> bool:
        return block_hash(block) < self.share

    def victims(self, entries: Sequence[Entry], need_bytes: int) -> Sequence[int]:  # noqa: ARG002
        return ()


class StreamPolicy:
    """Keeps nothing: blocks live as long as somebody holds them."""

    @property
    def name(self) -> str:
        return "stream"

    def admits(self, block: int) -> bool:  # noqa: ARG002
        return False

    def victims(self, entries: Sequence[Entry], need_bytes: int) -> Sequence[int]:  # noqa: ARG002
        return ()


class LruPolicy:
    """Keeps everything and drops what was used longest ago."""

    @property
    def name(self) -> str:
        return "lru"

    def admits(self, block: int) -> bool:  # noqa: ARG002
        return True

    def victims(self, entries: Sequence[Entry], need_bytes: int) -> Sequence[int]:
        return _shortest_prefix(sorted(entries, key=lambda entry: (entry[2], entry[0])), need_bytes)


class LfuPolicy:
    """Keeps everything and drops what was used least often, the longest unused first among equals.

    `used` counts a use; counts stay when a block is dropped, so that a hot block wins its place back.
    """

    def __init__(self) -> None:
        self._uses: dict[int, int] = {}

    @property
    def name(self) -> str:
        return "lfu"

    def admits(self, block: int) -> bool:  # noqa: ARG002
        return True

    def used(self, block: int) -> None:
        """Counts one use of the block."""
        self._uses[block] = self._uses.get(block, 0) + 1

    def victims(self, entries: Sequence[Entry], need_bytes: int) -> Sequence[int]:
        ranked = sorted(entries, key=lambda entry: (self._uses.get(entry[0], 0), entry[2], entry[0]))
        return _shortest_prefix(ranked, need_bytes)


def _shortest_prefix(ranked: Sequence[Entry], need_bytes: int) -> Sequence[int]:
    victims: list[int] = []
    freed = 0
    for block, num_bytes, _last_use_s in ranked:
        if freed >= need_bytes:
            break
        victims.append(block)
        freed += num_bytes
    return victims if freed >= need_bytes else ()
