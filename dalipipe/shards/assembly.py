"""Putting a manifest together from shards that are written, in their order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dalipipe.shards.digest import digest64
from dalipipe.shards.fields import fields_of
from dalipipe.shards.header import Header, decode_shards, encode_header, encode_shards, identity_of
from dalipipe.shards.index import Parts, Rows, content_digest, encode_index, part_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestFiles:
    """The two files to publish, `shards` first and `header` last, and the identity of the data set."""

    header: bytes
    shards: bytes
    identity: str
    num_samples: int
    num_bytes: int


class ManifestBuilder:
    """Adds shards in order, then finishes. Pure: the caller writes what it gets."""

    def __init__(self, *, kind: str, classes: Sequence[str], block_samples: int) -> None:
        self._kind = kind
        self._classes = tuple(classes)
        self._block_samples = block_samples
        self._columns: dict[str, list[int]] = {
            name: [] for name in ("num_bytes", "num_samples", "checksums", "index_checksums", "index_contents")
        }
        self._names: list[str] = []
        self._extensions: set[str] = set()
        self._open_block_bytes = 0
        self.num_samples = 0

    def add(
        self,
        *,
        name: str,
        num_bytes: int,
        digest: int,
        rows: Rows,
        part_digests: Sequence[int],
        extensions: Iterable[str],
    ) -> bytes:
        """Adds the next shard and returns its index, to be written as `NAME.idx`.

        Args:
            digest: xxh3-64 of the whole shard.
            rows: at least one sample.
            part_digests: xxh3-64 of the rows of each of `part_rows(num_samples so far, ...)`.
            extensions: those that its samples have.
        """
        ranges = part_rows(self.num_samples, rows.num_samples, self._block_samples)
        if len(part_digests) != len(ranges):
            raise ValueError(f"{name}: {len(part_digests)} digests for {len(ranges)} block parts")
        base = np.zeros(len(ranges), np.int64)
        base[0] = self._open_block_bytes
        parts = Parts(
            starts=np.asarray([rows.starts[start] for start, _ in ranges], np.int64),
            stops=np.asarray([rows.stops[stop - 1] for _, stop in ranges], np.int64),
            base=base,
            digests=np.asarray(part_digests, np.uint64),
        )
        encoded = encode_index(rows, parts, self.num_samples, self._block_samples)
        self.num_samples += rows.num_samples
        whole = self.num_samples % self._block_samples == 0
        self._open_block_bytes = 0 if whole else int(base[-1] + parts.stops[-1] - parts.starts[-1])
        self._names.append(name)
        self._extensions.update(extensions)
        values = (num_bytes, rows.num_samples, digest, digest64(encoded), content_digest(rows, parts))
        for column, value in zip(self._columns.values(), values, strict=True):
            column.append(value)
        return encoded

    def finish(self, made_by: Mapping[str, str] | None = None) -> ManifestFiles:
        """The manifest over all shards added. `made_by` is noted, and no part of the identity."""
        shards = encode_shards(names=self._names, **self._columns)
        header = Header(
            kind=self._kind,
            fields=fields_of(self._extensions),
            classes=self._classes,
            block_samples=self._block_samples,
            num_samples=self.num_samples,
            num_shards=len(self._names),
            num_bytes=sum(self._columns["num_bytes"]),
            shards_checksum=digest64(shards),
            made_by=dict(made_by or {}),
        )
        header = replace(header, identity=identity_of(header, decode_shards(shards, header.shards_checksum)))
        return ManifestFiles(
            header=encode_header(header),
            shards=shards,
            identity=header.identity,
            num_samples=header.num_samples,
            num_bytes=header.num_bytes,
        )
