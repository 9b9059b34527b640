"""A data set without end: epoch after epoch in the lanes of a mix."""

from __future__ import annotations

import numpy as np

from dalipipe.order.feistel import permute
from dalipipe.order.hashing import I64, Purpose, fold, seed_key
from dalipipe.order.lanes import Lanes
from dalipipe.order.repeat import Expansion
from dalipipe.shards.shape import DataShape


class Stream:
    """A data set as an endless stream of L lanes that runs epoch after epoch, each sample once in each.

    An epoch is N positions dealt to the lanes in turn. Where L does not divide N, the lanes that take one more follow
    each other over the epochs, so that no lane has a hole and each keeps its own blocks.
    """

    def __init__(self, shape: DataShape, *, seed: int, lanes: int, window_blocks: int, exchange: float) -> None:
        """As `Lanes`, for `lanes` >= 1 streams; a window of 0 blocks shuffles the whole set as one list."""
        self._num_samples = shape.num_samples
        self._num_streams = lanes
        self._lanes = Lanes(
            shape,
            seed=seed,
            lanes=lanes if window_blocks else 0,
            window_blocks=window_blocks,
            exchange=exchange,
        )
        self._tail_key = seed_key(seed, Purpose.TAIL)

    def at(self, lane: I64, position: I64) -> I64:
        """int64 of the broadcast shape: sample ids at `position` >= 0 of the endless `lane`."""
        lane, position = np.broadcast_arrays(lane, position)
        N, L = self._num_samples, self._num_streams
        epoch = (position * L + lane) // N
        row: I64 = position + (lane - epoch * N) // L
        ids: I64 = np.empty_like(row)
        laned = row < self._lanes.lane_samples
        if laned.any():
            ids[laned] = self._lanes.samples(epoch[laned], lane[laned], row[laned])
        if not laned.all():
            left = ~laned
            turn = (lane[left] - epoch[left] * N) % L
            number = (row[left] - self._lanes.lane_samples) * L + turn
            key = fold(self._tail_key, epoch[left])
            ids[left] = self._lanes.left_over(permute(number, self._lanes.num_left, key))
        return ids

    def next_block(self, block: int) -> int:
        """The block after `block` in its lane, in the order of the source's first epoch."""
        return self._lanes.next_block(0, block)


class RepeatStream:
    """A stream over the real samples of an expanded data set."""

    def __init__(self, virtual: Stream, expansion: Expansion) -> None:
        self._virtual = virtual
        self._expansion = expansion

    def at(self, lane: I64, position: I64) -> I64:
        """As `Stream.at`."""
        return self._expansion.real_ids(self._virtual.at(lane, position))

    def next_block(self, block: int) -> int:
        """The block that follows the first copy of `block`."""
        return self._expansion.real_block(self._virtual.next_block(self._expansion.virtual_block(block)))
