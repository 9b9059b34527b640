"""The sliding interleave: a streaming shuffle of a lane's blocks through a window of constant size.

Blocks enter one a frame. Block i, entered in frame i, gives its sample j to frame i + delta_j with
delta_j = floor(j * P / K), so it stays open for about P frames and a frame takes one sample from each of K blocks. A
frame therefore holds K samples (fewer while the window fills and drains) and asks for one new block: the demand on the
lake is constant, where a pool that is filled and drained asks for all its blocks at once.
"""

from __future__ import annotations

import numpy as np

from dalipipe.order.feistel import permute
from dalipipe.order.hashing import I64, U64, fold


class Interleave:
    """Where the samples of a lane of n blocks of K samples stand, with P blocks open at once.

    Holds tables of at most 2 K + 1 numbers, whatever n is.
    """

    def __init__(self, *, num_blocks: int, block_samples: int, window_blocks: int) -> None:
        """Takes n >= 1, K >= 1 and 1 <= P <= n (a wider window would leave frames empty)."""
        self._block_samples = block_samples
        self._delta = np.arange(block_samples, dtype=np.int64) * window_blocks // block_samples
        # A frame f takes the samples j with 0 <= f - delta_j < n: a range of j that changes only at these frames.
        bounds = np.unique(np.concatenate([self._delta, self._delta + num_blocks]))
        stop = np.searchsorted(self._delta, bounds, side="right")
        self._first_frame = bounds
        self._first_sample = np.searchsorted(self._delta, bounds - num_blocks, side="right").astype(np.int64)
        self._frame_samples = (stop - self._first_sample).astype(np.int64)
        # The last bound is the end of the lane; its frame is empty and never found below.
        self._start = np.concatenate([[0], np.cumsum(np.diff(bounds) * self._frame_samples[:-1])]).astype(np.int64)

    def locate(self, position: I64, frame_key: U64, sample_key: U64) -> tuple[I64, I64]:
        """The block and the sample in it at `position` of the lane.

        Args:
            position: int64 in [0, n K).
            frame_key: the key of the lane under which frames are shuffled; broadcasts with `position`.
            sample_key: the same for the samples of a block.

        Returns:
            Two int64 arrays: i in [0, n), the block as numbered by its entry, and j in [0, K).
        """
        part = np.searchsorted(self._start, position, side="right") - 1
        size = self._frame_samples[part]
        row, place = np.divmod(position - self._start[part], size)
        frame = row + self._first_frame[part]
        turn = permute(place, size, fold(frame_key, frame)) + self._first_sample[part]
        block = frame - self._delta[turn]
        return block, permute(turn, self._block_samples, fold(sample_key, block))
