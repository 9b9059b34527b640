"""Checking a data set against its manifest: every byte is read once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field

import numpy as np

from dalipipe.cache.firstread import FirstReads, first_reads_path
from dalipipe.engines.engine import Engine
from dalipipe.errors import ConfigError, DataError, IntegrityError, ManifestError, StorageError
from dalipipe.packing.checksums import note_checksums, write_checksums
from dalipipe.packing.images import undecodable_images
from dalipipe.shards.digest import NO_DIGEST, Digest64, digest64
from dalipipe.shards.fields import field_of
from dalipipe.shards.index import ShardIndex, part_rows
from dalipipe.shards.manifest import Manifest, Shard
from dalipipe.shards.tar import walk_tar
from dalipipe.shards.virtual import DatasetStore, is_virtual
from dalipipe.shards.webdataset import split_name
from dalipipe.storage.coalesce import coalesce
from dalipipe.storage.open import open_store
from dalipipe.storage.store import StorageConfig, Store

Progress = Callable[[int, int], None]
"""(bytes done, bytes in all)."""

MAX_LISTED_ERRORS = 100
_SAMPLED_PARTS = 8
_PIECE_BYTES = 8 * 2**20
_REMEDY = "copy it again from where it is whole, or pack again"


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What was found. `errors`: the first 100 of `num_errors`, each naming the shard and the bytes or the key.

    without_checksum: parts of blocks whose digest the manifest does not know. first_reads: parts that were compared
    with what this node read first, for want of one. checksums_added: parts whose digest the manifest knows from now on.
    damaged: for each shard that is not whole whether its bytes are (False: only its index, or an image, is bad).
    """

    samples: int
    shards: int
    num_errors: int
    errors: list[str]
    without_checksum: int = 0
    first_reads: int = 0
    checksums_added: int = 0
    damaged: dict[int, bool] = field(default_factory=dict)

    @property
    def whole(self) -> bool:
        """Whether nothing is wrong."""
        return self.num_errors == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardTask:
    """One shard to check; see `verify`."""

    url: str
    storage: StorageConfig
    number: int
    decode: str
    cache_dir: str = ""
    add_checksums: bool = False


@dataclass(slots=True)
class Found:
    """What is wrong with one shard. index_bad: its index. bytes_bad: the shard itself."""

    errors: list[str] = field(default_factory=list)
    count: int = 0
    without_checksum: int = 0
    first_reads: int = 0
    checksums_added: int = 0
    digests: list[int] = field(default_factory=list)
    index_bad: bool = False
    bytes_bad: bool = False

    def add(self, message: str) -> None:
        """Notes an error."""
        self.count += 1
        if len(self.errors) < MAX_LISTED_ERRORS:
            self.errors.append(message)


def verify(
    url: str,
    storage: StorageConfig,
    *,
    decode: bool | str = False,
    cache_dir: str = "",
    add_checksums: bool = False,
    engine: Engine | None = None,
    progress: Progress = lambda _done, _total: None,
) -> VerifyReport:
    """Checks sizes, digests of shards, blocks and indices, and the structure of the tars.

    Args:
        decode: also decode images: `"all"` (or True), `"sample"` (see `sampled_parts`) or `"none"` (or False).
        cache_dir: the folder of this node's cache: parts whose digest the manifest does not know are compared with what
            the node read first, and kept there as that where it has not read them. Empty: not.
        add_checksums: write the digests that the manifest does not know beside the indices of shards that are whole.
            The data set stays the same one: its identity says which bytes are meant.
        engine: where shards are checked; in this process by default.

    Raises:
        ConfigError: `decode` is none of these. Damage is never raised, it is reported.
    """
    mode = {True: "all", False: "none"}.get(decode, decode) if isinstance(decode, bool) else decode
    if mode not in ("all", "sample", "none"):
        raise ConfigError(f"decode={decode!r} is not one of none, sample, all")
    with closing(open_linked(url, storage)) as store:
        try:
            manifest = Manifest.open(store.read)
        except (ManifestError, StorageError) as error:
            return VerifyReport(samples=0, shards=0, num_errors=1, errors=[f"{store.url}: {error}"])
        tasks = [
            ShardTask(
                url=url,
                storage=storage,
                number=number,
                decode=str(mode),
                cache_dir=cache_dir,
                add_checksums=add_checksums,
            )
            for number in range(manifest.num_shards)
        ]
        found = _check_all(store, manifest, tasks, engine, progress)
        report = _report_of(manifest, [found[number] for number in range(manifest.num_shards)])
        if report.checksums_added:
            note_checksums(store)
        return report


