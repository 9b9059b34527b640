"""Making a damaged data set whole: from its own tars, from a copy, or without what is lost."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np

from dalipipe.errors import CorruptSampleError, DataError, IntegrityError, ManifestError, StorageError
from dalipipe.packing.temporary import temporary_file
from dalipipe.packing.verify import VerifyReport, open_linked
from dalipipe.packing.written import Written, known_digests, publish, read_digests, rows_of
from dalipipe.shards.digest import NO_DIGEST, Digest64, digest64
from dalipipe.shards.fields import field_of
from dalipipe.shards.imageheader import parse_image_header
from dalipipe.shards.index import Rows
from dalipipe.shards.manifest import Manifest, Shard
from dalipipe.shards.tar import SampleExtent, scan_tar
from dalipipe.shards.virtual import is_virtual
from dalipipe.shards.webdataset import HeaderWindow, group_neighbours
from dalipipe.storage.store import StorageConfig, Store
from dalipipe.storage.url import is_link

_WINDOW_BYTES = 8 * 2**20
_PIECE_BYTES = 8 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairReport:
    """What was done, by shard name. identity: of the data set as it is now: the old one unless shards were left out, or
    an index was made again of a merged set whose manifest lacked some of its digests."""

    indices_made: list[str]
    shards_fetched: list[str]
    shards_dropped: list[str]
    identity: str
    identity_before: str


def repair(
    url: str,
    storage: StorageConfig,
    found: VerifyReport,
    *,
    copy: str = "",
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> RepairReport:
    """Mends what `verify` found and writes the manifest anew, the header last.

    A shard whose bytes are damaged is fetched from the data set at the URL `copy` when its digest is right there, else
    left out. An index is made again from its shard. Images that cannot be decoded stay: they are as they were packed.
    The files of shards that are left out are not deleted. Checksums that are not known stay so: `verify` adds them.

    Raises:
        ManifestError: nothing whole is left, the manifest itself is damaged, or files of a virtual tar changed.
        StorageError: the data set cannot be written to.
    """
    with ExitStack() as stack:
        store = stack.enter_context(closing(open_linked(url, storage)))
        other = stack.enter_context(closing(open_linked(copy, storage))) if copy else None
        mending = _Mending(store, other, url, found)
        manifest = mending.manifest
        kept: list[Written] = []
        for number in range(manifest.num_shards):
            written = mending.shard(number)
            if written is not None:
                kept.append(written)
            progress(number + 1, manifest.num_shards)
        if not kept:
            raise ManifestError(f"no shard of {store.url} is whole; give repair_from=URL of a copy, or pack again")
        changed = {one.name for one in kept} if mending.dropped else set(mending.shards_made)
        complete = _with_checksums(store, kept, manifest.block_samples, changed)
        made_by = {**mending.made_by, "repaired": "true"}
        files = publish(
            store,
            complete,
            kind=manifest.kind,
            classes=manifest.classes,
            block_samples=manifest.block_samples,
            made_by=made_by,
            keep=lambda name, data: _same(store, name, data),
        )
        return RepairReport(
            indices_made=mending.indices_made,
            shards_fetched=mending.fetched,
            shards_dropped=mending.dropped,
            identity=files.identity,
            identity_before=manifest.identity,
        )


def _with_checksums(store: Store, shards: list[Written], block_samples: int, changed: set[str]) -> list[Written]:
    """The shards, those in `changed` (by name: their parts, or what is known of them, are others now) with the digests
    of all parts where they had any: these are read once."""
    first = 0
    complete = []
    for written in shards:
        extents = written.extents(first, block_samples)
        first += written.rows.num_samples
        known_all = all(extent in written.known for extent in extents)
        if known_all or written.name not in changed or written.digest == NO_DIGEST:
            complete.append(written)
            continue
        digest, known = read_digests(store, written.name, written.num_bytes, extents)
        if digest != written.digest:
            raise IntegrityError(
                f"{store.url}/{written.name} changed since it was verified: digest {digest:016x}, was "
                f"{written.digest:016x}; run again when nothing writes to it"
            )
        complete.append(replace(written, known=known))
    return complete


class _Mending:
    """One repair: shard by shard what it takes to have it whole."""

    def __init__(self, store: Store, other: Store | None, url: str, found: VerifyReport) -> None:
        self._store = store
        self._other = other
        self._url = url
        self._damaged = found.damaged
        self._as_known = Manifest.open(store.read)
        header, shards = self._as_known.files
        # As it was made: checksums that were added later would change the indices, and with them the identity.
        self.manifest = Manifest(replace(header, made_by={}), shards, store.read)
        self.made_by = header.made_by
        self.indices_made: list[str] = []
        self.shards_made: list[str] = []
        self.fetched: list[str] = []
        self.dropped: list[str] = []

    def shard(self, number: int) -> Written | None:
        """The shard, mended; None when it cannot be."""
        shard = self.manifest.shard(number)
        if self._damaged.get(number, False) and is_virtual(shard.name):
            raise ManifestError(
                f"{self._store.url}/{shard.name} stands for files of which some changed or are gone: there is no shard "
                "to mend. Restore them, or run `dalipipe index` again with index.overwrite=true"
            )
        if self._damaged.get(number, False) and not self._fetch(number, shard):
            self.dropped.append(shard.name)
            return None
        try:
            index = self.manifest.index(number)
            if number not in self._damaged or self._damaged[number]:
                rows, known = rows_of(index), known_digests(index)
                present = {name for name, (offsets, _) in index.rows_fields.items() if (offsets >= 0).any()}
                extensions = [e for f in self.manifest.fields if f.name in present for e in f.extensions]
                return self._written(shard, rows, known, tuple(extensions))
        except (ManifestError, StorageError):
            pass
        try:
            rows, extensions = rows_of_tar(self._store, shard)
        except DataError:
            self.dropped.append(shard.name)
            return None
        if is_virtual(shard.name):  # its files were only listed when it was indexed: no sizes
            rows = replace(rows, sizes=np.zeros_like(rows.sizes))
        self.indices_made.append(shard.index_name)
        self.shards_made.append(shard.name)
        return self._written(shard, rows, {}, tuple(extensions))

    def _written(
        self, shard: Shard, rows: Rows, known: dict[tuple[int, int], int], extensions: tuple[str, ...]
    ) -> Written:
        return Written(
            name=shard.name,
            num_bytes=shard.num_bytes,
            digest=shard.digest,
            rows=rows,
            extensions=extensions,
            known=known,
        )

    def _fetch(self, number: int, shard: Shard) -> bool:
        """Copies a shard from the other data set, if it is whole there; linked or virtual ones are not ours."""
        if self._other is None or is_link(shard.name) or is_virtual(shard.name):
            return False
        digest = Digest64()
        try:
            with temporary_file(self._url) as file:
                for start in range(0, shard.num_bytes, _PIECE_BYTES):
                    data = self._other.read(shard.name, start, min(start + _PIECE_BYTES, shard.num_bytes))
                    digest.update(data)
                    file.write(data)
                file.flush()
                if digest.value != shard.digest and not (shard.digest == NO_DIGEST and self._parts_match(number, file)):
                    return False
                self._store.put(shard.name, Path(f"/proc/self/fd/{file.fileno()}"))
        except (StorageError, DataError):
            return False
        self.fetched.append(shard.name)
        return True

    def _parts_match(self, number: int, file: BinaryIO) -> bool:
        """Whether a copy of a shard has the checksums that were added to the manifest, all parts of it."""
        parts = self._as_known.index(number).parts
        for start, stop, stated in zip(
            parts.starts.tolist(), parts.stops.tolist(), parts.digests.tolist(), strict=True
        ):
            if stated == NO_DIGEST or digest64(os.pread(file.fileno(), stop - start, start)) != stated:
                return False
        return True


def rows_of_tar(store: Store, shard: Shard) -> tuple[Rows, list[str]]:
    """The rows of a shard from its tar alone, and the extensions of its members.

    Raises:
        IntegrityError: the tar is damaged or does not hold the samples that the manifest counts.
    """
    window = HeaderWindow(lambda a, b: store.read(shard.name, a, b), shard.num_bytes, _WINDOW_BYTES)
    for dots in ("first", "last"):
        keys, extents, sizes = [], [], []
        for group in group_neighbours(scan_tar(window, shard.num_bytes), dots):
            members = list(group.members.values())
            keys.append(group.key)
            extents.append(
                SampleExtent(
                    start=members[0].start,
                    stop=members[-1].stop,
                    members={e: (m.offset, m.num_bytes) for e, m in group.members.items()},
                )
            )
            sizes.append(_image_size(window, extents[-1]))
        if len(keys) == shard.num_samples:
            rows = Rows.of(keys, extents, np.asarray(sizes, np.int32).reshape(-1, 2))
            return rows, sorted({e for extent in extents for e in extent.members})
    raise IntegrityError(f"{shard.name} holds {len(keys)} samples, the manifest states {shard.num_samples}")


def _image_size(window: HeaderWindow, extent: SampleExtent) -> tuple[int, int]:
    for extension, (offset, num_bytes) in extent.members.items():
        if field_of(extension) == "image":
            try:
                header = parse_image_header(window(offset, offset + num_bytes))
            except CorruptSampleError:
                return 0, 0
            return header.height, header.width
    return 0, 0


def _same(store: Store, name: str, data: bytes) -> bool:
    """Whether an object holds these bytes already."""
    try:
        return digest64(store.read(name)) == digest64(data)
    except StorageError:
        return False
