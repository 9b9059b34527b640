"""Packing: from a lake of images to shards and a manifest."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict

import numpy as np

from dalipipe.engines.engine import Engine
from dalipipe.errors import ConfigError, NoSpaceError, ObjectNotFoundError, PackError, SourceError
from dalipipe.packing.ahead import in_order
from dalipipe.packing.config import PackConfig
from dalipipe.packing.dedup import Duplicate, find_duplicates
from dalipipe.packing.discover import Listing, discover
from dalipipe.packing.done import Quarantined, ShardDone, decode_done, record_name
from dalipipe.packing.estimate import transformed_share
from dalipipe.packing.expand import check_inputs, expand
from dalipipe.packing.images import RegridTask, ShardTask, regrid, write_shard
from dalipipe.packing.plan import check_config, make_plan, shard_names
from dalipipe.packing.report import PackReport, report_found, report_of
from dalipipe.packing.target import DUPLICATES_NAME, QUARANTINE_NAME, Target
from dalipipe.packing.transform import Transform
from dalipipe.shards.assembly import ManifestBuilder, ManifestFiles
from dalipipe.shards.digest import Digest128
from dalipipe.shards.header import HEADER_NAME, SHARDS_NAME
from dalipipe.shards.index import part_rows
from dalipipe.storage.open import open_store
from dalipipe.storage.store import StorageConfig
from dalipipe.storage.url import scheme_of
from dalipipe.units import format_bytes, parse_bytes

Progress = Callable[[int, int], None]
"""(samples done, samples in all)."""

Stage = Callable[[str, int, int], None]
"""What is being done before shards are written (`listing`, `opening`, `hashing`), how many done, how many in all (0:
not known)."""

_PLAN_VERSIONS = {"images": 2, "tars": 3}
"""Raised when the same source makes other shards than before."""
_NO_PART_OF_THE_PLAN = ("workers", "drop_corrupt", "overwrite", "passes")


def pack(
    source: str,
    target: str,
    config: PackConfig,
    storage: StorageConfig,
    *,
    engine: Engine | None = None,
    progress: Progress = lambda _done, _total: None,
    stage: Stage = lambda _what, _done, _total: None,
) -> PackReport:
    """Packs the samples under the URL `source` into shards and a manifest under the URL `target`.

    The output is the same, byte for byte, for any engine and number of workers. The manifest is written last, so a
    pack that was killed leaves no data set; the same call again continues with the shards that are finished.

    Raises:
        ConfigError: a value of `config` can never work, or source and target are the same, or the target lies in
            a source of tars.
        SourceError: the source is missing, empty, mixed, or changes meanwhile.
        CorruptSampleError: an image is corrupt and `pack.drop_corrupt` is off.
        TargetExistsError: the target holds another data set and `pack.overwrite` is off, or another pack is at work.
        NoSpaceError: the target is full; what is finished is kept for the next try.
        PackError: an image changed while it was packed, or a worker died.
    """
    begin_s = time.monotonic()
    check_config(config)
    cleanup = contextlib.ExitStack()
    source_store, target_store = open_store(source, storage), open_store(target, storage)
    try:
        _check_apart(source_store.url, target_store.url, config.kind)
        listing = discover(source_store, config, lambda count: stage("listing", count, 0))
        place = Target(target_store, plan_hash(listing, config), drop_corrupt=config.drop_corrupt)
        cleanup.callback(place.close)
        before = place.packed_before(overwrite=config.overwrite)
        if before is not None:
            return report_found(place, before, listing, begin_s)
        packing = _Packing(
            source=source,
            target=target,
            listing=listing,
            place=place,
            config=config,
            storage=storage,
            progress=progress,
            stage=stage,
        )
        with _running(engine, config) as runner:
            runner.prepare(_about_tasks(listing, config))
            packing.prepare(runner)
            packing.write_shards(runner)
            files, names, quarantined = packing.assemble(runner)
        packing.publish(files, quarantined)
        place.finish(set(names))
        return report_of(
            listing,
            (files.num_samples, len(names), files.num_bytes),
            files.identity,
            begin_s,
            quarantined=len(quarantined),
            duplicates=len(packing.duplicates),
            passed=packing.passed,
            truncated=packing.num_unended,
        )
    finally:
        cleanup.close()
        source_store.close()
        target_store.close()


def plan_hash(listing: Listing, config: PackConfig) -> str:
    """32 hexadecimal digits over all that decides the output: the source listing and the configuration.

    `drop_corrupt` is not among it: as long as nothing is corrupt it changes nothing, so a pack that stopped at a
    corrupt image continues with `drop_corrupt=true` where it stopped.
    """
    said: dict[str, object] = {key: value for key, value in asdict(config).items() if key not in _NO_PART_OF_THE_PLAN}
    for name in ("shard_bytes", "block_bytes"):
        value = getattr(config, name)
        said[name] = value if value == "auto" else parse_bytes(value, f"pack.{name}")
    said |= {"version": _PLAN_VERSIONS[config.kind], "source": listing.digest}
    digest = Digest128()
    digest.update(json.dumps(said, sort_keys=True).encode())
    return digest.hex


class _Packing:
    """One pack in progress."""

    def __init__(
        self,
        *,
        source: str,
        target: str,
        listing: Listing,
        place: Target,
        config: PackConfig,
        storage: StorageConfig,
        progress: Progress,
        stage: Stage,
    ) -> None:
        self._plan_hash = plan_hash(listing, config)
        self._source, self._target = source, target
        self._listing = listing
        self._place = place
        self._config = config
        self._storage = storage
        self._progress = progress
        self._stage = stage
        self._num_samples: dict[str, int] = {}
        self._quarantined: list[Quarantined] = []
        self._transform = Transform.of(config)
        self.duplicates: list[Duplicate] = []
        self.passed: dict[str, int] = {}
        self.num_unended = 0

    def prepare(self, engine: Engine) -> None:
        """Opens the inputs, finds duplicates and makes the plan."""
        self._place.begin(overwrite=self._config.overwrite)
        config, where = self._config, {"source": self._source, "target": self._target}
        expanded = expand(
            self._listing,
            **where,
            storage=self._storage,
            config=config,
            engine=engine,
            progress=lambda done, total: self._stage("opening", done, total),
        )
        self._samples, self._classes = expanded.samples, expanded.classes
        self._quarantined = expanded.quarantined
        self.passed, self.num_unended = expanded.passed, expanded.num_unended
        if config.dedup:
            self._samples, self.duplicates = find_duplicates(
                self._samples,
                **where,
                storage=self._storage,
                engine=engine,
                progress=lambda done, total: self._stage("hashing", done, total),
            )
        sizes = np.asarray([sample.num_bytes for sample in self._samples], np.int64)
        if self._transform is not None:
            share = transformed_share(self._samples, self._transform, **where, storage=self._storage, seed=config.seed)
            sizes = np.maximum(1, (sizes * share).astype(np.int64))
        members = np.asarray([len(sample.members) for sample in self._samples], np.int64)
        self._plan = make_plan([sample.name for sample in self._samples], sizes, members=members, config=config)
        self._names = shard_names(self._plan.num_shards, config.groups)

    def write_shards(self, engine: Engine) -> None:
        """Writes every shard that is not finished yet."""
        plan, names = self._plan, self._names
        found = in_order(self._place.done, names)
        finished = {done.name: done.rows.num_samples for done in found if done is not None}
        self._num_samples = finished
        todo = [i for i, name in enumerate(names) if name not in finished]
        num_done = len(plan.order) - sum(int(plan.cuts[i + 1] - plan.cuts[i]) for i in todo)
        self._progress(num_done, len(plan.order))
        self._place.check()
        tasks = [self._task(i, names[i]) for i in todo]
        try:
            for written in engine.run(write_shard, tasks, names=[task.name for task in tasks]):
                assert isinstance(written.result, int)
                self._place.check()
                finished[tasks[written.index].name] = written.result
                num_done += len(tasks[written.index].samples)
                self._progress(num_done, len(plan.order))
        except NoSpaceError as error:
            raise self._no_space(error) from error
        check_inputs(self._listing, self._source, self._storage)

    def assemble(self, engine: Engine) -> tuple[ManifestFiles, list[str], list[Quarantined]]:
        """Writes all indices; returns the manifest's files, the shards in it and the images left out."""
        block_samples = self._plan.block_samples
        builder = ManifestBuilder(kind="images", classes=self._classes, block_samples=block_samples)
        moved = self._moved_digests(engine)
        quarantined = list(self._quarantined)

        def indices() -> Iterator[tuple[str, bytes]]:
            for done in in_order(self._read_done, self._names):
                quarantined.extend(done.quarantined)
                if done.rows.num_samples:
                    encoded = builder.add(
                        name=done.name,
                        num_bytes=done.num_bytes,
                        digest=done.digest,
                        rows=done.rows,
                        part_digests=moved.get(done.name, done.part_digests),
                        extensions=done.extensions,
                    )
                    yield done.name, encoded

        names = list(in_order(self._put_index, indices()))
        if not names:
            raise SourceError(
                f"every one of the {len(quarantined)} images of {self._source} is corrupt (the first, "
                f"{quarantined[0].path}: {quarantined[0].reason}); look at the source, there is nothing to pack"
            )
        made_by = {"plan": self._plan_hash, "quarantined": str(len(quarantined))}
        if self.duplicates:
            made_by["duplicates"] = str(len(self.duplicates))
        if self.passed:
            made_by["passed"] = json.dumps(self.passed, sort_keys=True)
        if self.num_unended:
            made_by["truncated"] = str(self.num_unended)
        if self._config.groups:
            made_by["groups"] = str(self._config.groups)
        return builder.finish(made_by), names, quarantined

    def publish(self, files: ManifestFiles, quarantined: Sequence[Quarantined]) -> None:
        """Writes the manifest, its header last: only then there is a data set."""
        self._place.check()
        self._put_lines(QUARANTINE_NAME, quarantined)
        self._put_lines(DUPLICATES_NAME, self.duplicates)
        self._put(SHARDS_NAME, files.shards)
        self._put(HEADER_NAME, files.header)

    def _moved_digests(self, engine: Engine) -> dict[str, list[int]]:
        """The part digests of the shards whose block grid moved, because samples before them were dropped."""
        block_samples, first = self._plan.block_samples, 0
        tasks = []
        for name, planned in zip(self._names, self._plan.cuts.tolist(), strict=False):
            num_samples = self._num_samples[name]
            if num_samples and (first - planned) % block_samples:
                rows = self._read_done(name).rows
                ranges = part_rows(first, num_samples, block_samples)
                extents = tuple((int(rows.starts[a]), int(rows.stops[b - 1])) for a, b in ranges)
                tasks.append(RegridTask(target=self._target, storage=self._storage, name=name, extents=extents))
            first += num_samples
        moved: dict[str, list[int]] = {}
        for finished in engine.run(regrid, tasks, names=[task.name for task in tasks]) if tasks else ():
            digests = finished.result
            assert isinstance(digests, list)
            moved[tasks[finished.index].name] = digests
        return moved

    def _task(self, number: int, name: str) -> ShardTask:
        start, stop = int(self._plan.cuts[number]), int(self._plan.cuts[number + 1])
        return ShardTask(
            source=self._source,
            target=self._target,
            storage=self._storage,
            plan=self._plan_hash,
            name=name,
            samples=tuple(self._samples[i] for i in self._plan.order[start:stop].tolist()),
            first_sample=start,
            block_samples=self._plan.block_samples,
            check=self._config.check,
            drop_corrupt=self._config.drop_corrupt,
            transform=self._transform,
        )

    def _read_done(self, name: str) -> ShardDone:
        done = None
        with contextlib.suppress(ObjectNotFoundError):
            done = decode_done(self._place.store.read(record_name(name)))
        if done is None or done.plan != self._plan_hash:
            raise PackError(
                f"the record of {name} in {self._target} was replaced or deleted while packing: another pack writes "
                "there; when it has ended, run the same command again or choose another target"
            )
        return done

    def _put_lines(self, key: str, entries: Sequence[Quarantined] | Sequence[Duplicate]) -> None:
        """Writes a report, one JSON object a line, sorted by path; none where there is nothing to report."""
        if not entries:
            self._place.store.delete(key)
            return
        ordered = sorted(map(asdict, entries), key=lambda entry: str(entry["path"]))
        lines = [json.dumps(entry, ensure_ascii=False) for entry in ordered]
        self._put(key, "".join(f"{line}\n" for line in lines).encode())

    def _put_index(self, shard: tuple[str, bytes]) -> str:
        name, encoded = shard
        self._put(f"{name}.idx", encoded)
        return name

    def _put(self, key: str, data: bytes) -> None:
        try:
            self._place.store.put(key, data)
        except NoSpaceError as error:
            raise self._no_space(error) from error

    def _no_space(self, error: NoSpaceError) -> NoSpaceError:
        return NoSpaceError(
            f"{error}. The whole pack needs about {format_bytes(self._plan.num_bytes)} "
            f"({self._plan.num_bytes} bytes) at {self._target}; free space there or choose another target, then run "
            "the same command again: finished shards are kept"
        )


