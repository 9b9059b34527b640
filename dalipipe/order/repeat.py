"""Hot samples (`data.repeat`): a data set in which some blocks or samples come more than once an epoch.

The expansion is virtual: the order runs over a longer data set whose blocks stand for real ones. Whole blocks are
repeated where that can be, so that reads stay as large and sequential as without; further copies of samples that lie
scattered (a class of a shuffled data set) are blocks of their own, each of which touches as many real blocks as it has
samples.
"""

from __future__ import annotations

import collections.abc
import hashlib
import itertools
from dataclasses import dataclass

import numpy as np

from dalipipe.errors import ConfigError
from dalipipe.order.contract import Ids
from dalipipe.order.feistel import invert, permute
from dalipipe.order.hashing import U64, Purpose, fold, seed_key
from dalipipe.order.sequence import Sequence
from dalipipe.shards.shape import DataShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    """Blocks [start, stop) come `factor` times an epoch: 1.7 is one copy and a fixed, hash-chosen 70 % once more."""

    start: int
    stop: int
    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Extra:
    """Samples `ids` (int64 [n], distinct) come `copies` times an epoch beside what blocks bring: 0.7 is a fixed,
    hash-chosen 70 % of them once."""

    ids: Ids
    copies: float

    def describe(self) -> str:
        """Tells sets of samples apart in a signature."""
        digest = hashlib.blake2b(np.ascontiguousarray(self.ids, "<i8").tobytes(), digest_size=8).hexdigest()
        return f"{self.ids.size}:{digest}+{self.copies}"


Repeats = collections.abc.Sequence[Repeat | Extra]


def describe(repeats: Repeats) -> str:
    """One word a part: what a signature says of them."""
    return " ".join(
        f"[{part.start},{part.stop})x{part.factor}" if isinstance(part, Repeat) else part.describe() for part in repeats
    )


class Expansion:
    """The virtual data set: `shape` is what the order runs over, `real_ids` what its ids stand for.

    Whole blocks come first, range by range; the copies of the short last block follow, then the extra copies of
    samples. Holds a few numbers for each range and the ids of extras, else nothing that grows with samples.
    """

    def __init__(self, shape: DataShape, repeats: Repeats, *, seed: int) -> None:
        """Blocks that no range names come once.

        Raises:
            ConfigError: ranges overlap or leave the data set, a factor is negative, or nothing is left.
        """
        extras = [part for part in repeats if isinstance(part, Extra)]
        ranges = [part for part in repeats if isinstance(part, Repeat)]
        self._block_samples = shape.block_samples
        self._num_whole = shape.num_samples // shape.block_samples
        self._num_short = shape.num_samples % shape.block_samples
        ranges = _cover(shape.num_blocks, ranges)
        self._begin = np.array([part.start for part in ranges], dtype=np.int64)
        stop = np.array([min(part.stop, self._num_whole) for part in ranges], dtype=np.int64)
        self._size = np.maximum(stop - self._begin, 0)
        copies = [round(part.factor * int(size)) for part, size in zip(ranges, self._size, strict=True)]
        self._first = np.concatenate([[0], np.cumsum(copies)]).astype(np.int64)
        self._num_virtual = int(self._first[-1])
        self._key = seed_key(seed, Purpose.REPEAT)
        # One block has no share to choose by hash: its factor is rounded.
        num_short_samples = round(ranges[-1].factor) * self._num_short
        self._extras = Extras(extras, first=self._num_virtual * shape.block_samples + num_short_samples, key=self._key)
        num_samples = self._extras.stop
        if num_samples == 0:
            raise ConfigError("data.repeat leaves no sample: at least one factor must be above 0")
        self.shape = DataShape(
            num_samples=num_samples,
            block_samples=shape.block_samples,
            num_bytes=shape.num_bytes * num_samples // shape.num_samples,
        )

    def real_ids(self, ids: Ids) -> Ids:
        """The real sample id for each virtual one; -1 stays -1."""
        block, sample = np.divmod(ids, self._block_samples)
        part = np.clip(np.searchsorted(self._first, block, side="right") - 1, 0, self._size.size - 1)
        # Every copy runs through its range in one permuted order, so that a part of a copy is a share chosen by hash.
        size = np.maximum(self._size[part], 1)
        place = permute((block - self._first[part]) % size, size, fold(self._key, part))
        real = (self._begin[part] + place) * self._block_samples + sample
        if self._num_short:
            short = (ids - self._num_virtual * self._block_samples) % self._num_short
            real = np.where(block < self._num_virtual, real, self._num_whole * self._block_samples + short)
        return np.where(ids < 0, -1, self._extras.replace(ids, real))

    def real_block(self, block: int) -> int:
        """The real block that a virtual one stands for."""
        return int(self.real_ids(np.array([block * self._block_samples]))[0]) // self._block_samples

    def virtual_block(self, block: int) -> int:
        """The first copy of a real block, or block 0 where the expansion leaves it out."""
        if block >= self._num_whole:
            return min(self._num_virtual, self.shape.num_blocks - 1)
        part = int(np.searchsorted(self._begin, block, side="right")) - 1
        place = np.array([block - self._begin[part]], dtype=np.int64)
        virtual = int(self._first[part] + invert(place, int(self._size[part]), fold(self._key, part))[0])
        return virtual if virtual < self._first[part + 1] else 0