def _check_all(
    store: Store, manifest: Manifest, tasks: list[ShardTask], engine: Engine | None, progress: Progress
) -> dict[int, Found]:
    total_bytes, done_bytes = manifest.num_bytes, 0
    found: dict[int, Found] = {}
    if engine is None:
        for task in tasks:
            with closing(_Check(store, manifest, task)) as check:
                for num_bytes in check.run(found.setdefault(task.number, Found())):
                    done_bytes += num_bytes
                    progress(done_bytes, total_bytes)
        return found
    names = [manifest.shard(task.number).name for task in tasks]
    for done in engine.run(verify_shard, tasks, names=[f"verify {name}" for name in names]):
        assert isinstance(done.result, Found)
        number = tasks[done.index].number
        found[number] = done.result
        done_bytes += manifest.shard(number).num_bytes
        progress(done_bytes, total_bytes)
    return found


def _report_of(manifest: Manifest, found: list[Found]) -> VerifyReport:
    return VerifyReport(
        samples=manifest.num_samples,
        shards=manifest.num_shards,
        num_errors=sum(one.count for one in found),
        errors=[error for one in found for error in one.errors][:MAX_LISTED_ERRORS],
        without_checksum=sum(one.without_checksum for one in found),
        first_reads=sum(one.first_reads for one in found),
        checksums_added=sum(one.checksums_added for one in found),
        damaged={n: one.bytes_bad for n, one in enumerate(found) if one.bytes_bad or one.index_bad},
    )


def verify_shard(task: ShardTask) -> Found:
    """Checks one shard, for an engine."""
    found = Found()
    with (
        closing(open_linked(task.url, task.storage)) as store,
        closing(_Check(store, Manifest.open(store.read), task)) as check,
    ):
        for _ in check.run(found):
            pass
    return found


