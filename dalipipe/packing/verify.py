"""Checking a data set against its manifest: every byte is read once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from dalipipe.errors import ConfigError, DataError, IntegrityError, ManifestError, StorageError
from dalipipe.packing.images import undecodable_images
from dalipipe.shards.digest import Digest64, digest64
from dalipipe.shards.fields import field_of
from dalipipe.shards.index import ShardIndex, part_rows
from dalipipe.shards.manifest import Manifest, Shard
from dalipipe.shards.tar import walk_tar
from dalipipe.storage.open import open_store
from dalipipe.storage.store import StorageConfig, Store

Progress = Callable[[int, int], None]
"""(bytes done, bytes in all)."""

MAX_LISTED_ERRORS = 100
_PIECE_BYTES = 8 * 2**20
_REMEDY = "copy it again from where it is whole, or pack again"


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What was found. `errors`: the first 100 of `num_errors`, each naming the shard and the bytes or the key."""

    samples: int
    shards: int
    num_errors: int
    errors: list[str]

    @property
    def whole(self) -> bool:
        """Whether nothing is wrong."""
        return self.num_errors == 0


@dataclass(slots=True)
class _Errors:
    listed: list[str] = field(default_factory=list)
    count: int = 0

    def add(self, message: str) -> None:
        self.count += 1
        if len(self.listed) < MAX_LISTED_ERRORS:
            self.listed.append(message)


def verify(
    url: str,
    storage: StorageConfig,
    *,
    decode: bool | str = False,
    progress: Progress = lambda _done, _total: None,
) -> VerifyReport:
    """Checks sizes, digests of shards, blocks and indices, and the structure of the tars.

    Args:
        decode: also decode images: `"all"` (or True), `"sample"` (the first of every block) or `"none"` (or False).

    Raises:
        ConfigError: `decode` is none of these. Damage is never raised, it is reported.
    """
    mode = {True: "all", False: "none"}.get(decode, decode) if isinstance(decode, bool) else decode
    if mode not in ("all", "sample", "none"):
        raise ConfigError(f"decode={decode!r} is not one of none, sample, all")
    errors = _Errors()
    store = open_store(url, storage)
    try:
        try:
            manifest = Manifest.open(store.read)
        except (ManifestError, StorageError) as error:
            errors.add(f"{store.url}: {error}")
            return VerifyReport(samples=0, shards=0, num_errors=errors.count, errors=errors.listed)
        check = _Check(store, manifest, str(mode), errors)
        done_bytes, total_bytes = 0, manifest.num_bytes
        for number in range(manifest.num_shards):
            for num_bytes in check.shard(number):
                done_bytes += num_bytes
                progress(done_bytes, total_bytes)
        return VerifyReport(
            samples=manifest.num_samples, shards=manifest.num_shards, num_errors=errors.count, errors=errors.listed
        )
    finally:
        store.close()