class Extras:
    """The extra copies of samples, at virtual ids [first, stop)."""

    def __init__(self, parts: collections.abc.Sequence[Extra], *, first: int, key: U64) -> None:
        """Raises ConfigError when a number of copies is negative or not finite, or no samples are named."""
        for part in parts:
            if not 0 <= part.copies < float("inf") or not part.ids.size:
                raise ConfigError(
                    f"data.repeat: {part.ids.size} samples {part.copies} times more: give a finite factor of at least "
                    "1, and a name that holds samples"
                )
        self._parts = parts
        self._first = first + np.cumsum([0, *(round(part.copies * part.ids.size) for part in parts)], dtype=np.int64)
        self._key = key

    @property
    def stop(self) -> int:
        """The end of the virtual ids."""
        return int(self._first[-1])

    def replace(self, ids: Ids, real: Ids) -> Ids:
        """`real`, with the real ids of the extra copies put in where virtual `ids` are such."""
        for number, part in enumerate(self._parts):
            extra = (ids >= self._first[number]) & (ids < self._first[number + 1])
            if extra.any():
                size = part.ids.size
                # The same permuted order for every copy: a part of a copy is a share chosen by hash.
                place = permute((ids[extra] - self._first[number]) % size, size, fold(self._key, -1 - number))
                real[extra] = part.ids[place]
        return real


class RepeatSequence:
    """A `Sequence` over the real samples of an expanded data set."""

    def __init__(self, virtual: Sequence, expansion: Expansion) -> None:
        self._virtual = virtual
        self._expansion = expansion

    def at(self, steps: Ids, slots: Ids) -> Ids:
        """As `Sequence.at`."""
        return self._expansion.real_ids(self._virtual.at(steps, slots))

    def block_of(self, ids: Ids) -> Ids:
        """As `Sequence.block_of`."""
        return ids // self._expansion.shape.block_samples

    def next_block(self, block: int) -> int:
        """The block that follows the first copy of `block`."""
        return self._expansion.real_block(self._virtual.next_block(self._expansion.virtual_block(block)))


def _cover(num_blocks: int, repeats: list[Repeat]) -> list[Repeat]:
    """`repeats` in order, the gaps between them filled with a factor of 1, as ranges that cover [0, num_blocks)."""
    ordered = sorted(repeats, key=lambda part: part.start)
    for part in ordered:
        if not 0 <= part.start < part.stop <= num_blocks or not 0 <= part.factor < float("inf"):
            raise ConfigError(
                f"data.repeat: blocks [{part.start}, {part.stop}) x {part.factor} must be a range inside the "
                f"{num_blocks} blocks of the data set, with a finite factor of at least 0"
            )
    for one, other in itertools.pairwise(ordered):
        if other.start < one.stop:
            raise ConfigError(f"data.repeat: blocks [{other.start}, {one.stop}) have two factors; give one")
    covered, reached = [], 0
    for part in ordered:
        if part.start > reached:
            covered.append(Repeat(start=reached, stop=part.start, factor=1.0))
        covered.append(part)
        reached = part.stop
    if reached < num_blocks:
        covered.append(Repeat(start=reached, stop=num_blocks, factor=1.0))
    return covered