def sampled_parts(num_parts: int) -> list[int]:
    """The parts of blocks of a shard whose first image `decode=sample` decodes: up to 8, evenly spread."""
    num = min(_SAMPLED_PARTS, num_parts)
    return [number * num_parts // num for number in range(num)]


def open_linked(url: str, storage: StorageConfig) -> DatasetStore:
    """The store of a data set whose shards may lie elsewhere, or be virtual."""
    return DatasetStore(url, lambda at: open_store(at, storage))


class _Check:
    """The checks of one shard."""

    def __init__(self, store: Store, manifest: Manifest, task: ShardTask) -> None:
        self._store = store
        self._manifest = manifest
        self._task = task
        shard = manifest.shard(task.number)
        self._rows = part_rows(shard.first_sample, shard.num_samples, manifest.block_samples)
        self._decoded = {"none": [], "sample": sampled_parts(len(self._rows))}.get(task.decode, range(len(self._rows)))
        self._first: FirstReads | None = None
        if task.cache_dir:
            self._first = FirstReads(first_reads_path(task.cache_dir, manifest.identity))

    def close(self) -> None:
        """Idempotent."""
        if self._first is not None:
            self._first.close()

    def run(self, found: Found) -> Iterator[int]:
        """Checks the shard; yields the bytes read as they are read, and at last those that need no reading."""
        shard = self._manifest.shard(self._task.number)
        num_left = shard.num_bytes
        try:
            index = self._index(found)
            for num_bytes in self._read_through(shard, index, found):
                num_left -= num_bytes
                yield num_bytes
            if index is not None and self._task.add_checksums and found.without_checksum and not found.count:
                write_checksums(self._store, shard, np.asarray(found.digests, np.uint64))
                found.checksums_added, found.without_checksum = found.without_checksum, 0
        except (StorageError, DataError) as error:
            found.bytes_bad = True
            found.add(f"{self._name(shard)}: {error}")
        found.digests.clear()
        yield num_left

    def _name(self, shard: Shard) -> str:
        return f"{self._store.url}/{shard.name}"

    def _index(self, found: Found) -> ShardIndex | None:
        number = self._task.number
        try:
            return self._manifest.index(number)
        except (ManifestError, StorageError) as error:
            found.index_bad = True
            found.add(f"{self._store.url}/{self._manifest.shard(number).index_name}: {error}")
            return None

    def _read_through(self, shard: Shard, index: ShardIndex | None, found: Found) -> Iterator[int]:
        found_bytes = self._store.head(shard.name).num_bytes
        if found_bytes != shard.num_bytes:
            found.bytes_bad = True
            found.add(f"{self._name(shard)} has {found_bytes} bytes, the manifest states {shard.num_bytes}; {_REMEDY}")
            return
        whole, at = Digest64(), 0
        extents = (
            [] if index is None else list(zip(index.parts.starts.tolist(), index.parts.stops.tolist(), strict=True))
        )
        # Parts that lie one behind the other share a request; of virtual shards each is many files in any case.
        stops = {} if is_virtual(shard.name) else dict(coalesce(extents, gap_bytes=0))
        joined, joined_at = memoryview(b""), 0
        for part, (start, stop) in enumerate([*extents, (shard.num_bytes, shard.num_bytes)]):
            for piece in range(at, start, _PIECE_BYTES):
                data = self._store.read(shard.name, piece, min(piece + _PIECE_BYTES, start))
                whole.update(data)
                yield len(data)
            at = stop
            if stop > start and index is not None:
                try:
                    if not joined_at <= start <= stop <= joined_at + len(joined):
                        joined, joined_at = self._store.read(shard.name, start, stops.get(start, stop)), start
                except (StorageError, DataError) as error:
                    if not is_virtual(shard.name):
                        raise
                    found.bytes_bad = True  # one file of many; those of other parts are looked at too
                    found.add(f"{self._name(shard)}: bytes [{start}, {stop}): {error}")
                    continue
                data = joined[start - joined_at : stop - joined_at]
                whole.update(data)
                self._part(shard, index, part, data, found)
                yield len(data)
        if NO_DIGEST != shard.digest != whole.value and not found.bytes_bad:
            found.bytes_bad = True
            end = 0 if not extents else extents[-1][1]
            found.add(
                f"{self._name(shard)} has digest {whole.value:016x}, the manifest states {shard.digest:016x}"
                + (f": bytes [{end}, {shard.num_bytes}), its end, differ" if extents else "")
                + f"; {_REMEDY}"
            )

    def _part(self, shard: Shard, index: ShardIndex, part: int, data: memoryview, found: Found) -> None:
        """Checks the part of a block that lies in a shard: digest, tar members against the index, images."""
        start, stop = int(index.parts.starts[part]), int(index.parts.stops[part])
        first, end = self._rows[part]
        digest, stated = digest64(data), int(index.parts.digests[part])
        found.digests.append(digest)
        whose, unknown = "the index states", stated == NO_DIGEST
        if unknown:
            found.without_checksum += 1
            stated, whose = self._first_read(part), "this node's first read of them had"
            found.first_reads += stated != NO_DIGEST
        if stated not in (NO_DIGEST, digest):
            found.bytes_bad = True
            found.add(
                f"{self._name(shard)}: bytes [{start}, {stop}) (samples {index.key(first)!r} to "
                f"{index.key(end - 1)!r}) have digest {digest:016x}, {whose} {stated:016x}; {_REMEDY}"
            )
            return
        num_before = found.count
        wrong = _wrong_structure(index, range(first, end), start, data)
        if wrong:
            found.index_bad = True
            found.add(f"{self._name(shard)}: bytes [{start}, {stop}): {wrong}; pack or index again")
        elif part in self._decoded:
            self._images(shard, index, range(first, end if self._task.decode == "all" else first + 1), data, found)
        if unknown and found.count == num_before and self._first is not None:
            self._first.keep(self._manifest.first_part(self._task.number) + part, digest)

    def _first_read(self, part: int) -> int:
        if self._first is None:
            return NO_DIGEST
        return self._first.get(self._manifest.first_part(self._task.number) + part)

    def _images(self, shard: Shard, index: ShardIndex, rows: range, data: memoryview, found: Found) -> None:
        """Decodes the images of `rows`, which lie in the part that `data` holds and begin with its first row."""
        start = int(index.parts.starts[next(i for i, (first, _) in enumerate(self._rows) if first == rows.start)])
        offsets, sizes = index.rows_fields.get("image", (np.empty(0, np.int64), np.empty(0, np.int64)))
        present = [(row, int(offsets[row]), int(offsets[row] + sizes[row])) for row in rows if row < len(offsets)]
        present = [(row, first, stop) for row, first, stop in present if first >= 0]
        reasons = undecodable_images([data[first - start : stop - start] for _, first, stop in present])
        for (row, first, stop), reason in zip(present, reasons, strict=True):
            if reason is not None:
                found.add(
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
    keys = {index.key(row) for row in rows}
    found = {}
    try:
        for member in walk_tar(data):
            named = split_name(member.name)
            if named is not None and named[0] not in keys:
                named = split_name(member.name, "last")
            if named is not None:
                found[named[0], field_of(named[1])] = (start + member.offset, member.num_bytes)
    except IntegrityError as error:
        return str(error)
    for key, name in sorted(stated.keys() | found.keys()):
        if stated.get((key, name)) != found.get((key, name)):
            return (
                f"sample {key!r}, field {name!r}: the index states (offset, bytes) {stated.get((key, name))}, "
                f"the tar has {found.get((key, name))}"
            )
    return None