class _Check:
    """The checks of one data set, shard by shard."""

    def __init__(self, store: Store, manifest: Manifest, decode: str, errors: _Errors) -> None:
        self._store = store
        self._manifest = manifest
        self._decode = decode
        self._errors = errors

    def shard(self, number: int) -> Iterator[int]:
        """Checks one shard; yields the bytes read as they are read, and at last those that need no reading."""
        shard = self._manifest.shard(number)
        num_left = shard.num_bytes
        try:
            for num_bytes in self._read_through(shard, self._index(number)):
                num_left -= num_bytes
                yield num_bytes
        except (StorageError, DataError) as error:
            self._errors.add(f"{self._name(shard)}: {error}")
        yield num_left

    def _name(self, shard: Shard) -> str:
        return f"{self._store.url}/{shard.name}"

    def _index(self, number: int) -> ShardIndex | None:
        try:
            return self._manifest.index(number)
        except (ManifestError, StorageError) as error:
            self._errors.add(f"{self._store.url}/{self._manifest.shard(number).index_name}: {error}")
            return None

    def _read_through(self, shard: Shard, index: ShardIndex | None) -> Iterator[int]:
        found_bytes = self._store.head(shard.name).num_bytes
        if found_bytes != shard.num_bytes:
            self._errors.add(
                f"{self._name(shard)} has {found_bytes} bytes, the manifest states {shard.num_bytes}; {_REMEDY}"
            )
            return
        whole, num_before = Digest64(), self._errors.count
        num_parts = 0 if index is None else len(index.parts.starts)
        for part in range(num_parts):
            assert index is not None
            start, stop = int(index.parts.starts[part]), int(index.parts.stops[part])
            data = self._store.read(shard.name, start, stop)
            whole.update(data)
            self._part(shard, index, part, data)
            yield len(data)
        end_of_samples = 0 if index is None else int(index.parts.stops[-1])
        for start in range(end_of_samples, shard.num_bytes, _PIECE_BYTES):
            data = self._store.read(shard.name, start, min(start + _PIECE_BYTES, shard.num_bytes))
            whole.update(data)
            yield len(data)
        if whole.value != shard.digest and self._errors.count == num_before:
            self._errors.add(
                f"{self._name(shard)} has digest {whole.value:016x}, the manifest states {shard.digest:016x}"
                + (f": bytes [{end_of_samples}, {shard.num_bytes}), its end, differ" if index is not None else "")
                + f"; {_REMEDY}"
            )

    def _part(self, shard: Shard, index: ShardIndex, part: int, data: memoryview) -> None:
        """Checks the part of a block that lies in a shard: digest, tar members against the index, images."""
        start, stop = int(index.parts.starts[part]), int(index.parts.stops[part])
        first, end = part_rows(shard.first_sample, shard.num_samples, self._manifest.block_samples)[part]
        found, stated = digest64(data), int(index.parts.digests[part])
        if found != stated:
            self._errors.add(
                f"{self._name(shard)}: bytes [{start}, {stop}) (samples {index.key(first)!r} to "
                f"{index.key(end - 1)!r}) have digest {found:016x}, the index states {stated:016x}; {_REMEDY}"
            )
            return
        wrong = _wrong_structure(index, range(first, end), start, data)
        if wrong:
            self._errors.add(f"{self._name(shard)}: bytes [{start}, {stop}): {wrong}; pack again")
        elif self._decode != "none":
            self._images(shard, index, range(first, end if self._decode == "all" else first + 1), data, start)

    def _images(self, shard: Shard, index: ShardIndex, rows: range, data: memoryview, start: int) -> None:
        offsets, sizes = index.rows_fields.get("image", (np.empty(0, np.int64), np.empty(0, np.int64)))
        present = [(row, int(offsets[row]), int(offsets[row] + sizes[row])) for row in rows if row < len(offsets)]
        present = [(row, first, stop) for row, first, stop in present if first >= 0]
        reasons = undecodable_images([data[first - start : stop - start] for _, first, stop in present])
        for (row, first, stop), reason in zip(present, reasons, strict=True):
            if reason is not None:
                self._errors.add(
                    f"{self._name(shard)}: image of sample {index.key(row)!r} at bytes [{first}, {stop}) cannot be "
                    f"decoded: {reason}; mend the source and pack again"
                )


def _wrong_structure(index: ShardIndex, rows: range, start: int, data: memoryview) -> str | None:
    """How the members of a piece of a tar, at byte `start` of the shard, differ from the index; None when not."""
    stated = {
        (index.key(row), name): (int(offsets[row]), int(sizes[row]))
        for row in rows
        for name, (offsets, sizes) in index.rows_fields.items()
        if offsets[row] >= 0
    }
    found = {}
    try:
        for member in walk_tar(data):
            key, _, extension = member.name.rpartition(".")
            found[key, field_of(extension)] = (start + member.offset, member.num_bytes)
    except IntegrityError as error:
        return str(error)
    for key, name in sorted(stated.keys() | found.keys()):
        if stated.get((key, name)) != found.get((key, name)):
            return (
                f"sample {key!r}, field {name!r}: the index states (offset, bytes) {stated.get((key, name))}, "
                f"the tar has {found.get((key, name))}"
            )
    return None
