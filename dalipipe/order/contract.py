"""What the order answers: which samples form which step, as arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockUse:
    """The blocks that a range of steps reads, in order of first need.

    blocks: int64 [M], each block once. first, last: int64 [M], the first and last step of the range that reads it.
    """

    blocks: Ids
    first: Ids
    last: Ids


class Order(Protocol):
    """The order of one epoch: a pure function of (manifest shape, configuration, seed, epoch)."""

    @property
    def epoch(self) -> int:
        """The number of the epoch, from 0."""

    @property
    def num_steps(self) -> int:
        """Steps of the epoch, the short or padded last one included where the tail policy keeps it."""

    @property
    def batch_size(self) -> int:
        """B, the global batch: slots of a step."""

    @property
    def pads(self) -> bool:
        """Whether empty slots of the last step are filled with other samples of it (`pad`) or left out (`partial`)."""

    def ids(self, step: int, num_steps: int, slots: Ids | None = None) -> Ids:
        """int64 [num_steps, b]: the sample ids of steps [step, step + num_steps) on `slots` (int64 [b]; all B without).

        The cost is that of the ids asked for, so a rank asks for its own slots. An empty slot of a partial or padded
        last step is -1.
        """

    def blocks(self, step: int, num_steps: int, slots: Ids) -> BlockUse:
        """The blocks that `slots` (int64 [b], columns of `ids`) read in steps [step, step + num_steps)."""

    def next_block(self, block: int) -> int:
        """The block after `block` in its lane (cyclic): where substitutes come from when a whole block is bad."""
