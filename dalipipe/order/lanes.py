"""Lanes: which block a lane opens when, and which sample stands at which position of it.

A block has a home (lane, row) that no epoch changes, so that nodes find again what they cached. An epoch reorders the
rows of each lane, and `exchange` deals a share of them to other lanes for that epoch.
"""

from __future__ import annotations

import numpy as np

from dalipipe.order.feistel import invert, permute
from dalipipe.order.hashing import I64, U64, Purpose, fold, seed_key
from dalipipe.order.interleave import Interleave
from dalipipe.order.strata import Strata
from dalipipe.shards.shape import DataShape


class Lanes:
    """L lanes of n blocks each over the whole blocks of a data set; what does not fit is left over.

    Epochs, lanes and positions are int64 arrays that broadcast against each other (an epoch may be an int).
    """

    def __init__(
        self, shape: DataShape, *, seed: int, lanes: int, window_blocks: int, exchange: float, kept: float = 0.0
    ) -> None:
        """Takes L >= 0, P >= 1 and q in [0, 1]; without lanes every sample is left over.

        `kept` is the share of each lane's rows that come evenly between the others; needs q = 0. The homes of blocks
        do not depend on the seed then, so that jobs of any seed keep the same ones.
        """
        self.lanes = lanes
        self.block_samples = shape.block_samples
        self.num_whole_blocks = shape.num_samples // shape.block_samples
        self.num_rows = self.num_whole_blocks // lanes if lanes else 0
        self.lane_samples = self.num_rows * self.block_samples
        self.num_left = shape.num_samples - lanes * self.lane_samples
        self._num_blocks = shape.num_blocks
        self._num_dealt = int(exchange * self.num_rows)
        self._keys = {purpose: seed_key(seed, purpose) for purpose in Purpose}
        num_kept = round(kept * self.num_rows)
        self._strata: Strata | None = None
        if kept:
            self._keys[Purpose.HOME] = seed_key(0, Purpose.HOME)
        if 0 < num_kept < self.num_rows:
            self._strata = Strata(num_rows=self.num_rows, num_kept=num_kept, lanes=lanes)
        self._interleave: Interleave | None = None
        if self.num_rows:
            self._interleave = Interleave(
                num_blocks=self.num_rows,
                block_samples=self.block_samples,
                window_blocks=min(max(window_blocks, 1), self.num_rows),
            )

    def samples(self, epoch: int | I64, lane: I64, position: I64) -> I64:
        """Sample ids at `position` in [0, lane_samples) of `lane` in [0, L)."""
        assert self._interleave is not None, "a data set with fewer blocks than lanes has no lane positions"
        frame_key = fold(self._epoch_key(Purpose.FRAME, epoch), lane)
        sample_key = fold(self._epoch_key(Purpose.SAMPLE, epoch), lane)
        entry, sample = self._interleave.locate(position, frame_key, sample_key)
        ids: I64 = self.blocks(epoch, lane, entry) * self.block_samples + sample
        return ids

    def blocks(self, epoch: int | I64, lane: I64, entry: I64) -> I64:
        """The block that `lane` opens as number `entry` in [0, n) of the epoch."""
        key = fold(self._epoch_key(Purpose.ROW, epoch), lane)
        row = permute(entry, self.num_rows, key) if self._strata is None else self._strata.row(entry, lane, key)
        if self._num_dealt:
            lane, row = self._deal(epoch, lane, row)
        return permute(lane * self.num_rows + row, self.num_whole_blocks, self._keys[Purpose.HOME])

    def left_over(self, index: I64) -> I64:
        """Sample ids of number `index` in [0, num_left) outside the lanes: whole blocks first, then the short one."""
        cell, sample = np.divmod(index, self.block_samples)
        cell = cell + self.lanes * self.num_rows
        # The short block has no home to be permuted: it comes last as it is.
        block, whole = cell.copy(), cell < self.num_whole_blocks
        block[whole] = permute(cell[whole], max(self.num_whole_blocks, 1), self._keys[Purpose.HOME])
        ids: I64 = block * self.block_samples + sample
        return ids

    def keep_rank(self, block: int) -> float:
        """Where a block stands among those to be kept, in [0, 1): a cache that keeps all below its share keeps the
        rows that `kept` spreads out first. What has no lane comes last."""
        if block < self.num_whole_blocks:
            cell = int(invert(_array(block), self.num_whole_blocks, self._keys[Purpose.HOME])[0])
            if cell < self.lanes * self.num_rows:
                return (cell % self.num_rows * self.lanes + cell // self.num_rows) / self._num_blocks
        return 1 - 1 / (2 * self._num_blocks)

    def next_block(self, epoch: int, block: int) -> int:
        """The block that the lane opens after `block`, the first after the last.

        Blocks that are left over lead from one to the next and then into lane 0, or round, where there are no lanes.
        """
        cell = block
        if block < self.num_whole_blocks:
            cell = int(invert(_array(block), self.num_whole_blocks, self._keys[Purpose.HOME])[0])
        num_laned = self.lanes * self.num_rows
        if cell < num_laned:
            lane, row = self._undeal(epoch, cell // self.num_rows, cell % self.num_rows)
            key = fold(self._epoch_key(Purpose.ROW, epoch), lane)
            if self._strata is None:
                entry = int(invert(_array(row), self.num_rows, key)[0])
            else:
                entry = self._strata.entry(row, lane, key)
            entry = (entry + 1) % self.num_rows
            return int(self.blocks(epoch, _array(lane), _array(entry))[0])
        if cell + 1 < self._num_blocks:
            return int(self.left_over(_array((cell + 1 - num_laned) * self.block_samples))[0]) // self.block_samples
        if num_laned:
            return int(self.blocks(epoch, _array(0), _array(0))[0])
        return int(self.left_over(_array(0))[0]) // self.block_samples

    def _epoch_key(self, purpose: Purpose, epoch: int | I64) -> U64:
        return fold(self._keys[purpose], epoch)

    def _deal(self, epoch: int | I64, lane: I64, row: I64) -> tuple[I64, I64]:
        # The rows that travel move on by their number every epoch, so that after 1/q epochs each has been dealt.
        n, x = self.num_rows, self._num_dealt
        shift = epoch * x % n
        lane, shift, turn = np.broadcast_arrays(lane, shift, (row + shift) % n)
        travels = turn < x
        key = np.broadcast_to(self._epoch_key(Purpose.TRAVEL, epoch), turn.shape)[travels]
        dealt = permute(lane[travels] * x + turn[travels], self.lanes * x, key)
        lane, row = lane.copy(), np.broadcast_to(row, turn.shape).copy()
        lane[travels] = dealt // x
        row[travels] = (dealt % x - shift[travels]) % n
        return lane, row

    def _undeal(self, epoch: int, lane: int, row: int) -> tuple[int, int]:
        n, x = self.num_rows, self._num_dealt
        turn = (row + epoch * x) % n
        if turn >= x:
            return lane, row
        home = int(invert(_array(lane * x + turn), self.lanes * x, self._epoch_key(Purpose.TRAVEL, epoch))[0])
        return home // x, (home % x - epoch * x) % n


def _array(value: int) -> I64:
    return np.array([value], dtype=np.int64)
