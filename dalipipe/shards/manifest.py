"""The manifest of a data set: what it holds and where every sample lies.

`manifest.json` is a small header, `shards.arrow` one row a shard, `NAME.idx` one record batch a block part. The
identity is a hash over what they say (not over their bytes), so it names the data set wherever it is copied and
whichever pyarrow wrote it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from dalipipe.errors import ManifestError
from dalipipe.shards.checksums import NOTE, checksums_name, decode_checksums
from dalipipe.shards.digest import NO_DIGEST, digest64
from dalipipe.shards.fields import Field
from dalipipe.shards.header import (
    HEADER_NAME,
    SHARDS_NAME,
    Header,
    ShardTable,
    decode_header,
    decode_shards,
    identity_of,
)
from dalipipe.shards.index import ShardIndex, open_index
from dalipipe.shards.logical import DEFAULT_BYTES, LogicalShards
from dalipipe.shards.shape import BlockGrid, DataShape

Ints = npt.NDArray[np.int64]
Read = Callable[[str], "bytes | memoryview"]


def index_name(shard: str) -> str:
    """The name of the index of a shard by the shard's name.

    The index of a shard that lies elsewhere lies in `index/` of the data set that links to it.
    """
    if "://" in shard:
        prefix = shard.partition("://")[0].rpartition("/")[0]
    else:
        prefix = "" if shard.startswith("../") else shard.partition("/../")[0]
        if prefix == shard:
            return f"{shard}.idx"
    folder = f"{prefix}/" if prefix else ""
    return f"{folder}index/{digest64(shard.removeprefix(folder).encode()):016x}.idx"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One shard. `digest` and `index_digest` are the xxh3-64 of the two files."""

    name: str
    num_bytes: int
    num_samples: int
    first_sample: int
    digest: int
    index_digest: int

    @property
    def index_name(self) -> str:
        """The name of its index: beside the shard, or in `index/` where the shard lies outside the data set."""
        return index_name(self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """Bytes [start, stop) of a shard (named), their xxh3-64, and the number of this part of a block: see
    `Manifest.first_part`."""

    shard: str
    start: int
    stop: int
    digest: int
    part: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """Where n samples lie.

    blocks: int64 [n]. fields: name -> (offset int64 [n] within the block, size int64 [n]), both -1 where the sample
    lacks the field. sizes: int32 [n, 2], (height, width) upright, 0 where unknown.
    """

    blocks: Ints
    fields: dict[str, tuple[Ints, Ints]]
    sizes: npt.NDArray[np.int32]


class Manifest:
    """An opened manifest. Thread-safe. Memory: 8 bytes a shard beyond `shards.arrow`, and the open indices."""

    def __init__(
        self,
        header: Header,
        shards: ShardTable,
        read_index: Read,
        *,
        max_open_indices: int = 512,
        shapes: Mapping[str, DataShape] | None = None,
        read_again: Read | None = None,
    ) -> None:
        """Wraps what the files say; `open` reads them.

        shapes: of the sets, by name, when this joins several. read_again: for an index that `read_index` gave damaged.
        """
        self._header = header
        self._shards = shards
        self._read_index = read_index
        self._read_again = read_again or read_index
        self._max_open = max_open_indices
        self._lock = threading.Lock()
        self._open: OrderedDict[int, ShardIndex] = OrderedDict()
        self._first = np.zeros(len(shards.names) + 1, np.int64)
        np.cumsum(shards.num_samples, out=self._first[1:])
        whole = DataShape(
            num_samples=self.num_samples, block_samples=header.block_samples, num_bytes=int(shards.num_bytes.sum())
        )
        self.shapes: Mapping[str, DataShape] = shapes or {"": whole}
        self._grid = BlockGrid(list(self.shapes.values()))

    @classmethod
    def open(cls, read: Read, read_index: Read | None = None, *, max_open_indices: int = 512) -> Manifest:
        """Opens the manifest of a data set.

        Args:
            read: gives a whole object by its name relative to the data set's URL; FileNotFoundError when missing.
            read_index: the same for indices (from a node's copy, say); `read` by default.
            max_open_indices: how many indices stay open; about 50 bytes a sample each.

        Raises:
            ManifestError: there is no manifest, or it is torn, of another version or contradicts itself.
        """
        try:
            header, shards = _read_tables(read)
        except ManifestError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                raise
            # Damaged on the way, or replaced between two reads: what lies there decides.
            header, shards = _read_tables(read)
        return cls(header, shards, read_index or read, max_open_indices=max_open_indices, read_again=read)

    @property
    def identity(self) -> str:
        """32 hexadecimal digits: the hash over everything that the manifest says."""
        return self._header.identity

    @property
    def kind(self) -> str:
        """`images` or `tokens`."""
        return self._header.kind

    @property
    def num_samples(self) -> int:
        """N: sample ids are [0, N)."""
        return int(self._first[-1])

    @property
    def num_shards(self) -> int:
        """Shards, none of them empty."""
        return len(self._shards.names)

    @property
    def num_bytes(self) -> int:
        """Bytes of all shards."""
        return int(self._shards.num_bytes.sum())

    @property
    def block_samples(self) -> int:
        """K: samples of a block; the last block may have fewer. Of several sets joined, the largest K."""
        return self._header.block_samples

    @property
    def num_blocks(self) -> int:
        """Blocks, the short last one included."""
        return self._grid.num_blocks

    @property
    def fields(self) -> tuple[Field, ...]:
        """The fields of the samples, sorted by name."""
        return self._header.fields

    @property
    def classes(self) -> tuple[str, ...]:
        """The class names by label; empty when samples have no label."""
        return self._header.classes

    @property
    def made_by(self) -> dict[str, str]:
        """Notes of whoever wrote the manifest (such as the plan's hash); no part of the identity."""
        return dict(self._header.made_by)

    @property
    def shape(self) -> DataShape:
        """What the order needs to know; of several sets joined, only `shapes` says it."""
        return DataShape(num_samples=self.num_samples, block_samples=self.block_samples, num_bytes=self.num_bytes)

    def shard(self, number: int) -> Shard:
        """Shard `number` in [0, num_shards)."""
        table = self._shards
        return Shard(
            name=table.names[number].as_py(),
            num_bytes=int(table.num_bytes[number]),
            num_samples=int(table.num_samples[number]),
            first_sample=int(self._first[number]),
            digest=int(table.checksums[number]),
            index_digest=int(table.index_checksums[number]),
        )

    @property
    def files(self) -> tuple[Header, ShardTable]:
        """What the two files of the manifest say."""
        return self._header, self._shards

    def read_index(self, name: str) -> bytes | memoryview:
        """The bytes of the index `name`, from wherever this manifest reads them."""
        return self._read_index(name)

    def block_of(self, ids: Ints) -> Ints:
        """The block of each sample (int64, any shape)."""
        return self._grid.block_of(ids)

    def logical_shards(self, target_bytes: int = DEFAULT_BYTES) -> LogicalShards:
        """The data set as pieces of about `target_bytes` cut at sample boundaries, whatever the sizes of its files."""
        return LogicalShards(self, target_bytes)

    def block_samples_range(self, block: int) -> tuple[int, int]:
        """The sample ids [first, stop) of a block. Raises IndexError when there is none of that number."""
        return self._grid.samples(block)

    def shards_of(self, block: int) -> list[str]:
        """The names of the shards that a block lies in, in order; reads no index."""
        first, stop = self.block_samples_range(block)
        numbers = range(self._shard_of(first), self._shard_of(stop - 1) + 1)
        return [self._shards.names[number].as_py() for number in numbers]

    def extents(self, block: int) -> tuple[Extent, ...]:
        """The extents that a block joins, in order: one, or one per shard that it crosses."""
        first, stop = self.block_samples_range(block)
        found = []
        for number in range(self._shard_of(first), self._shard_of(stop - 1) + 1):
            parts = self.index(number).parts
            i = block - self._first_block(number)
            extent = Extent(
                shard=self._shards.names[number].as_py(),
                start=int(parts.starts[i]),
                stop=int(parts.stops[i]),
                digest=int(parts.digests[i]),
                part=self.first_part(number) + i,
            )
            found.append(extent)
        return tuple(found)

    def first_part(self, number: int) -> int:
        """The number of the first block part of shard `number`; those after it count on. No two parts of the data set
        have the same number, and all are in [0, num_blocks + num_shards)."""
        return self._first_block(number) + number

    def block_bytes(self, block: int) -> int:
        """Bytes of a block: its extents joined."""
        return sum(extent.stop - extent.start for extent in self.extents(block))

    def locate(self, ids: Ints) -> Located:
        """Where samples lie (int64 [n], any order, repeats allowed).

        Raises:
            IndexError: an id is not in [0, N).
            ManifestError: an index is missing, torn, or not the one that the manifest states.
        """
        ids = np.asarray(ids, np.int64)
        blocks = self.block_of(ids)
        fields = {f.name: (np.full(len(ids), -1, np.int64), np.full(len(ids), -1, np.int64)) for f in self.fields}
        sizes = np.zeros((len(ids), 2), np.int32)
        for number, where, rows in self._by_shard(ids):
            index = self.index(number)
            part = blocks[where] - self._first_block(number)
            shift = index.parts.base[part] - index.parts.starts[part]
            sizes[where] = index.sizes[rows]
            for name, (offsets, lengths) in index.rows_fields.items():
                lacks = offsets[rows] < 0
                fields[name][0][where] = np.where(lacks, -1, offsets[rows] + shift)
                fields[name][1][where] = lengths[rows]
        return Located(blocks=blocks, fields=fields, sizes=sizes)

    def keys(self, ids: Ints) -> list[str]:
        """The keys of samples (int64 [n]), for messages and reports."""
        ids = np.asarray(ids, np.int64)
        found = [""] * len(ids)
        for number, where, rows in self._by_shard(ids):
            index = self.index(number)
            for i, row in zip(where.tolist(), rows.tolist(), strict=True):
                found[i] = index.key(row)
        return found

    def index(self, number: int) -> ShardIndex:
        """The index of shard `number`, opened and checked against the manifest on first use.

        Raises:
            ManifestError: it is missing, torn, or not the one that the manifest states.
        """
        with self._lock:
            index = self._open.get(number)
            if index is not None:
                self._open.move_to_end(number)
                return index
        shard = self.shard(number)
        index = _load_index(shard, {field.name for field in self.fields}, self._read_index, self._read_again)
        if NOTE in self._header.made_by:
            index = _with_checksums(index, shard, self._read_again)
        with self._lock:
            self._open[number] = index
            while len(self._open) > self._max_open:
                self._open.popitem(last=False)
        return index

    def _first_block(self, number: int) -> int:
        return int(self.block_of(self._first[number : number + 1])[0])

    def _shard_of(self, sample: int) -> int:
        return int(np.searchsorted(self._first, sample, side="right")) - 1

    def _by_shard(self, ids: Ints) -> Iterator[tuple[int, Ints, Ints]]:
        """(shard, positions in `ids`, rows in the shard) for every shard that holds some of `ids`."""
        if len(ids) == 0:
            return
        if ids.min() < 0 or ids.max() >= self.num_samples:
            raise IndexError(f"sample ids [{ids.min()}, {ids.max()}] are not all in [0, {self.num_samples})")
        numbers = np.searchsorted(self._first, ids, side="right") - 1
        by_shard: npt.NDArray[Any] = np.argsort(numbers, kind="stable")
        present, starts = np.unique(numbers[by_shard], return_index=True)
        for number, where in zip(present.tolist(), np.split(by_shard, starts[1:]), strict=True):
            yield number, where, ids[where] - self._first[number]


def _read_tables(read: Read) -> tuple[Header, ShardTable]:
    try:
        header = decode_header(read(HEADER_NAME))
    except FileNotFoundError as error:
        raise ManifestError(
            f"no {HEADER_NAME}: {error}. A folder without a manifest is not a data set; check the URL, "
            "or make the data set with `dalipipe pack` or `dalipipe index`"
        ) from error
    try:
        shards = decode_shards(read(SHARDS_NAME), header.shards_checksum)
    except FileNotFoundError as error:
        raise ManifestError(f"{HEADER_NAME} is there but {SHARDS_NAME} is not: {error}; pack again") from error
    found = identity_of(header, shards)
    if found != header.identity:
        raise ManifestError(
            f"{SHARDS_NAME} does not belong to {HEADER_NAME}: identity {found} found, {header.identity} expected; "
            "one of them was changed by hand or is damaged: copy or pack again"
        )
    return header, shards


def _load_index(shard: Shard, fields: set[str], read: Read, read_again: Read) -> ShardIndex:
    """The index of a shard, checked against the manifest; read again when it is not the one that is stated."""
    try:
        data = read(shard.index_name)
        if digest64(data) != shard.index_digest:
            data = read_again(shard.index_name)
    except FileNotFoundError as error:
        raise ManifestError(f"the index {shard.index_name} is missing: {error}; copy or pack again") from error
    found = digest64(data)
    if found != shard.index_digest:
        raise ManifestError(
            f"{shard.index_name} has digest {found:016x}, the manifest states {shard.index_digest:016x} "
            f"({len(data)} bytes found); it is damaged or of another data set: copy or pack again"
        )
    index = open_index(data, shard.index_name)
    if index.num_samples != shard.num_samples or set(index.rows_fields) - fields:
        raise ManifestError(
            f"{shard.index_name} lists {index.num_samples} samples with fields {sorted(index.rows_fields)}, "
            f"the manifest states {shard.num_samples} with {sorted(fields)}; pack again"
        )
    return index


def _with_checksums(index: ShardIndex, shard: Shard, read: Read) -> ShardIndex:
    """The index with the digests of parts that became known after it was made."""
    if (index.parts.digests != NO_DIGEST).all():
        return index
    try:
        data = read(checksums_name(shard.index_name))
    except FileNotFoundError:
        return index
    known = decode_checksums(data, shard.index_digest, len(index.parts.digests))
    if known is None:
        return index
    digests = np.where(index.parts.digests == NO_DIGEST, known, index.parts.digests)
    return replace(index, parts=replace(index.parts, digests=digests))