def _check_apart(source: str, target: str, kind: str) -> None:
    source_place, target_place = map(_real_place, (source, target))
    if source_place == target_place:
        raise ConfigError(f"source and target are both {source}; pack into another folder")
    if kind == "tars" and target_place.startswith(source_place.rstrip("/") + "/"):
        raise ConfigError(
            f"the target {target} lies in the source {source}, where its shards would be packed once more; "
            "pack into another folder"
        )


def _real_place(url: str) -> str:
    """A path without links and `..`; any other URL as it is."""
    return url if scheme_of(url) else os.path.realpath(url)


def _about_tasks(listing: Listing, config: PackConfig) -> int:
    """About how many tasks come first: inputs to open, or shards to write."""
    num_bytes = sum(sample.num_bytes for sample in listing.samples)
    return len(listing.inputs) or 1 + num_bytes // parse_bytes(config.shard_bytes, "pack.shard_bytes")


@contextlib.contextmanager
def _running(given: Engine | None, config: PackConfig) -> Iterator[Engine]:
    """The engine that was given, or one of our own that ends with the block."""
    if given is not None:
        yield given
        return
    from dalipipe.engines import LocalEngine, default_workers

    own = LocalEngine(config.workers or default_workers())
    try:
        yield own
    finally:
        own.close()
