"""The shape of a data set, all that the order needs to know of a manifest, and the grid of its blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataShape:
    """N samples in manifest order, cut into blocks of K (the last one may be short), `num_bytes` in all."""

    num_samples: int
    block_samples: int
    num_bytes: int

    @property
    def num_blocks(self) -> int:
        """Blocks, the short last one included."""
        return -(-self.num_samples // self.block_samples)


class BlockGrid:
    """The blocks of one data set, or of several whose samples and blocks are numbered on from set to set.

    No block holds samples of two sets, and each set keeps its own K. Holds a few numbers a set.
    """

    def __init__(self, shapes: Sequence[DataShape]) -> None:
        """Takes at least one set, none of them empty."""
        self.shapes = tuple(shapes)
        self.first_sample = _starts([shape.num_samples for shape in shapes])
        self.first_block = _starts([shape.num_blocks for shape in shapes])
        self._block_samples = np.array([shape.block_samples for shape in shapes], dtype=np.int64)

    @property
    def num_samples(self) -> int:
        """N of all sets."""
        return int(self.first_sample[-1])

    @property
    def num_blocks(self) -> int:
        """Blocks of all sets, the short last one of each included."""
        return int(self.first_block[-1])

    def set_of(self, ids: Ints) -> Ints:
        """The number of the set that each sample belongs to; shaped as `ids`."""
        found: Ints = np.searchsorted(self.first_sample[1:-1], ids, side="right").astype(np.int64)
        return found

    def block_of(self, ids: Ints) -> Ints:
        """The block of each sample; shaped as `ids`."""
        if len(self.shapes) == 1:
            return ids // self.shapes[0].block_samples
        own = self.set_of(ids)
        blocks: Ints = (ids - self.first_sample[own]) // self._block_samples[own] + self.first_block[own]
        return blocks

    def samples(self, block: int) -> tuple[int, int]:
        """The sample ids [start, stop) of a block.

        Raises:
            IndexError: there is no such block.
        """
        if not 0 <= block < self.num_blocks:
            raise IndexError(f"block {block} is not in [0, {self.num_blocks})")
        own = int(np.searchsorted(self.first_block[1:-1], block, side="right"))
        first, size = int(self.first_sample[own]), int(self._block_samples[own])
        start = first + (block - int(self.first_block[own])) * size
        return start, min(start + size, int(self.first_sample[own + 1]))


def _starts(sizes: Sequence[int]) -> Ints:
    """int64 [len(sizes) + 1]: where each begins, and the end of the last."""
    return np.concatenate([[0], np.cumsum(np.asarray(sizes, dtype=np.int64))]).astype(np.int64)
