"""Logical shards: a data set as one stream of bytes, cut at sample boundaries into pieces of about equal size.

One huge tar or a million tiny ones balance alike: a logical shard is a part of a file, or the whole of many.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from dalipipe.shards.index import sample_bounds

if TYPE_CHECKING:
    from dalipipe.shards.manifest import Manifest

DEFAULT_BYTES = 256 * 2**20
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Bytes [start, stop) of the file `name`, which hold whole samples."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LogicalShard:
    """Samples [first_sample, stop_sample) and the pieces of files that hold them, in order."""

    number: int
    first_sample: int
    stop_sample: int
    pieces: tuple[Piece, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all pieces."""
        return sum(piece.stop - piece.start for piece in self.pieces)


class LogicalShards(Sequence[LogicalShard]):
    """The logical shards of a manifest, each worked out when it is asked for: two indices are read for one.

    Memory: 16 bytes a file. Every sample is in exactly one of them. There are never more of them than samples; where a
    single sample is larger than the target, those that its bytes would fill have no samples and no pieces.
    """

    def __init__(self, manifest: Manifest, target_bytes: int = DEFAULT_BYTES) -> None:
        if target_bytes < 1:
            raise ValueError(f"target_bytes={target_bytes} must be at least 1")
        self._manifest = manifest
        shards = [manifest.shard(number) for number in range(manifest.num_shards)]
        self._ends = np.cumsum([shard.num_bytes for shard in shards], dtype=np.int64)
        self._first = np.asarray([*(shard.first_sample for shard in shards), manifest.num_samples], np.int64)
        self._num = max(1, min(round(manifest.num_bytes / target_bytes), manifest.num_samples))

    def __len__(self) -> int:
        """How many there are."""
        return self._num

    def __getitem__(self, number: int | slice) -> LogicalShard:  # type: ignore[override]
        """Logical shard `number`."""
        if isinstance(number, slice):
            raise TypeError("logical shards are asked for one by one")
        number = range(self._num)[number]
        begin, end = self._cut(number), self._cut(number + 1)
        return LogicalShard(number=number, first_sample=begin, stop_sample=end, pieces=tuple(self._pieces(begin, end)))

    def __iter__(self) -> Iterator[LogicalShard]:
        """All of them, in order."""
        return (self[number] for number in range(self._num))

    def _cut(self, number: int) -> int:
        """The first sample at or after the byte where logical shard `number` would start, leaving at least one
        sample to each before and after it where samples are small."""
        if number in (0, self._num):
            return self._manifest.num_samples if number else 0
        at = int(self._ends[-1]) * number // self._num
        shard = int(np.searchsorted(self._ends, at, side="right"))
        starts, _ = sample_bounds(self._manifest.index(shard))
        offset = at - (int(self._ends[shard - 1]) if shard else 0)
        sample = int(self._first[shard]) + int(np.searchsorted(starts, offset, side="left"))
        return min(max(sample, number), self._manifest.num_samples - (self._num - number))

    def _pieces(self, begin: int, end: int) -> Iterator[Piece]:
        if end <= begin:
            return
        first = int(np.searchsorted(self._first, begin, side="right")) - 1
        last = int(np.searchsorted(self._first, end - 1, side="right")) - 1
        for number in range(first, last + 1):
            shard = self._manifest.shard(number)
            row, stop_row = begin - shard.first_sample, end - shard.first_sample
            start, stop = 0, shard.num_bytes
            if row > 0 or stop_row < shard.num_samples:
                starts, _ = sample_bounds(self._manifest.index(number))
                start = int(starts[row]) if row > 0 else 0
                stop = int(starts[stop_row]) if stop_row < shard.num_samples else shard.num_bytes
            yield Piece(name=shard.name, start=start, stop=stop)


def logical_files(names: Sequence[str], sizes: Sequence[int], target_bytes: int = DEFAULT_BYTES) -> list[LogicalShard]:
    """Logical shards over files that were never packed, each one sample: whole files, about `target_bytes` together.

    Args:
        names: N >= 1 paths. sizes: their bytes.
    """
    if not names or len(names) != len(sizes):
        raise ValueError(f"{len(names)} names and {len(sizes)} sizes: one size a name, at least one")
    ends = np.cumsum(np.asarray(sizes, np.int64))
    num = max(1, min(round(int(ends[-1]) / target_bytes), len(names)))
    wanted = [int(ends[-1]) * number // num for number in range(1, num)]
    cuts = [0, *np.searchsorted(ends, wanted, side="left").tolist(), len(names)]
    for number in range(1, num):
        cuts[number] = min(max(cuts[number], cuts[number - 1] + 1), len(names) - (num - number))
    return [
        LogicalShard(
            number=number,
            first_sample=cuts[number],
            stop_sample=cuts[number + 1],
            pieces=tuple(
                Piece(name=names[i], start=0, stop=int(sizes[i])) for i in range(cuts[number], cuts[number + 1])
            ),
        )
        for number in range(num)
    ]


def shared_files(manifest: Manifest, num_nodes: int) -> tuple[int, int]:
    """What it costs when each of `num_nodes` nodes owns an equal run of samples: (files that more than one node reads,
    bytes of them that a node reads which does not own the file's beginning)."""
    bounds = [manifest.num_samples * node // num_nodes for node in range(num_nodes + 1)]
    files: set[int] = set()
    num_bytes = 0
    firsts = np.asarray([manifest.shard(n).first_sample for n in range(manifest.num_shards)], np.int64)
    for sample in bounds[1:-1]:
        number = int(np.searchsorted(firsts, sample, side="right")) - 1
        if sample == int(firsts[number]):
            continue
        shard = manifest.shard(number)
        if number not in files:
            starts, _ = sample_bounds(manifest.index(number))
            num_bytes += shard.num_bytes - int(starts[sample - shard.first_sample])
        files.add(number)
    return len(files), num_bytes
