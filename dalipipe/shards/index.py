"""The index of one shard (`NAME.idx`): where each sample's fields lie, one Arrow record batch per block part.

A block is K consecutive samples in the order of the whole data set, so the block that crosses a shard's end has a
part in each shard. The i-th batch of an index is the part of block `first_sample // K + i` that lies in this shard;
its metadata hold the extent of the part, the digest of that extent, and `base`: how many bytes of the same block lie
in earlier shards.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dalipipe.errors import ManifestError
from dalipipe.shards.digest import Digest64
from dalipipe.shards.fields import field_of
from dalipipe.shards.tar import RECORD_BYTES, SampleExtent

if TYPE_CHECKING:
    from typing_extensions import Buffer

Ints = npt.NDArray[np.int64]
FORMAT = b"dalipipe-index-1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The samples of one shard, n in all, in the order they lie in it.

    starts, stops: int64 [n], the extent of each sample (whole tar members; neighbours touch). fields: name ->
    (offset int64 [n] of the content in the shard, size int64 [n]), both -1 where a sample lacks the field.
    sizes: int32 [n, 2], (height, width) upright, 0 where unknown.
    """

    keys: Sequence[str]
    starts: Ints
    stops: Ints
    fields: dict[str, tuple[Ints, Ints]]
    sizes: npt.NDArray[np.int32]

    @classmethod
    def of(cls, keys: Sequence[str], extents: Sequence[SampleExtent], sizes: npt.NDArray[np.int32]) -> Rows:
        """The rows of samples as a `TarWriter` placed them. sizes: int32 [n, 2], (height, width)."""
        placed = [{field_of(e): where for e, where in extent.members.items()} for extent in extents]
        names = sorted({name for fields in placed for name in fields})
        columns = {n: np.asarray([p.get(n, (-1, -1)) for p in placed], np.int64).reshape(-1, 2) for n in names}
        return cls(
            keys=keys,
            starts=np.asarray([e.start for e in extents], np.int64),
            stops=np.asarray([e.stop for e in extents], np.int64),
            fields={n: (c[:, 0].copy(), c[:, 1].copy()) for n, c in columns.items()},
            sizes=sizes.astype(np.int32),
        )

    @property
    def num_samples(self) -> int:
        """n."""
        return len(self.starts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The block parts of one shard, p in all: starts, stops, base int64 [p] and digests uint64 [p]."""

    starts: Ints
    stops: Ints
    base: Ints
    digests: npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardIndex:
    """An opened index. `keys` is a pyarrow column (strings), to be read through `key`."""

    rows_fields: dict[str, tuple[Ints, Ints]]
    sizes: npt.NDArray[np.int32]
    parts: Parts
    keys: Any

    @property
    def num_samples(self) -> int:
        """Samples of the shard."""
        return len(self.sizes)

    def key(self, row: int) -> str:
        """The key of the sample at `row` of the shard."""
        return str(self.keys[row].as_py())


def sample_bounds(index: ShardIndex) -> tuple[Ints, Ints]:
    """int64 [n] starts and stops of the samples of a shard: a sample ends where its last member does, padded, and the
    next one starts there."""
    ends = np.zeros(index.num_samples, np.int64)
    for offsets, sizes in index.rows_fields.values():
        ends = np.maximum(ends, np.where(offsets < 0, 0, offsets + sizes))
    stops = -(-ends // RECORD_BYTES) * RECORD_BYTES
    return np.concatenate([index.parts.starts[:1], stops[:-1]]), stops


def part_rows(first_sample: int, num_samples: int, block_samples: int) -> list[tuple[int, int]]:
    """The rows [start, stop) of each block part of a shard whose first sample has the global id `first_sample`."""
    stop = first_sample + num_samples
    cuts = [first_sample, *range((first_sample // block_samples + 1) * block_samples, stop, block_samples), stop]
    return [(a - first_sample, b - first_sample) for a, b in itertools.pairwise(cuts) if b > a]


def encode_index(rows: Rows, parts: Parts, first_sample: int, block_samples: int) -> bytes:
    """Writes an index as an Arrow IPC file: equal content gives equal bytes with the same pyarrow."""
    import pyarrow as pa

    ranges = part_rows(first_sample, rows.num_samples, block_samples)
    columns: dict[str, Any] = {"key": pa.array(rows.keys, pa.string())}
    for name in sorted(rows.fields):
        offsets, sizes = rows.fields[name]
        columns |= {f"{name}.offset": pa.array(offsets, pa.int64()), f"{name}.size": pa.array(sizes, pa.int64())}
    columns["height"] = pa.array(np.ascontiguousarray(rows.sizes[:, 0]), pa.int32())
    columns["width"] = pa.array(np.ascontiguousarray(rows.sizes[:, 1]), pa.int32())
    batch = pa.record_batch(columns).replace_schema_metadata({"format": FORMAT})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema) as writer:
        for i, (start, stop) in enumerate(ranges):
            part = (parts.starts[i], parts.stops[i], parts.base[i], parts.digests[i])
            metadata = dict(zip(("start", "stop", "base", "digest"), map(str, map(int, part)), strict=True))
            writer.write_batch(batch.slice(start, stop - start), custom_metadata=metadata)
    return bytes(sink.getvalue())


def open_index(data: Buffer, name: str) -> ShardIndex:
    """Reads an index.

    Raises:
        ManifestError: it is torn or of another version; names `name`.
    """
    import pyarrow as pa

    try:
        reader = pa.ipc.open_file(pa.py_buffer(data))
        if (reader.schema.metadata or {}).get(b"format") != FORMAT:
            raise ManifestError(f"{name} is not an index of version {FORMAT.decode()}: {reader.schema.metadata}")
        batches = [reader.get_batch_with_custom_metadata(i) for i in range(reader.num_record_batches)]
        table = pa.Table.from_batches([b.batch for b in batches], schema=reader.schema)
        extents = [[int(b.custom_metadata[k.encode()]) for k in ("start", "stop", "base")] for b in batches]
        digests = [int(b.custom_metadata[b"digest"]) for b in batches]
    except (pa.ArrowException, OSError, KeyError, TypeError) as error:
        raise ManifestError(
            f"{name} cannot be read as an index ({error}); run `dalipipe verify`, or pack again"
        ) from error
    columns = {c: table.column(c).to_numpy() for c in table.column_names if c != "key"}
    fields = {c.removesuffix(".offset"): c for c in columns if c.endswith(".offset")}
    starts, stops, base = np.asarray(extents, np.int64).reshape(-1, 3).T.copy()
    return ShardIndex(
        rows_fields={f: (columns[c], columns[f"{f}.size"]) for f, c in fields.items()},
        sizes=np.stack([columns["height"], columns["width"]], axis=1).astype(np.int32, copy=False),
        parts=Parts(starts=starts, stops=stops, base=base, digests=np.asarray(digests, np.uint64)),
        keys=table.column("key").combine_chunks() if batches else table.column("key"),
    )


def content_digest(rows: Rows, parts: Parts) -> int:
    """The xxh3-64 of what an index says, whatever file format says it."""
    digest = Digest64()
    encoded = [key.encode("utf-8") for key in rows.keys]
    digest.update(np.asarray([len(key) for key in encoded], "<i8").tobytes())
    digest.update(b"".join(encoded))
    for name in sorted(rows.fields):
        digest.update(name.encode() + b"\0")
        for column in rows.fields[name]:
            digest.update(column.astype("<i8").tobytes())
    digest.update(rows.sizes.astype("<i4").tobytes())
    for column in (parts.starts, parts.stops, parts.base):
        digest.update(column.astype("<i8").tobytes())
    digest.update(parts.digests.astype("<u8").tobytes())
    return digest.value
