"""Opening the files of a source that hold many samples each: tars by their headers, or file by file into runs.

A run is a file at the target with the contents of one input. With `pack.shuffle` its samples are sorted by the same
keyed hash that orders the data set, so the part of a run that belongs to one shard is one piece of it: that is the
first pass of a two-pass external shuffle, and each byte of the source is read once and in sequence.
"""

from __future__ import annotations

import errno
import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from dalipipe.engines.engine import Engine
from dalipipe.errors import (
    CorruptSampleError,
    IntegrityError,
    NoSpaceError,
    ObjectNotFoundError,
    PackError,
    SourceError,
)
from dalipipe.packing.ahead import in_order
from dalipipe.packing.config import PackConfig
from dalipipe.packing.discover import Listing
from dalipipe.packing.done import FOLDER, Quarantined
from dalipipe.packing.inputs import copy_input, copy_range, is_compressed
from dalipipe.packing.plan import keyed_hash
from dalipipe.packing.sample import Keys, Member, SourceSample
from dalipipe.packing.sieve import Sieve, behind_the_end, no_end
from dalipipe.packing.tables import number_classes, parquet_samples
from dalipipe.packing.temporary import temporary_file
from dalipipe.shards.digest import digest64
from dalipipe.shards.fields import field_of
from dalipipe.shards.tar import TarMember, scan_entries
from dalipipe.shards.webdataset import Group, HeaderWindow, group_by_key
from dalipipe.storage.open import open_store
from dalipipe.storage.store import ObjectInfo, StorageConfig, Store
from dalipipe.storage.url import FILE_SCHEMES, scheme_of

_log = logging.getLogger(__name__)

RUNS = f"{FOLDER}/runs"
_WINDOW_BYTES = 4096
_REMOTE_WINDOW_BYTES = 16384


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenTask:
    """One input to open. run: the name of its run; empty where its samples are read in place."""

    source: str
    target: str
    storage: StorageConfig
    info: ObjectInfo
    config: PackConfig
    run: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """The samples of an input (name, key before it is made unique, members), the members that no shard may hold
    (name, reason), those that are no data (reason, count), and whether the input has an end."""

    samples: list[tuple[str, str, tuple[Member, ...]]]
    refused: list[tuple[str, str]]
    passed: dict[str, int] = field(default_factory=dict)
    ended: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Expanded:
    """All samples of a source, sorted by name, the class names by label, and what was left out already.

    passed: members of tars that are no data, by reason. num_unended: tars without an end.
    """

    samples: list[SourceSample]
    classes: tuple[str, ...]
    quarantined: list[Quarantined]
    passed: dict[str, int] = field(default_factory=dict)
    num_unended: int = 0


def expand(
    listing: Listing,
    *,
    source: str,
    target: str,
    storage: StorageConfig,
    config: PackConfig,
    engine: Engine,
    progress: Callable[[int, int], None],
) -> Expanded:
    """Opens every input of a source. `progress` counts inputs. Runs that are there already are not made again.

    Raises:
        SourceError: an input is damaged, gone, or all are empty. PackError: one changed since it was listed.
        CorruptSampleError: a member leads out of its folder, or two of a sample are one field, and `pack.drop_corrupt`
            is off.
    """
    if not listing.inputs:
        return Expanded(samples=listing.samples, classes=listing.classes, quarantined=[])
    tasks = [
        OpenTask(
            source=source,
            target=target,
            storage=storage,
            info=info,
            config=config,
            run=_run_name(info, config) if _needs_run(source, info, config) else "",
        )
        for info in listing.inputs
    ]
    opened: list[Opened | None] = [None] * len(tasks)
    for done in engine.run(open_input, tasks, names=[f"open {task.info.key}" for task in tasks]):
        assert isinstance(done.result, Opened)
        opened[done.index] = done.result
        progress(sum(one is not None for one in opened), len(tasks))
    whole = [one for one in opened if one is not None]
    refused = [one for found in whole for one in found.refused]
    if refused and not config.drop_corrupt:
        name, reason = refused[0]
        raise CorruptSampleError(
            f"{source}/{name}: {reason}; {len(refused)} such in all. Set pack.drop_corrupt=true to leave them "
            "out and list them in quarantine.jsonl"
        )
    found = [sample for one in whole for sample in one.samples]
    if not found:
        raise SourceError(f"the {len(tasks)} files of {source} hold no sample; check source= and pack.dots")
    classes, members = number_classes([sample[2] for sample in found])
    keys = Keys()
    samples = [
        SourceSample(name, keys.key(stem, name), those) for (name, stem, _), those in zip(found, members, strict=True)
    ]
    quarantined = [Quarantined(path=name, reason=reason, num_bytes=0, xxh3="") for name, reason in refused]
    passed: Counter[str] = Counter()
    for one in whole:
        passed.update(one.passed)
    said = {task.info.key: one.passed for task, one in zip(tasks, opened, strict=True) if one is not None}
    if more := behind_the_end(source, said):
        _log.warning(more)
    unended = [task.info.key for task, one in zip(tasks, opened, strict=True) if one is not None and not one.ended]
    if unended:
        _log.warning(no_end(source, unended))
    return Expanded(samples=samples, classes=classes, quarantined=quarantined, passed=passed, num_unended=len(unended))


