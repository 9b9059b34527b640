"""Several data sets in one order (`data.mix`): each has its share of every stretch of every lane.

The mix is arithmetic like the order itself: a permuted pattern says which source a lane position takes from, and the
source answers which of its samples stands at that place of its own endless stream.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from dalipipe.errors import ConfigError
from dalipipe.order.config import ShuffleConfig
from dalipipe.order.contract import Ids
from dalipipe.order.epoch import EpochOrder
from dalipipe.order.feistel import permute
from dalipipe.order.hashing import Purpose, fold, seed_key
from dalipipe.order.repeat import Expansion, Repeats, describe
from dalipipe.order.signature import OrderSignature, order_signature, short_recipe
from dalipipe.order.stream import RepeatStream, Stream
from dalipipe.shards.shape import BlockGrid, DataShape
from dalipipe.units import parse_capacity

MIX_WINDOW = 1000
"""Positions of a lane in which every source has exactly its share."""

_MOST_PATTERNS = 4096
"""What is kept of patterns, 2 kB each: those of as many lanes, or of as many windows of one."""
_DEALT_AT_ONCE = 256
"""A pattern takes some 30 times its 2 kB while it is made."""
_LANE_BITS = 24


def mix_counts(weights: Mapping[str, float]) -> dict[str, int]:
    """Positions out of `MIX_WINDOW` for each source, by largest remainders (ties to the source named first).

    Raises:
        ConfigError: a weight is negative or not finite, all are 0, or one is too small for a single position.
    """
    if not weights or any(not 0 <= weight < float("inf") for weight in weights.values()) or not any(weights.values()):
        raise ConfigError(f"data.mix={dict(weights)} must give finite weights of at least 0, and one above 0")
    total = sum(weights.values())
    exact = {name: weight / total * MIX_WINDOW for name, weight in weights.items()}
    counts = {name: int(share) for name, share in exact.items()}
    by_remainder = sorted(exact, key=lambda name: counts[name] - exact[name])
    for name in by_remainder[: MIX_WINDOW - sum(counts.values())]:
        counts[name] += 1
    for name, weight in weights.items():
        if weight > 0 and counts[name] == 0:
            raise ConfigError(
                f"data.mix.{name}={weight} is less than one sample in {MIX_WINDOW}: raise it to at least "
                f"{total / MIX_WINDOW:.3g} or leave the source out"
            )
    return counts


class MixSequence:
    """A `Sequence` over several sources: ids and blocks count on from source to source, as they are listed."""

    def __init__(
        self,
        grid: BlockGrid,
        counts: list[int],
        streams: list[Stream | RepeatStream],
        *,
        first_step: int,
        lane_slots: int,
        seed: int,
    ) -> None:
        self._grid = grid
        self._counts = np.array(counts, dtype=np.int64)
        self._first_turn = np.cumsum([0, *counts[:-1]], dtype=np.int64)
        self._streams = streams
        self._first_step = first_step
        self._lane_slots = lane_slots
        self._key = seed_key(seed, Purpose.MIX)
        self._patterns: dict[int, npt.NDArray[np.int16]] = {}

    def at(self, steps: Ids, slots: Ids) -> Ids:
        """As `Sequence.at`; never -1."""
        slot_lane, place = np.divmod(slots[None, :], self._lane_slots)
        position = (steps[:, None] + self._first_step) * self._lane_slots + place
        lane = np.broadcast_to(slot_lane, position.shape)
        window, within = np.divmod(position, MIX_WINDOW)
        # One set alone keeps its order: there is nothing to interleave.
        alone = len(self._streams) == 1
        turn = within if alone else self._turns(window, lane, within)
        source = np.searchsorted(self._first_turn, turn, side="right") - 1
        own_position = window * self._counts[source] + turn - self._first_turn[source]
        ids = np.empty_like(position)
        for number, stream in enumerate(self._streams):
            chosen = source == number
            if chosen.any():
                ids[chosen] = stream.at(lane[chosen], own_position[chosen]) + self._grid.first_sample[number]
        return ids

    def _turns(self, window: Ids, lane: Ids, within: Ids) -> Ids:
        """Which of the window's samples stands at each place, counted through the first source, then the second …

        Places are dealt to the sources by a permutation; each source's own are then taken in its own order, so that no
        more of its blocks are open than without a mix.
        """
        names, which = np.unique(window << _LANE_BITS | lane, return_inverse=True)
        known = self._patterns  # replaced as a whole: other threads read it
        missing = [name for name in names.tolist() if name not in known]
        if missing:
            if len(known) + len(missing) > _MOST_PATTERNS:
                known = {name: known[name] for name in names.tolist() if name in known}
            known = self._patterns = known | dict(zip(missing, self._dealt(np.array(missing)), strict=True))
        if not within.size:
            return within
        patterns = np.stack([known[name] for name in names.tolist()])
        turns: Ids = patterns[which.reshape(within.shape), within].astype(np.int64)
        return turns

    def _dealt(self, names: Ids) -> npt.NDArray[np.int16]:
        """int16 [names, MIX_WINDOW]: `_turns` of whole windows."""
        turns = np.empty((len(names), MIX_WINDOW), np.int16)
        for start in range(0, len(names), _DEALT_AT_ONCE):
            part = slice(start, start + _DEALT_AT_ONCE)
            key = fold(fold(self._key, names[part] >> _LANE_BITS), names[part] & ((1 << _LANE_BITS) - 1))
            drawn = permute(np.arange(MIX_WINDOW)[None, :], MIX_WINDOW, key[:, None])
            source = np.searchsorted(self._first_turn, drawn, side="right")
            order = np.argsort(source, axis=1, kind="stable")
            np.put_along_axis(turns[part], order, np.arange(MIX_WINDOW, dtype=np.int16)[None, :], axis=1)
        return turns

    def block_of(self, ids: Ids) -> Ids:
        """As `Sequence.block_of`."""
        return self._grid.block_of(ids)

    def next_block(self, block: int) -> int:
        """The next block of the same source."""
        source = int(np.searchsorted(self._grid.first_block[1:-1], block, side="right"))
        first = int(self._grid.first_block[source])
        return self._streams[source].next_block(block - first) + first


def mixed_order(
    shapes: Mapping[str, DataShape],
    weights: Mapping[str, float],
    *,
    epoch: int,
    batch_size: int,
    shuffle: ShuffleConfig,
    epoch_samples: int | None = None,
    repeats: Mapping[str, Repeats] | None = None,
) -> EpochOrder:
    """The order of epoch `epoch` of a mix.

    A mix has no end of its own: an epoch is `epoch_samples` of it rounded down to whole steps, and the next one goes on
    from there. At the end of every `MIX_WINDOW` positions of a lane each source has had exactly its share, and each
    source goes through its samples once before it starts again. Sources shuffle independently of each other: adding one
    leaves the order inside the others.

    Args:
        shapes: the sources, in the order in which ids and blocks are numbered on.
        weights: a share for each source, in any unit; 0 leaves one out.
        epoch: from 0.
        batch_size: B over all ranks.
        shuffle: `block` or `full`; the window is divided in proportion to the shares.
        epoch_samples: samples of an epoch; by default those of all sources together, repeats counted.
        repeats: by source, what comes more or less often than once while the source is gone through.

    Raises:
        ConfigError: names differ, a weight cannot work, the mode is `none`, or an epoch holds no whole step.
    """
    if set(shapes) != set(weights):
        raise ConfigError(f"data.mix weighs {sorted(weights)}, but the data sets are {sorted(shapes)}: one weight each")
    if shuffle.mode == "none":
        raise ConfigError(
            "shuffle.mode=none has no mix and no loader.epoch_samples: they are patterns over lanes; use block or full"
        )
    counts = mix_counts(weights)
    repeats = {name: parts for name, parts in (repeats or {}).items() if parts}
    expansions = {name: Expansion(shapes[name], parts, seed=shuffle.seed) for name, parts in repeats.items()}
    ordered = {name: expansions[name].shape if name in expansions else shape for name, shape in shapes.items()}
    signatures = _signatures(ordered, counts, batch_size, shuffle)
    if epoch_samples is None:
        epoch_samples = sum(shape.num_samples for shape in ordered.values())
    num_steps = epoch_samples // batch_size
    if epoch < 0 or num_steps < 1:
        raise ConfigError(
            f"epoch={epoch} of loader.epoch_samples={epoch_samples} holds no step of a global batch of {batch_size}: "
            f"epochs count from 0 and need at least {batch_size} samples"
        )
    first = next(iter(signatures.values()))
    sequence = MixSequence(
        BlockGrid(list(shapes.values())),
        [counts[name] for name in shapes],
        [_stream(name, shape, signatures[name], expansions.get(name)) for name, shape in ordered.items()],
        first_step=epoch * num_steps,
        lane_slots=batch_size // (first.lanes or 1),
        seed=shuffle.seed,
    )
    parts = [f"{name}={counts[name]}:K{own.block_samples}:P{own.window_blocks}" for name, own in signatures.items()]
    parts += [f"{name}:repeat {describe(own)}" for name, own in repeats.items()]
    parts += ["ranked"] if len(shapes) > 1 else []
    kind = "mix" if len(shapes) > 1 else "repeat" if repeats else "stream"
    signature = replace(first, recipe=short_recipe(f"{kind} {' '.join(parts)} epoch_samples={epoch_samples}"))
    return EpochOrder(sequence, epoch=epoch, num_steps=num_steps, signature=signature)


def _signatures(
    shapes: Mapping[str, DataShape], counts: Mapping[str, int], batch_size: int, shuffle: ShuffleConfig
) -> dict[str, OrderSignature]:
    total_bytes = sum(shape.num_bytes or shape.num_samples for shape in shapes.values())
    window_bytes = parse_capacity(shuffle.window, total_bytes, "shuffle.window")
    return {
        name: order_signature(
            shape,
            batch_size=batch_size,
            shuffle=shuffle,
            last_batch="drop",
            window_bytes=window_bytes * counts[name] // MIX_WINDOW,
        )
        for name, shape in shapes.items()
    }


def _stream(
    name: str, shape: DataShape, signature: OrderSignature, expansion: Expansion | None
) -> Stream | RepeatStream:
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    own_seed = fold(seed_key(signature.seed, Purpose.SOURCE), int.from_bytes(digest, "little"))
    stream = Stream(
        shape,
        seed=int(own_seed[0]),
        lanes=signature.lanes or 1,
        window_blocks=signature.window_blocks,
        exchange=signature.exchange,
    )
    return stream if expansion is None else RepeatStream(stream, expansion)
