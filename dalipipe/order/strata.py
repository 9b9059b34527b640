"""Rows of a lane in a random order that spreads two kinds evenly: those that a node keeps, and those that it streams.

The first k of n rows are kept ones. Entry i of an epoch is a kept row when floor((i k + o) / n) grows there (the line
of Bresenham, 1965), and the rows of each kind come in a permuted order of their own. So between any two entries of a
lane the streamed rows are as many as their share says, give or take one, and the lake sees a constant demand. The
offset o differs from lane to lane, so that lanes do not stream in step.

Every row is equally likely at every entry of its kind, and which rows are kept depends on a hash alone: what is lost
against a plain permutation is that two kinds of blocks alternate.
"""

from __future__ import annotations

import numpy as np

from dalipipe.order.feistel import invert, permute
from dalipipe.order.hashing import I64, U64, fold


class Strata:
    """The permutation of n rows, of which the first k are kept, in L lanes. 0 < k < n."""

    def __init__(self, *, num_rows: int, num_kept: int, lanes: int) -> None:
        self.num_kept = num_kept
        self._num_rows = num_rows
        self._lanes = lanes

    def row(self, entry: I64, lane: I64, key: U64) -> I64:
        """The row that each lane opens as number `entry`; arrays broadcast against each other."""
        n, k = self._num_rows, self.num_kept
        entry, offset, key = np.broadcast_arrays(entry, self._offset(lane), key)
        before = (entry * k + offset) // n
        kept = ((entry + 1) * k + offset) // n > before
        row = np.empty_like(entry)
        row[kept] = permute(before[kept], k, key[kept])
        other = ~kept
        row[other] = k + permute((entry - before)[other], n - k, fold(key[other], 1))
        return row

    def entry(self, row: int, lane: int, key: U64) -> int:
        """The number under which `lane` opens `row`: the inverse of `row`."""
        n, k = self._num_rows, self.num_kept
        offset = int(self._offset(np.array([lane], dtype=np.int64))[0])
        if row < k:
            number = int(invert(np.array([row], dtype=np.int64), k, key)[0])
            return -(-((number + 1) * n - offset) // k) - 1
        number = int(invert(np.array([row - k], dtype=np.int64), n - k, fold(key, 1))[0])
        return (number * n + offset) // (n - k)

    def _offset(self, lane: I64) -> I64:
        return lane * self._num_rows // self._lanes
