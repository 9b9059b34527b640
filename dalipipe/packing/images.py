"""Writing one shard of images: read, check, append, publish."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np

from dalipipe.errors import (
    CorruptSampleError,
    DependencyError,
    IntegrityError,
    NoSpaceError,
    ObjectNotFoundError,
    PackError,
    SourceError,
)
from dalipipe.packing.discover import UNLABELLED, SourceImage
from dalipipe.packing.done import FOLDER, Quarantined, ShardDone, encode_done, record_name
from dalipipe.shards.digest import digest64
from dalipipe.shards.imageheader import has_jpeg_end, parse_image_header
from dalipipe.shards.index import Rows, part_rows
from dalipipe.shards.tar import SampleExtent, TarWriter
from dalipipe.storage.open import open_store
from dalipipe.storage.store import StorageConfig, Store
from dalipipe.storage.url import FILE_SCHEMES, file_path, scheme_of

_CHUNK_IMAGES = 32
_CHUNK_BYTES = 32 * 2**20
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardTask:
    """One shard to write. `first_sample`: its first global sample id if no sample before it is dropped."""

    source: str
    target: str
    storage: StorageConfig
    plan: str
    name: str
    images: tuple[SourceImage, ...]
    first_sample: int
    block_samples: int
    check: str
    drop_corrupt: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RegridTask:
    """A written shard whose block parts moved because samples before it were dropped. extents: the new parts."""

    target: str
    storage: StorageConfig
    name: str
    extents: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class _Checked:
    image: SourceImage
    data: memoryview
    height: int
    width: int


def write_shard(task: ShardTask) -> int:
    """Writes a shard and its done record to the target and returns how many samples it holds. Idempotent: the same
    task writes the same bytes.

    Raises:
        CorruptSampleError: an image is corrupt and `drop_corrupt` is off.
        SourceError: an image vanished. PackError: an image changed since it was listed.
        NoSpaceError: the target, or the folder for temporary files, is full.
    """
    source, target = open_store(task.source, task.storage), open_store(task.target, task.storage)
    try:
        # The file has no name: whatever kills this process, nothing is left behind.
        with _temporary_file(task.target) as file:
            done = _write(task, source, file)
            file.flush()
            if done.rows.num_samples:
                target.put(task.name, Path(f"/proc/self/fd/{file.fileno()}"))
        target.put(record_name(task.name), encode_done(done))
    except OSError as error:
        if error.errno in _NO_SPACE and not isinstance(error, NoSpaceError):
            raise NoSpaceError(f"no space left while {task.name} was written for {task.target}") from error
        raise
    finally:
        source.close()
        target.close()
    return done.rows.num_samples


def regrid(task: RegridTask) -> list[int]:
    """The xxh3-64 of each extent of a shard, read back from the target."""
    target = open_store(task.target, task.storage)
    try:
        return [digest64(target.read(task.name, start, stop)) for start, stop in task.extents]
    finally:
        target.close()


def undecodable_images(samples: Sequence[memoryview]) -> list[str | None]:
    """For each encoded image why the decoder refuses it, or None.

    Raises:
        DependencyError: DALI is not installed.
    """
    try:
        from dalipipe.graphs.check import undecodable

        return undecodable([np.frombuffer(data, np.uint8) for data in samples])
    except ModuleNotFoundError as error:
        raise DependencyError(
            f"decoding needs DALI ({error}); install dalipipe[cpu] or a CUDA flavour, or set pack.check=header"
        ) from error


def _temporary_file(target: str) -> BinaryIO:
    """An unnamed file, on the target's own disk where it has one (the folder for temporary files may be small)."""
    folder: Path | None = None
    scheme = scheme_of(target)
    if scheme == "" or scheme in FILE_SCHEMES:
        folder = Path(file_path(target) if scheme else target).expanduser() / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
    return cast(BinaryIO, tempfile.TemporaryFile(dir=folder))


@dataclass(slots=True)
class _Shard:
    """What is collected while a shard is written."""

    keys: list[str] = field(default_factory=list)
    extents: list[SampleExtent] = field(default_factory=list)
    sizes: list[tuple[int, int]] = field(default_factory=list)
    digests: list[int] = field(default_factory=list)
    quarantined: list[Quarantined] = field(default_factory=list)


