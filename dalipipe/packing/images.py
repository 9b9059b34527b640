"""Writing one shard: read, check, transform, append, publish."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np

from dalipipe.errors import CorruptSampleError, DependencyError, NoSpaceError
from dalipipe.packing.done import Quarantined, ShardDone, encode_done, record_name
from dalipipe.packing.read import Contents, SampleReader
from dalipipe.packing.sample import SourceSample
from dalipipe.packing.temporary import temporary_file
from dalipipe.packing.transform import Transform
from dalipipe.shards.digest import digest64
from dalipipe.shards.imageheader import has_jpeg_end, parse_image_header
from dalipipe.shards.index import Rows, part_rows
from dalipipe.shards.tar import SampleExtent, TarWriter
from dalipipe.storage.open import open_store
from dalipipe.storage.store import StorageConfig

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardTask:
    """One shard to write. `first_sample`: its first global sample id if no sample before it is dropped."""

    source: str
    target: str
    storage: StorageConfig
    plan: str
    name: str
    samples: tuple[SourceSample, ...]
    first_sample: int
    block_samples: int
    check: str
    drop_corrupt: bool
    transform: Transform | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RegridTask:
    """A written shard whose block parts moved because samples before it were dropped. extents: the new parts."""

    target: str
    storage: StorageConfig
    name: str
    extents: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class _Checked:
    """A sample that may be written; 0 x 0 where the size of its image is not known."""

    sample: SourceSample
    contents: Contents
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
    target = open_store(task.target, task.storage)
    try:
        # The file has no name: whatever kills this process, nothing is left behind.
        with SampleReader(task.source, task.target, task.storage) as reader, temporary_file(task.target) as file:
            done = _write(task, reader, file)
            file.flush()
            if done.rows.num_samples:
                target.put(task.name, Path(f"/proc/self/fd/{file.fileno()}"))
        target.put(record_name(task.name), encode_done(done))
    except OSError as error:
        if error.errno in _NO_SPACE and not isinstance(error, NoSpaceError):
            raise NoSpaceError(f"no space left while {task.name} was written for {task.target}") from error
        raise
    finally:
        target.close()
    return done.rows.num_samples


def regrid(task: RegridTask) -> list[int]:
    """The xxh3-64 of each extent of a shard, read back from the target."""
    target = open_store(task.target, task.storage)
    try:
        return [digest64(target.read(task.name, start, stop)) for start, stop in task.extents]
    finally:
        target.close()


def undecodable_images(samples: Sequence[memoryview | bytes]) -> list[str | None]:
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


@dataclass(slots=True)
class _Shard:
    """What is collected while a shard is written."""

    keys: list[str] = field(default_factory=list)
    extents: list[SampleExtent] = field(default_factory=list)
    sizes: list[tuple[int, int]] = field(default_factory=list)
    digests: list[int] = field(default_factory=list)
    quarantined: list[Quarantined] = field(default_factory=list)


def _write(task: ShardTask, reader: SampleReader, file: BinaryIO) -> ShardDone:
    writer, shard = TarWriter(file), _Shard()
    for chunk in reader.chunks(task.samples):
        for checked in _checked(chunk, task, shard.quarantined):
            shard.extents.append(writer.add(checked.sample.key, checked.contents))
            shard.keys.append(checked.sample.key)
            shard.sizes.append((checked.height, checked.width))
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


def _checked(
    chunk: Sequence[tuple[SourceSample, Contents]], task: ShardTask, quarantined: list[Quarantined]
) -> Iterator[_Checked]:
    for (sample, contents), found in zip(chunk, _reasons(chunk, task.check), strict=True):
        reason = found
        if reason is None:
            try:
                yield _transformed(sample, contents, task.transform)
                continue
            except CorruptSampleError as error:
                reason = str(error)
        if not task.drop_corrupt:
            raise CorruptSampleError(
                f"{task.source}/{sample.name} is corrupt: {reason}; mend or delete the file, or set "
                "pack.drop_corrupt=true to leave such images out and list them in quarantine.jsonl"
            )
        data = _image_bytes(sample, contents)
        digest = f"{digest64(data):016x}"
        quarantined.append(Quarantined(path=sample.name, reason=reason, num_bytes=len(data), xxh3=digest))


def _transformed(sample: SourceSample, contents: Contents, transform: Transform | None) -> _Checked:
    image = sample.image
    if image is None:
        return _Checked(sample, contents, 0, 0)
    data = memoryview(contents[image.extension])
    if transform is None:
        height, width = _size(data)
        return _Checked(sample, contents, height, width)
    encoded, extension, height, width = transform.apply(data, image.extension)
    others = {name: content for name, content in contents.items() if name != image.extension}
    return _Checked(sample, {extension: encoded, **others}, height, width)


def _image_bytes(sample: SourceSample, contents: Contents) -> memoryview | bytes:
    image = sample.image
    return b"" if image is None else contents[image.extension]


def _reasons(chunk: Sequence[tuple[SourceSample, Contents]], check: str) -> list[str | None]:
    """Why each sample is refused, or None; one without an image never is."""
    reasons: list[str | None] = [None] * len(chunk)
    if check == "none":
        return reasons
    images = {
        i: memoryview(_image_bytes(sample, contents))
        for i, (sample, contents) in enumerate(chunk)
        if sample.image is not None
    }
    reasons = [why_bad_header(images[i]) if i in images else None for i in range(len(chunk))]
    if check == "decode":
        good = [i for i in images if reasons[i] is None]
        for i, reason in zip(good, undecodable_images([images[i] for i in good]), strict=True):
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
