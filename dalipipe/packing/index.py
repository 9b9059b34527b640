"""A manifest for what exists already: of tars the headers are read, image files are only listed."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from dalipipe.errors import (
    ConfigError,
    CorruptSampleError,
    IntegrityError,
    ObjectNotFoundError,
    SourceError,
    TargetExistsError,
)
from dalipipe.packing.ahead import in_order
from dalipipe.packing.braces import expand_braces
from dalipipe.packing.config import IndexConfig
from dalipipe.packing.discover import TAR_ENDINGS
from dalipipe.packing.files import index_files
from dalipipe.packing.inputs import is_compressed
from dalipipe.packing.plan import DOTS, block_samples
from dalipipe.packing.sieve import Sieve, behind_the_end, no_end
from dalipipe.packing.verify import open_linked
from dalipipe.packing.written import Written, publish, read_digests
from dalipipe.shards.checksums import checksums_name
from dalipipe.shards.digest import NO_DIGEST
from dalipipe.shards.fields import IMAGE_EXTENSIONS, field_of
from dalipipe.shards.header import HEADER_NAME
from dalipipe.shards.imageheader import parse_image_header
from dalipipe.shards.index import Rows
from dalipipe.shards.manifest import index_name
from dalipipe.shards.tar import SampleExtent, TarMember, scan_entries
from dalipipe.shards.webdataset import Group, HeaderWindow, group_neighbours
from dalipipe.storage.open import open_store
from dalipipe.storage.store import ObjectInfo, StorageConfig, Store
from dalipipe.storage.url import is_link, link_from
from dalipipe.units import parse_bytes

_log = logging.getLogger(__name__)

DALI_VERSION = "v1.2"
_ENDINGS = (*TAR_ENDINGS, *(f".{extension}" for extension in IMAGE_EXTENSIONS), ".parquet")
_IMAGE_HEAD_BYTES = 1024
"""Where the size of most images stands; what the window holds beyond is looked at too."""
Progress = Callable[[int, int], None]
"""(tars done, tars in all; 0 while they are still listed)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexReport:
    """What was indexed. bytes: of all tars, virtual ones included; bytes_read: of them, to learn what they hold.
    checksums: known or not. skipped: members of tars that are no data, by kind in `skipped_kinds`. truncated: tars
    without an end, which may have been cut between two members."""

    samples: int
    shards: int
    bytes: int
    bytes_read: int
    seconds: float
    checksums: bool
    identity: str
    skipped: int = 0
    skipped_kinds: dict[str, int] = field(default_factory=dict)
    truncated: int = 0


@dataclass(frozen=True, slots=True)
class _Scanned:
    written: Written
    dali: str
    bytes_read: int
    sieve: Sieve


@dataclass(frozen=True, slots=True, kw_only=True)
class _Laid:
    """Shards that exist, or that files make, and how they are cut. dali: files for DALI, by name."""

    what: str
    shards: list[Written]
    block_samples: int
    classes: tuple[str, ...] = ()
    bytes_read: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    num_unended: int = 0
    dali: dict[str, str] = field(default_factory=dict)


def index(
    source: str,
    target: str,
    config: IndexConfig,
    storage: StorageConfig,
    *,
    progress: Progress = lambda _done, _total: None,
) -> IndexReport:
    """Makes a manifest over the tars under the URL `source`, or the image files where there are no tars (or labels are
    given), at the URL `target` (empty: beside them).

    Memory is about 250 bytes a sample. Tars are taken in the order of their names. A `source` that ends in a name, with
    braces or without (`https://host/set/part-{000..127}.tar`), is not listed: web servers cannot be.

    Raises:
        ConfigError: a value of `config` can never work.
        SourceError: there is no tar and no image, a tar is compressed or damaged, or its samples cannot be read in
            place.
        TargetExistsError: there is a manifest at the target and `index.overwrite` is off.
    """
    begin_s = time.monotonic()
    window_bytes = _check_config(config)
    names: list[str] = []
    if source.endswith(".tar") and not Path(source).is_dir():
        folder, _, pattern = source.rpartition("/")
        source, names = folder or ".", expand_braces(pattern)
    with (
        closing(open_store(source, storage)) as store,
        closing(open_linked(target or source, storage)) as place,
    ):
        if not config.overwrite and has_manifest(place):
            raise TargetExistsError(
                f"{place.url} has a manifest already; use it, or set index.overwrite=true to replace it"
            )
        found = _named(store, names, progress) if names else _listed(store, progress)
        tars = _tars(store, found)
        if config.labels or not tars:
            laid = _files(store, place, found, config)
        else:

            def scan(info: ObjectInfo) -> _Scanned:
                return _scan(store, info, config, window_bytes, link_from(place.url, f"{store.url}/{info.key}"))

            scanned = []
            with ThreadPoolExecutor(storage.concurrency, thread_name_prefix="index") as pool:
                for number, one in enumerate(pool.map(scan, tars), start=1):
                    scanned.append(one)
                    progress(number, len(tars))
            laid = _laid_tars(scanned, store.url, config)
        shards = laid.shards
        if config.checksums:
            with ThreadPoolExecutor(storage.concurrency, thread_name_prefix="index") as pool:
                shards = list(pool.map(lambda pair: _with_digests(place, *pair), _cut(shards, laid.block_samples)))
        if config.overwrite:
            # Added to the manifest that is replaced: the tars may be others now.
            for _ in in_order(lambda shard: place.delete(checksums_name(index_name(shard.name))), shards):
                pass
        files = publish(
            place,
            shards,
            kind="images",
            classes=laid.classes,
            block_samples=laid.block_samples,
            made_by={"indexed": laid.what},
        )
        for name, dali in laid.dali.items():
            place.put(name, dali.encode())
    return IndexReport(
        samples=files.num_samples,
        shards=len(shards),
        bytes=files.num_bytes,
        bytes_read=files.num_bytes if config.checksums else laid.bytes_read,
        seconds=time.monotonic() - begin_s,
        checksums=config.checksums,
        identity=files.identity,
        skipped=laid.skipped.total(),
        skipped_kinds=dict(sorted(laid.skipped.items())),
        truncated=laid.num_unended,
    )