def check_inputs(listing: Listing, source: str, storage: StorageConfig) -> None:
    """Refuses inputs that are not as they were listed: members are read from them by offset, long after.

    Raises:
        SourceError: one is gone. PackError: one changed.
    """

    def check(info: ObjectInfo) -> None:
        try:
            _check_unchanged(store, source, info)
        except ObjectNotFoundError as error:
            raise _gone(source, info) from error

    with closing(open_store(source, storage)) as store:
        for _ in in_order(check, listing.inputs):
            pass


def open_input(task: OpenTask) -> Opened:
    """Lists the samples of one input; makes its run where it needs one. Idempotent."""
    source = open_store(task.source, task.storage)
    target = open_store(task.target, task.storage) if task.run else None
    try:
        if target is None:
            return _open_in_place(source, task)
        return _found_run(target, task) or _make_run(source, target, task)
    except ObjectNotFoundError as error:
        raise _gone(task.source, task.info) from error
    except IntegrityError as error:
        raise SourceError(
            f"{task.source}/{task.info.key} is damaged: {error}; copy it again from where it is whole"
        ) from error
    except OSError as error:
        if error.errno == errno.ENOSPC and not isinstance(error, NoSpaceError):
            raise NoSpaceError(f"no space left for the run of {task.info.key} at {task.target}") from error
        raise
    finally:
        source.close()
        if target is not None:
            target.close()


def _needs_run(source: str, info: ObjectInfo, config: PackConfig) -> bool:
    if config.kind != "tars" or is_compressed(info.key) or config.passes == "2":
        return True
    scheme = scheme_of(source)
    local = scheme == "" or scheme in FILE_SCHEMES
    return config.passes == "auto" and config.shuffle and not local


def _run_name(info: ObjectInfo, config: PackConfig) -> str:
    columns = config.columns
    said = (info.key, info.num_bytes, info.etag, config.dots, config.shuffle, config.seed, columns)
    return f"{RUNS}/{digest64(repr(said).encode('utf-8', 'surrogatepass')):016x}.run"


def _open_in_place(source: Store, task: OpenTask) -> Opened:
    key, num_bytes = task.info.key, task.info.num_bytes
    local = scheme_of(task.source) in ("", *FILE_SCHEMES)
    window = HeaderWindow(
        lambda start, stop: source.read(key, start, stop), num_bytes, _WINDOW_BYTES if local else _REMOTE_WINDOW_BYTES
    )
    _check_unchanged(source, task.source, task.info)
    return _grouped(window, num_bytes, task, key)


def _grouped(window: HeaderWindow, num_bytes: int, task: OpenTask, path: str) -> Opened:
    if not num_bytes:
        raise IntegrityError("it is empty (0 bytes)")
    sieve = Sieve(task.config.dots, in_place=False)
    groups = group_by_key(sieve(scan_entries(window, num_bytes)), task.config.dots)
    refused = [(f"{task.info.key}:{name}", reason) for name, reason in sieve.lost]
    samples, seen = [], dict[str, int]()
    for group in groups:
        fields = [field_of(extension) for extension in group.members]
        if len(set(fields)) < len(fields):
            refused.append(
                (f"{task.info.key}:{group.key}", f"has {', '.join(group.members)}, two of which are one field")
            )
            continue
        repeat = seen[group.key] = seen.get(group.key, -1) + 1
        name = f"{task.info.key}:{group.key}" + (f"#{repeat}" if repeat else "")
        samples.append((name, group.key, _members(group, path)))
    return Opened(samples=samples, refused=refused, passed=dict(sieve.counts), ended=sieve.ended)


def _members(group: Group, path: str) -> tuple[Member, ...]:
    found: list[tuple[str, TarMember]] = sorted(group.members.items(), key=lambda item: field_of(item[0]) != "image")
    return tuple(Member(extension, m.num_bytes, path=path, start=m.offset) for extension, m in found)


