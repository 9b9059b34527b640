"""The order of one epoch: `epoch_order` answers which samples form which step, by arithmetic."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from dalipipe.errors import ConfigError
from dalipipe.order.config import ShuffleConfig
from dalipipe.order.contract import BlockUse, Ids
from dalipipe.order.feistel import permute
from dalipipe.order.hashing import Purpose, fold, seed_key
from dalipipe.order.lanes import Lanes
from dalipipe.order.signature import OrderSignature, order_signature
from dalipipe.shards.shape import DataShape

# Indices that are computed at once: their temporaries (64 KiB each) stay in the core's own cache.
_CHUNK = 8192


class Sequence(Protocol):
    """Where samples stand in the steps of an epoch; what the modes differ in."""

    def at(self, steps: Ids, slots: Ids) -> Ids:
        """int64 [s, b]: the ids at ascending `steps` (int64 [s]) and `slots` (int64 [b]); -1 past the last sample."""

    def block_of(self, ids: Ids) -> Ids:
        """The block that holds each of `ids` (none is -1)."""

    def next_block(self, block: int) -> int:
        """The block from which a substitute comes when all of `block` is bad."""


class EpochOrder:
    """An `Order` over any sequence; holds a few integers, never an array over samples."""

    def __init__(self, sequence: Sequence, *, epoch: int, num_steps: int, signature: OrderSignature) -> None:
        self._sequence = sequence
        self._epoch = epoch
        self._num_steps = num_steps
        self._signature = signature

    @property
    def epoch(self) -> int:
        """The number of the epoch, from 0."""
        return self._epoch

    @property
    def num_steps(self) -> int:
        """Steps of the epoch, the short or padded last one included where the tail policy keeps it."""
        return self._num_steps

    @property
    def batch_size(self) -> int:
        """B, the global batch: slots of a step."""
        return self._signature.batch_size

    @property
    def signature(self) -> OrderSignature:
        """What a saved state must agree on to continue this order."""
        return self._signature

    def ids(self, step: int, num_steps: int) -> Ids:
        """int64 [num_steps, B]: the sample ids of steps [step, step + num_steps); -1 in empty slots.

        Raises:
            IndexError: the range leaves [0, self.num_steps].
        """
        return self._ids(step, num_steps, np.arange(self.batch_size, dtype=np.int64))

    def blocks(self, step: int, num_steps: int, slots: Ids) -> BlockUse:
        """The blocks that `slots` (int64 [b], columns of `ids`) read in steps [step, step + num_steps).

        Raises:
            IndexError: the range leaves [0, self.num_steps].
        """
        ids = self._ids(step, num_steps, slots).reshape(-1)
        filled = np.flatnonzero(ids >= 0)
        read = self._sequence.block_of(ids[filled])
        blocks, first = np.unique(read, return_index=True)
        last = read.size - 1 - np.unique(read[::-1], return_index=True)[1]
        by_need = np.argsort(first, kind="stable")
        return BlockUse(
            blocks=blocks[by_need],
            first=step + filled[first[by_need]] // slots.size,
            last=step + filled[last[by_need]] // slots.size,
        )

    def next_block(self, block: int) -> int:
        """The block after `block` in its lane (cyclic): where substitutes come from when a whole block is bad."""
        return self._sequence.next_block(block)

    def _ids(self, step: int, num_steps: int, slots: Ids) -> Ids:
        if step < 0 or num_steps < 0 or step + num_steps > self._num_steps:
            raise IndexError(
                f"steps [{step}, {step + num_steps}) leave epoch {self._epoch}, which has {self._num_steps} steps"
            )
        ids = np.empty((num_steps, slots.size), dtype=np.int64)
        rows = max(1, _CHUNK // max(slots.size, 1))
        for start in range(0, num_steps, rows):
            stop = min(start + rows, num_steps)
            ids[start:stop] = self._sequence.at(np.arange(step + start, step + stop, dtype=np.int64), slots)
        return ids


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


def epoch_order(
    shape: DataShape, *, epoch: int, batch_size: int, shuffle: ShuffleConfig, last_batch: str
) -> EpochOrder:
    """The order of epoch `epoch` of a data set.

    Args:
        shape: samples, block size and bytes of the data set.
        epoch: from 0.
        batch_size: B, samples of a step over all ranks.
        shuffle: how samples are mixed.
        last_batch: `drop` (only whole steps), `partial` or `pad` (the last step may have empty slots, -1).

    Raises:
        ConfigError: a value can never work, does not fit the batch, or `drop` would leave no step at all.
    """
    if epoch < 0:
        raise ConfigError(f"epoch={epoch} must be at least 0")
    signature = order_signature(shape, batch_size=batch_size, shuffle=shuffle, last_batch=last_batch)
    num_steps = shape.num_samples // batch_size
    if last_batch != "drop":
        num_steps = -(-shape.num_samples // batch_size)
    if num_steps == 0:
        raise ConfigError(
            f"{shape.num_samples} samples do not fill one global batch of {batch_size} and loader.last_batch=drop "
            f"leaves nothing: set a global batch of at most {shape.num_samples}, or loader.last_batch=partial or pad"
        )
    sequence: Sequence = ManifestSequence(shape, batch_size)
    if signature.mode != "none":
        lanes = Lanes(
            shape,
            seed=signature.seed,
            lanes=signature.lanes,
            window_blocks=signature.window_blocks,
            exchange=signature.exchange,
        )
        sequence = BlockSequence(lanes, epoch=epoch, batch_size=batch_size, seed=signature.seed)
    return EpochOrder(sequence, epoch=epoch, num_steps=num_steps, signature=signature)