def _laid_tars(scanned: Sequence[_Scanned], url: str, config: IndexConfig) -> _Laid:
    full = [one for one in scanned if one.written.rows.num_samples]
    if not full:
        raise SourceError(f"the {len(scanned)} tars of {url} hold no sample; check source= and index.dots")
    shards = [one.written for one in full]
    num_samples = sum(shard.rows.num_samples for shard in shards)
    num_bytes = sum(shard.num_bytes for shard in shards)
    if more := behind_the_end(url, {one.written.name: one.sieve.counts for one in scanned}):
        _log.warning(more)
    unended = [one.written.name for one in scanned if not one.sieve.ended]
    if unended:
        _log.warning(no_end(url, unended))
    return _Laid(
        what="tars",
        shards=shards,
        block_samples=block_samples(num_samples, len(shards), num_bytes, config.block_bytes),
        bytes_read=sum(one.bytes_read for one in scanned),
        skipped=sum((one.sieve.counts for one in scanned), Counter()),
        num_unended=len(unended),
        dali={_dali_name(one.written.name): one.dali for one in full} if config.dali else {},
    )


def _dali_name(shard: str) -> str:
    beside = shard.rpartition("/")[2] if is_link(shard) else shard
    return f"{beside.removesuffix('.tar')}.idx"


def _files(store: Store, place: Store, found: Sequence[ObjectInfo], config: IndexConfig) -> _Laid:
    if config.dali:
        raise ConfigError(f"index.dali=true is for tars, and {store.url} is indexed as image files")
    shards, classes, num_block = index_files(store, place, found, config)
    return _Laid(what="files", shards=shards, classes=classes, block_samples=num_block)


def _check_config(config: IndexConfig) -> int:
    if config.dots not in DOTS:
        raise ConfigError(f"index.dots={config.dots!r} is not one of {', '.join(DOTS)}")
    if config.block_bytes != "auto":
        parse_bytes(config.block_bytes, "index.block_bytes")
    window_bytes = parse_bytes(config.window_bytes, "index.window_bytes")
    if window_bytes < 512:
        raise ConfigError(f"index.window_bytes={config.window_bytes!r} must be at least 512, one tar header")
    return window_bytes


def has_manifest(place: Store) -> bool:
    """Whether a data set lies there."""
    try:
        place.head(HEADER_NAME)
    except (ObjectNotFoundError, NotADirectoryError):
        return False
    return True


def _named(store: Store, names: list[str], progress: Progress) -> list[ObjectInfo]:
    tars = []
    for number, name in enumerate(names):
        if number % 1000 == 0:
            progress(number, 0)
        try:
            tars.append(store.head(name))
        except ObjectNotFoundError as error:
            raise SourceError(f"{store.url}/{name} does not exist ({error}); check the names in source=") from error
    return sorted(tars, key=lambda info: info.key)


def _listed(store: Store, progress: Progress) -> list[ObjectInfo]:
    found = []
    try:
        for number, info in enumerate(store.list()):
            if number % 1000 == 0:
                progress(number, 0)
            found.append(info)
    except (ObjectNotFoundError, NotADirectoryError) as error:
        raise SourceError(f"the source {store.url} does not exist or is no folder: {error}; check source=") from error
    if not any(info.key.lower().endswith(_ENDINGS) for info in found):
        raise SourceError(f"the source {store.url} holds no tar and no image; check source=")
    return found


def _tars(store: Store, found: Sequence[ObjectInfo]) -> list[ObjectInfo]:
    tars = [info for info in found if info.key.lower().endswith(TAR_ENDINGS) and not info.key.startswith(".")]
    compressed = [info.key for info in tars if is_compressed(info.key)]
    if compressed:
        raise SourceError(
            f"{len(compressed)} tars of {store.url} are compressed, such as {compressed[0]}: a sample of one cannot be "
            "read by itself; pack them with `dalipipe pack pack=tars`"
        )
    return sorted(tars, key=lambda info: info.key)


