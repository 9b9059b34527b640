"""Shards that exist, as rows of an index; and a manifest over them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from dalipipe.errors import IntegrityError
from dalipipe.packing.ahead import in_order
from dalipipe.shards.assembly import ManifestBuilder, ManifestFiles
from dalipipe.shards.digest import NO_DIGEST, Digest64, digest64
from dalipipe.shards.header import HEADER_NAME, SHARDS_NAME
from dalipipe.shards.index import Rows, ShardIndex, part_rows, sample_bounds
from dalipipe.shards.manifest import index_name
from dalipipe.storage.store import Store

_PIECE_BYTES = 8 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A shard that exists. digest: of the whole shard, NO_DIGEST where unknown. known: digests of byte ranges
    (start, stop). extensions: those that its members have."""

    name: str
    num_bytes: int
    digest: int
    rows: Rows
    extensions: tuple[str, ...]
    known: dict[tuple[int, int], int]

    def extents(self, first_sample: int, block_samples: int) -> list[tuple[int, int]]:
        """The bytes [start, stop) of its block parts when its first sample has the id `first_sample`."""
        ranges = part_rows(first_sample, self.rows.num_samples, block_samples)
        return [(int(self.rows.starts[a]), int(self.rows.stops[b - 1])) for a, b in ranges]


def rows_of(index: ShardIndex) -> Rows:
    """The rows of an opened index."""
    starts, stops = sample_bounds(index)
    return Rows(
        keys=[index.key(row) for row in range(index.num_samples)],
        starts=starts,
        stops=stops,
        fields=index.rows_fields,
        sizes=index.sizes,
    )


def known_digests(index: ShardIndex) -> dict[tuple[int, int], int]:
    """The digests that an index states, by byte range."""
    parts = index.parts
    columns = (parts.starts.tolist(), parts.stops.tolist(), parts.digests.tolist())
    return {(start, stop): digest for start, stop, digest in zip(*columns, strict=True) if digest != NO_DIGEST}


def read_digests(
    store: Store, name: str, num_bytes: int, extents: Sequence[tuple[int, int]]
) -> tuple[int, dict[tuple[int, int], int]]:
    """The xxh3-64 of a whole shard and of each of its extents (in order, apart from each other), by one read of it.

    Raises:
        IntegrityError: the shard is shorter than `num_bytes`.
    """
    whole, found = Digest64(), dict[tuple[int, int], int]()
    at = 0
    for start, stop in [*extents, (num_bytes, num_bytes)]:
        for piece in range(at, start, _PIECE_BYTES):
            whole.update(store.read(name, piece, min(piece + _PIECE_BYTES, start)))
        if stop > start:
            data = store.read(name, start, stop)
            if len(data) != stop - start:
                raise IntegrityError(f"{name} ended at {start + len(data)} of {num_bytes} bytes")
            whole.update(data)
            found[start, stop] = digest64(data)
        at = stop
    return whole.value, found


def publish(
    store: Store,
    shards: Sequence[Written],
    *,
    kind: str,
    classes: Sequence[str],
    block_samples: int,
    made_by: Mapping[str, str],
    keep: Callable[[str, bytes], bool] = lambda _name, _data: False,
) -> ManifestFiles:
    """Writes the indices and the manifest of shards that exist, the header last.

    Args:
        keep: whether an index of these bytes is there already under its name.
    """
    builder = ManifestBuilder(kind=kind, classes=classes, block_samples=block_samples)

    def indices() -> Iterator[tuple[str, bytes]]:
        for shard in shards:
            extents = shard.extents(builder.num_samples, block_samples)
            encoded = builder.add(
                name=shard.name,
                num_bytes=shard.num_bytes,
                digest=shard.digest,
                rows=shard.rows,
                part_digests=[shard.known.get(extent, NO_DIGEST) for extent in extents],
                extensions=shard.extensions,
            )
            yield index_name(shard.name), encoded

    def put(index: tuple[str, bytes]) -> None:
        if not keep(*index):
            store.put(*index)

    for _ in in_order(put, indices()):
        pass
    files = builder.finish(made_by)
    store.put(SHARDS_NAME, files.shards)
    store.put(HEADER_NAME, files.header)
    return files
