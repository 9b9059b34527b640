"""Where samples stand in the steps of an epoch: what the modes of shuffling differ in."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from dalipipe.order.contract import Ids
from dalipipe.order.feistel import permute
from dalipipe.order.hashing import Purpose, fold, seed_key
from dalipipe.order.lanes import Lanes
from dalipipe.order.signature import OrderSignature
from dalipipe.shards.shape import DataShape


class Sequence(Protocol):
    """The samples of steps and slots, and the blocks that hold them."""

    def at(self, steps: Ids, slots: Ids) -> Ids:
        """int64 [s, b]: the ids at ascending `steps` (int64 [s]) and `slots` (int64 [b]); -1 past the last sample."""

    def block_of(self, ids: Ids) -> Ids:
        """The block that holds each of `ids` (none is -1)."""

    def next_block(self, block: int) -> int:
        """The block from which a substitute comes when all of `block` is bad."""


class ManifestSequence:
    """`shuffle.mode=none`: the samples as the manifest lists them."""

    def __init__(self, shape: DataShape, batch_size: int) -> None:
        self._shape = shape
        self._batch_size = batch_size

    def at(self, steps: Ids, slots: Ids) -> Ids:
        """As `Sequence.at`."""
        ids = steps[:, None] * self._batch_size + slots
        return np.where(ids < self._shape.num_samples, ids, -1)

    def block_of(self, ids: Ids) -> Ids:
        """As `Sequence.block_of`."""
        return ids // self._shape.block_samples

    def next_block(self, block: int) -> int:
        """The next block of the manifest, the first after the last."""
        return (block + 1) % self._shape.num_blocks


class BlockSequence:
    """`shuffle.mode=block`: every step takes g = B / L samples from each lane; what is left forms the tail.

    The tail (positions that do not fill a step, blocks that do not fill a row of lanes, the short block) is permuted as
    one list. `shuffle.mode=full` has no lanes, so that the tail is the whole data set.
    """

    def __init__(self, lanes: Lanes, *, epoch: int, batch_size: int, seed: int) -> None:
        self._lanes = lanes
        self._epoch = epoch
        self._batch_size = batch_size
        self._lane_slots = batch_size // lanes.lanes if lanes.lanes else 0
        self._num_full_steps = lanes.lane_samples // self._lane_slots if lanes.lanes else 0
        self._lane_rest = lanes.lane_samples - self._num_full_steps * self._lane_slots
        self._num_tail = lanes.lanes * self._lane_rest + lanes.num_left
        self._tail_key = fold(seed_key(seed, Purpose.TAIL), epoch)

    def at(self, steps: Ids, slots: Ids) -> Ids:
        """As `Sequence.at`."""
        num_full = int(np.searchsorted(steps, self._num_full_steps))
        if num_full == steps.size:
            return self._body(steps, slots)
        if num_full == 0:
            return self._tail(steps, slots)
        return np.concatenate([self._body(steps[:num_full], slots), self._tail(steps[num_full:], slots)])

    def block_of(self, ids: Ids) -> Ids:
        """As `Sequence.block_of`."""
        return ids // self._lanes.block_samples

    def next_block(self, block: int) -> int:
        """As `Sequence.next_block`."""
        return self._lanes.next_block(self._epoch, block)

    def _body(self, steps: Ids, slots: Ids) -> Ids:
        lane, place = np.divmod(slots[None, :], self._lane_slots)
        return self._lanes.samples(self._epoch, lane, steps[:, None] * self._lane_slots + place)

    def _tail(self, steps: Ids, slots: Ids) -> Ids:
        number = (steps[:, None] - self._num_full_steps) * self._batch_size + slots
        ids = np.full(number.shape, -1, dtype=np.int64)
        filled = number < self._num_tail
        index = permute(number[filled], max(self._num_tail, 1), self._tail_key)
        num_laned = self._lanes.lanes * self._lane_rest
        laned = index < num_laned
        values = np.empty_like(index)
        if laned.any():
            lane, place = np.divmod(index[laned], self._lane_rest)
            first = self._num_full_steps * self._lane_slots
            values[laned] = self._lanes.samples(self._epoch, lane, first + place)
        values[~laned] = self._lanes.left_over(index[~laned] - num_laned)
        ids[filled] = values
        return ids


def make_sequence(shape: DataShape, signature: OrderSignature, epoch: int) -> Sequence:
    """The sequence of one epoch under a resolved configuration."""
    if signature.mode == "none":
        return ManifestSequence(shape, signature.batch_size)
    lanes = signature_lanes(shape, signature)
    return BlockSequence(lanes, epoch=epoch, batch_size=signature.batch_size, seed=signature.seed)


def signature_lanes(shape: DataShape, signature: OrderSignature) -> Lanes:
    """The lanes of a resolved configuration that has some."""
    return Lanes(
        shape,
        seed=signature.seed,
        lanes=signature.lanes,
        window_blocks=signature.window_blocks,
        exchange=signature.exchange,
        kept=signature.kept,
    )