def _scan(store: Store, info: ObjectInfo, config: IndexConfig, window_bytes: int, name: str) -> _Scanned:
    window = HeaderWindow(lambda start, stop: store.read(info.key, start, stop), info.num_bytes, window_bytes)
    keys: list[str] = []
    seen: set[str] = set()
    extents: list[SampleExtent] = []
    sizes: list[tuple[int, int]] = []
    lines: list[str] = []
    sieve = Sieve(config.dots, in_place=True)
    try:
        if not info.num_bytes:
            raise IntegrityError("it is empty (0 bytes)")
        for group, size in _groups(window, info.num_bytes, config.dots, sieve):
            _check_group(store, info, group, seen)
            _check_names(store, info, group, config)
            seen.add(group.key)
            keys.append(group.key)
            extents.append(_extent(group))
            sizes.append(size)
            lines.append(" ".join(f"{e} {m.offset} {m.num_bytes} {m.name}" for e, m in group.members.items()))
    except IntegrityError as error:
        raise SourceError(
            f"{store.url}/{info.key} cannot be indexed: {error}; copy it again from where it is whole"
        ) from error
    if sieve.lost:
        member, why = sieve.lost[0]
        raise SourceError(
            f"{store.url}/{info.key} cannot be read in place: {member!r} {why}; {len(sieve.lost)} such in it. Pack it "
            "with `dalipipe pack pack=tars`"
        )
    rows = Rows.of(keys, extents, np.asarray(sizes, np.int32).reshape(-1, 2))
    extensions = tuple(sorted({e for extent in extents for e in extent.members}))
    written = Written(name=name, num_bytes=info.num_bytes, digest=NO_DIGEST, rows=rows, extensions=extensions, known={})
    dali = "\n".join([f"{DALI_VERSION} {len(lines)}", *lines]) + "\n"
    return _Scanned(written, dali if config.dali else "", window.bytes_read, sieve)


def _groups(window: HeaderWindow, num_bytes: int, dots: str, sieve: Sieve) -> Iterator[tuple[Group, tuple[int, int]]]:
    """Samples with the (height, width) of their image, as far as the window holds its header when it is passed."""
    size_at: dict[int, tuple[int, int]] = {}

    def watched() -> Iterator[TarMember]:
        for member in sieve(scan_entries(window, num_bytes)):
            if field_of(member.name.rpartition(".")[2]) == "image":
                stop = member.offset + member.num_bytes
                window(member.offset, min(stop, member.offset + _IMAGE_HEAD_BYTES))
                size_at[member.offset] = _size(window.held(member.offset, stop))
            yield member

    for group in group_neighbours(watched(), dots):
        image = next((m for e, m in group.members.items() if field_of(e) == "image"), None)
        yield group, (0, 0) if image is None else size_at.get(image.offset, (0, 0))


def _size(held: memoryview) -> tuple[int, int]:
    try:
        header = parse_image_header(held)
    except CorruptSampleError:
        return 0, 0
    return header.height, header.width


def _check_group(store: Store, info: ObjectInfo, group: Group, seen: set[str]) -> None:
    fields = [field_of(extension) for extension in group.members]
    if group.key not in seen and len(set(fields)) == len(fields):
        return
    what = (
        f"the members of {group.key!r} do not lie side by side, or the key comes twice"
        if group.key in seen
        else f"sample {group.key!r} has {', '.join(group.members)}, two of which are the same field"
    )
    raise SourceError(f"{store.url}/{info.key} cannot be read in place: {what}; pack it with `dalipipe pack pack=tars`")


def _check_names(store: Store, info: ObjectInfo, group: Group, config: IndexConfig) -> None:
    for name in (member.name for member in group.members.values()):
        if any("\ud800" <= character <= "\udfff" for character in name):
            why = "is not UTF-8, as keys must be: rename it"
        elif config.dali and any(character.isspace() for character in name):
            why = "holds a space or a line break, which DALI's index cannot hold: leave index.dali out"
        else:
            continue
        raise SourceError(f"{store.url}/{info.key}: the name {name!r} {why}, or pack it with `dalipipe pack pack=tars`")


def _extent(group: Group) -> SampleExtent:
    members = list(group.members.values())
    return SampleExtent(
        start=members[0].start,
        stop=members[-1].stop,
        members={extension: (m.offset, m.num_bytes) for extension, m in group.members.items()},
    )


def _cut(shards: Sequence[Written], size: int) -> list[tuple[Written, list[tuple[int, int]]]]:
    """Each shard with the extents of its block parts."""
    first, cut = 0, []
    for shard in shards:
        cut.append((shard, shard.extents(first, size)))
        first += shard.rows.num_samples
    return cut


def _with_digests(place: Store, shard: Written, extents: list[tuple[int, int]]) -> Written:
    whole, known = read_digests(place, shard.name, shard.num_bytes, extents)
    return replace(shard, digest=whole, known=known)
