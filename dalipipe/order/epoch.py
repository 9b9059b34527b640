"""The order of one epoch: `epoch_order` answers which samples form which step, by arithmetic."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from dalipipe.errors import ConfigError
from dalipipe.order.config import ShuffleConfig
from dalipipe.order.contract import BlockUse, Ids
from dalipipe.order.repeat import Expansion, Repeats, RepeatSequence, describe
from dalipipe.order.sequence import Sequence, make_sequence
from dalipipe.order.signature import OrderSignature, order_signature, short_recipe
from dalipipe.shards.shape import DataShape

# Indices that are computed at once: their temporaries (64 KiB each) stay in the core's own cache.
_CHUNK = 8192


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
    def pads(self) -> bool:
        """Whether empty slots of the last step are filled with other samples of it (`pad`) or left out (`partial`)."""
        return self._signature.last_batch == "pad"

    @property
    def signature(self) -> OrderSignature:
        """What a saved state must agree on to continue this order."""
        return self._signature

    def ids(self, step: int, num_steps: int, slots: Ids | None = None) -> Ids:
        """int64 [num_steps, b]: the ids of steps [step, step + num_steps) on `slots` (all B without); -1 in empty ones.

        Raises:
            IndexError: the range leaves [0, self.num_steps], or a slot leaves [0, B).
        """
        if slots is None:
            slots = np.arange(self.batch_size, dtype=np.int64)
        elif slots.size and not 0 <= int(slots.min()) <= int(slots.max()) < self.batch_size:
            raise IndexError(f"slots [{slots.min()}, {slots.max()}] are not all in [0, {self.batch_size})")
        return self._ids(step, num_steps, slots)

    def blocks(self, step: int, num_steps: int, slots: Ids) -> BlockUse:
        """The blocks that `slots` (int64 [b], columns of `ids`) read in steps [step, step + num_steps).

        Raises:
            IndexError: as `ids`.
        """
        ids = self.ids(step, num_steps, slots).reshape(-1)
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


def epoch_order(
    shape: DataShape,
    *,
    epoch: int,
    batch_size: int,
    shuffle: ShuffleConfig,
    last_batch: str,
    repeats: Repeats = (),
) -> EpochOrder:
    """The order of epoch `epoch` of a data set.

    Args:
        shape: samples, block size and bytes of the data set.
        epoch: from 0.
        batch_size: B, samples of a step over all ranks.
        shuffle: how samples are mixed.
        last_batch: `drop` (only whole steps), `partial` or `pad` (the last step may have empty slots, -1).
        repeats: blocks and samples that come more or less often than once; the epoch is as much longer or shorter.

    Raises:
        ConfigError: a value can never work, does not fit the batch, or `drop` would leave no step at all.
    """
    if epoch < 0:
        raise ConfigError(f"epoch={epoch} must be at least 0")
    if repeats and shuffle.kept:
        raise ConfigError(
            f"shuffle.kept={shuffle.kept} does not go with data.repeat: leave one out (cache.policy=lfu is for those)"
        )
    expansion = Expansion(shape, repeats, seed=shuffle.seed) if repeats else None
    ordered = expansion.shape if expansion else shape
    signature = order_signature(ordered, batch_size=batch_size, shuffle=shuffle, last_batch=last_batch)
    num_steps = ordered.num_samples // batch_size
    if last_batch != "drop":
        num_steps = -(-ordered.num_samples // batch_size)
    if num_steps == 0:
        raise ConfigError(
            f"{ordered.num_samples} samples do not fill one global batch of {batch_size} and loader.last_batch=drop "
            f"leaves nothing: set a global batch of at most {ordered.num_samples}, or loader.last_batch=partial or pad"
        )
    sequence = make_sequence(ordered, signature, epoch)
    if expansion:
        sequence = RepeatSequence(sequence, expansion)
        signature = replace(signature, recipe=short_recipe(f"repeat {describe(repeats)}"))
    return EpochOrder(sequence, epoch=epoch, num_steps=num_steps, signature=signature)