def _write(task: ShardTask, source: Store, file: BinaryIO) -> ShardDone:
    writer, shard = TarWriter(file), _Shard()
    for chunk in _read_chunks(source, task):
        for sample in _checked(chunk, task, shard.quarantined):
            members: dict[str, memoryview | bytes] = {sample.image.extension: sample.data}
            if sample.image.label != UNLABELLED:
                members["cls"] = str(sample.image.label).encode()
            shard.extents.append(writer.add(sample.image.key, members))
            shard.keys.append(sample.image.key)
            shard.sizes.append((sample.height, sample.width))
            if (task.first_sample + len(shard.keys)) % task.block_samples == 0:
                shard.digests.append(writer.cut())
    open_part = len(part_rows(task.first_sample, len(shard.keys), task.block_samples)) if shard.keys else 0
    if len(shard.digests) < open_part:
        shard.digests.append(writer.cut())
    writer.finish()
    return ShardDone(
        plan=task.plan,
        name=task.name,
        num_bytes=writer.offset,
        digest=writer.digest,
        part_digests=shard.digests,
        extensions=sorted({e for extent in shard.extents for e in extent.members}),
        rows=Rows.of(shard.keys, shard.extents, np.asarray(shard.sizes, np.int32).reshape(-1, 2)),
        quarantined=shard.quarantined,
    )


def _read_chunks(source: Store, task: ShardTask) -> Iterator[list[tuple[SourceImage, memoryview]]]:
    """The images in order, some at a time; the next ones are read while the last ones are checked and written."""
    pool = ThreadPoolExecutor(max(1, min(task.storage.concurrency, _CHUNK_IMAGES)), thread_name_prefix="pack-read")
    try:
        ahead: list[tuple[SourceImage, Future[memoryview]]] = []
        for images in _chunks(task.images):
            current, ahead = ahead, [(image, pool.submit(_read, source, image)) for image in images]
            if current:
                yield [(image, future.result()) for image, future in current]
        yield [(image, future.result()) for image, future in ahead]
    finally:
        # Every read has a deadline of its own, so this wait ends.
        pool.shutdown(wait=True, cancel_futures=True)


def _chunks(images: Sequence[SourceImage]) -> Iterator[list[SourceImage]]:
    chunk: list[SourceImage] = []
    num_bytes = 0
    for image in images:
        if chunk and (len(chunk) == _CHUNK_IMAGES or num_bytes + image.num_bytes > _CHUNK_BYTES):
            yield chunk
            chunk, num_bytes = [], 0
        chunk.append(image)
        num_bytes += image.num_bytes
    yield chunk


def _read(source: Store, image: SourceImage) -> memoryview:
    try:
        data = source.read(image.path)
    except ObjectNotFoundError as error:
        raise SourceError(
            f"{source.url}/{image.path} was listed but is gone: the source changed while it was packed; "
            "pack again when nothing writes to it"
        ) from error
    except IntegrityError as error:
        raise PackError(f"{source.url}/{image.path} changed while it was read: {error}; pack again") from error
    if len(data) != image.num_bytes:
        raise PackError(
            f"{source.url}/{image.path} changed while it was packed: {image.num_bytes} bytes listed, {len(data)} read; "
            "pack again when nothing writes to the source"
        )
    return data


def _checked(
    chunk: Sequence[tuple[SourceImage, memoryview]], task: ShardTask, quarantined: list[Quarantined]
) -> Iterator[_Checked]:
    for sample, reason in zip(chunk, _reasons(chunk, task.check), strict=True):
        image, data = sample
        if reason is None:
            height, width = _size(data)
            yield _Checked(image, data, height, width)
        elif task.drop_corrupt:
            digest = f"{digest64(data):016x}"
            quarantined.append(Quarantined(path=image.path, reason=reason, num_bytes=len(data), xxh3=digest))
        else:
            raise CorruptSampleError(
                f"{task.source}/{image.path} is corrupt: {reason}; mend or delete the file, or set "
                "pack.drop_corrupt=true to leave such images out and list them in quarantine.jsonl"
            )


def _reasons(chunk: Sequence[tuple[SourceImage, memoryview]], check: str) -> list[str | None]:
    if check == "none":
        return [None] * len(chunk)
    reasons = [why_bad_header(data) for _, data in chunk]
    if check == "decode":
        good = [i for i, reason in enumerate(reasons) if reason is None]
        for i, reason in zip(good, undecodable_images([chunk[i][1] for i in good]), strict=True):
            reasons[i] = reason
    return reasons


def why_bad_header(data: memoryview) -> str | None:
    """What is wrong with an image as far as its header and its end marker tell, or None."""
    try:
        header = parse_image_header(data)
    except CorruptSampleError as error:
        return str(error)
    if header.codec == "jpeg" and not has_jpeg_end(data):
        return f"jpeg is cut short at {len(data)} bytes: it has no end marker"
    return None


def _size(data: memoryview) -> tuple[int, int]:
    try:
        header = parse_image_header(data)
    except CorruptSampleError:
        return 0, 0
    return header.height, header.width