def _make_run(source: Store, target: Store, task: OpenTask) -> Opened:
    _check_unchanged(source, task.source, task.info)
    with temporary_file(task.target) as plain, temporary_file(task.target) as run:
        copy_input(source, task.info, plain, task.config.kind == "tars")
        if task.config.kind == "tars":
            descriptor = plain.fileno()
            num_bytes = os.fstat(descriptor).st_size
            window = HeaderWindow(lambda a, b: os.pread(descriptor, b - a, a), num_bytes, _WINDOW_BYTES)
            opened = _grouped(window, num_bytes, task, "")
            opened = _write_run(opened, plain, run, task)
        else:
            opened = _write_parquet_run(plain, run, task)
        run.flush()
        target.put(task.run, Path(f"/proc/self/fd/{run.fileno()}"))
    target.put(f"{task.run}.json", _encode(opened))
    return opened


def _write_run(opened: Opened, plain: BinaryIO, run: BinaryIO, task: OpenTask) -> Opened:
    """Copies the contents of all samples from `plain` to `run`, in shuffled order where there is one."""
    samples = opened.samples
    order = list(range(len(samples)))
    if task.config.shuffle:
        order.sort(key=lambda i: keyed_hash(samples[i][0], task.config.seed))
    placed = list(samples)
    at = 0
    for i in order:
        name, stem, members = samples[i]
        moved = []
        for member in members:
            copy_range(plain, member.start, member.num_bytes, run)
            moved.append(Member(member.extension, member.num_bytes, path=task.run, start=at, in_run=True))
            at += member.num_bytes
        placed[i] = (name, stem, tuple(moved))
    return replace(opened, samples=placed)


def _write_parquet_run(plain: BinaryIO, run: BinaryIO, task: OpenTask) -> Opened:
    """Takes the images out of a Parquet file; what stands beside them in a row stays in memory."""
    key = task.info.key
    stem = key.rpartition(".")[0]
    with temporary_file(task.target) as loose:
        samples = []
        at = 0
        rows = parquet_samples(f"/proc/self/fd/{plain.fileno()}", f"{task.source}/{key}", task.config.columns)
        for row, (data, extension, others) in enumerate(rows):
            loose.write(data)
            image = Member(extension, len(data), path="", start=at)
            at += len(data)
            samples.append((f"{key}:{row:09d}", f"{stem}-{row:09d}", (image, *others)))
        loose.flush()
        images = Opened(samples=[(name, stem, members[:1]) for name, stem, members in samples], refused=[])
        others_of = {name: members[1:] for name, _, members in samples}
        moved = _write_run(images, loose, run, task)
    return Opened(samples=[(name, s, (*image, *others_of[name])) for name, s, image in moved.samples], refused=[])


def _found_run(target: Store, task: OpenTask) -> Opened | None:
    """The run that an earlier try has finished."""
    try:
        return _decode(bytes(target.read(f"{task.run}.json")), target.head(task.run).num_bytes, task.run)
    except ObjectNotFoundError:
        return None


def _encode(opened: Opened) -> bytes:
    samples = [
        [name, stem, [[m.extension, m.num_bytes, m.start, None if m.data is None else m.data.hex()] for m in members]]
        for name, stem, members in opened.samples
    ]
    said = {"samples": samples, "refused": opened.refused, "passed": opened.passed, "ended": opened.ended}
    body = json.dumps(said).encode()
    return f"{digest64(body):016x}\n".encode() + body


def _decode(data: bytes, run_bytes: int, run: str) -> Opened | None:
    stated, _, body = data.partition(b"\n")
    if stated != f"{digest64(body):016x}".encode():
        return None
    said = json.loads(body)
    samples = [(name, stem, tuple(_member(one, run) for one in members)) for name, stem, members in said["samples"]]
    used = sum(m.num_bytes for _, _, members in samples for m in members if m.in_run)
    if used != run_bytes or "ended" not in said:
        return None
    refused = [(name, reason) for name, reason in said["refused"]]
    return Opened(samples=samples, refused=refused, passed=said["passed"], ended=said["ended"])


def _member(said: Sequence[Any], run: str) -> Member:
    extension, num_bytes, start, data = said
    if data is not None:
        return Member(extension, num_bytes, data=bytes.fromhex(data))
    return Member(extension, num_bytes, path=run, start=start, in_run=True)


def _gone(source: str, info: ObjectInfo) -> SourceError:
    return SourceError(
        f"{source}/{info.key} was listed but is gone: the source changed while it was packed; pack again"
    )


def _check_unchanged(store: Store, source: str, info: ObjectInfo) -> None:
    now = store.head(info.key)
    if (now.num_bytes, now.etag) != (info.num_bytes, info.etag):
        raise PackError(
            f"{source}/{info.key} changed while it was packed: {info.num_bytes} bytes listed, "
            f"{now.num_bytes} now; pack again when nothing writes to the source"
        )
