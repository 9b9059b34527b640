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
from dalipipe.shards.tar import END_BYTES, walk_tar
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
        done_bytes = 0
        for number in range(manifest.num_shards):
            shard = manifest.shard(number)
            for num_bytes in _verify_shard(store, manifest, number, str(mode), errors):
                done_bytes += num_bytes
                progress(min(done_bytes, manifest.num_bytes), manifest.num_bytes)
            done_bytes = sum(manifest.shard(i).num_bytes for i in range(number)) + shard.num_bytes
        return VerifyReport(
            samples=manifest.num_samples, shards=manifest.num_shards, num_errors=errors.count, errors=errors.listed
        )
    finally:
        store.close()


def _verify_shard(store: Store, manifest: Manifest, number: int, decode: str, errors: _Errors) -> Iterator[int]:
    """Checks one shard; yields the bytes read as they are read."""
    shard = manifest.shard(number)
    name = f"{store.url}/{shard.name}"
    try:
        found_bytes = store.head(shard.name).num_bytes
        if found_bytes != shard.num_bytes:
            errors.add(f"{name} has {found_bytes} bytes, the manifest states {shard.num_bytes}; {_REMEDY}")
            return
        index: ShardIndex | None = None
        try:
            index = manifest.index(number)
        except (ManifestError, StorageError) as error:
            errors.add(f"{store.url}/{shard.index_name}: {error}")
        whole = Digest64()
        num_before = errors.count
        position = 0
        if index is not None:
            position = int(index.parts.stops[-1])
            for rows, data in _parts(store, manifest, shard, index):
                whole.update(data)
                _verify_part(name, index, rows, data, decode, errors)
                yield len(data)
        for data in _pieces(store, shard, position):
            whole.update(data)
            if index is not None and (len(data) < END_BYTES or bytes(data).strip(b"\0")):
                errors.add(f"{name}: bytes [{position}, {shard.num_bytes}) do not end a tar with zeros; {_REMEDY}")
            yield len(data)
        if whole.value != shard.digest and errors.count == num_before:
            errors.add(
                f"{name} has digest {whole.value:016x}, the manifest states {shard.digest:016x}, though each block "
                f"matches: bytes between them differ; {_REMEDY}"
                if index is not None
                else f"{name} has digest {whole.value:016x}, the manifest states {shard.digest:016x}; {_REMEDY}"
            )
    except (StorageError, DataError) as error:
        errors.add(f"{name}: {error}")


def _parts(
    store: Store, manifest: Manifest, shard: Shard, index: ShardIndex
) -> Iterator[tuple[tuple[int, int, int], memoryview]]:
    """((part, first row, last row + 1), bytes) of every block part of a shard."""
    ranges = part_rows(shard.first_sample, shard.num_samples, manifest.block_samples)
    for part, (first, stop) in enumerate(ranges):
        start, end = int(index.parts.starts[part]), int(index.parts.stops[part])
        yield (part, first, stop), store.read(shard.name, start, end)


def _pieces(store: Store, shard: Shard, position: int) -> Iterator[memoryview]:
    while position < shard.num_bytes:
        stop = min(position + _PIECE_BYTES, shard.num_bytes)
        yield store.read(shard.name, position, stop)
        position = stop


def _verify_part(
    name: str, index: ShardIndex, rows: tuple[int, int, int], data: memoryview, decode: str, errors: _Errors
) -> None:
    part, first, stop = rows
    start, end = int(index.parts.starts[part]), int(index.parts.stops[part])
    found = digest64(data)
    stated = int(index.parts.digests[part])
    if found != stated:
        errors.add(
            f"{name}: bytes [{start}, {end}) (samples {index.key(first)!r} to {index.key(stop - 1)!r}) have digest "
            f"{found:016x}, the index states {stated:016x}; {_REMEDY}"
        )
        return
    wrong = _wrong_structure(index, (start, first, stop), data)
    if wrong:
        errors.add(f"{name}: bytes [{start}, {end}): {wrong}; pack again")
    elif decode != "none":
        _verify_images(name, index, range(first, stop if decode == "all" else first + 1), start, data, errors)


def _wrong_structure(index: ShardIndex, where: tuple[int, int, int], data: memoryview) -> str | None:
    """How the members of a part of a tar differ from its index, or None."""
    start, first, stop = where
    stated = {
        (index.key(row), name): (int(offsets[row]), int(sizes[row]))
        for row in range(first, stop)
        for name, (offsets, sizes) in index.rows_fields.items()
        if offsets[row] >= 0
    }
    try:
        members = list(walk_tar(data))
    except IntegrityError as error:
        return str(error)
    found = {}
    for member in members:
        key, _, extension = member.name.rpartition(".")
        found[key, field_of(extension)] = (start + member.offset, member.num_bytes)
    for key, name in stated.keys() | found.keys():
        if stated.get((key, name)) != found.get((key, name)):
            return (
                f"sample {key!r}, field {name!r}: the index states (offset, bytes) {stated.get((key, name))}, "
                f"the tar has {found.get((key, name))}"
            )
    return None


def _verify_images(name: str, index: ShardIndex, rows: range, start: int, data: memoryview, errors: _Errors) -> None:
    offsets, sizes = index.rows_fields.get("image", (np.empty(0, np.int64), np.empty(0, np.int64)))
    present = [row for row in rows if row < len(offsets) and offsets[row] >= 0]
    images = [data[int(offsets[row]) - start : int(offsets[row] + sizes[row]) - start] for row in present]
    for row, reason in zip(present, undecodable_images(images), strict=True):
        if reason is not None:
            errors.add(
                f"{name}: image of sample {index.key(row)!r} at bytes [{int(offsets[row])}, "
                f"{int(offsets[row] + sizes[row])}) cannot be decoded: {reason}; mend the source and pack again"
            )
