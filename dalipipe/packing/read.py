"""Reading the members of samples from the source, or from runs at the target."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import BinaryIO

from dalipipe.errors import IntegrityError, ObjectNotFoundError, PackError, SourceError
from dalipipe.packing.sample import WHOLE, Member, SourceSample
from dalipipe.packing.temporary import temporary_file
from dalipipe.storage.open import open_store
from dalipipe.storage.store import StorageConfig
from dalipipe.storage.url import FILE_SCHEMES, scheme_of

_CHUNK_SAMPLES = 128
_READ_SAMPLES = 4
"""Samples that a thread reads in one go: handing each over by itself costs more than reading a small file."""
_CHUNK_BYTES = 32 * 2**20
_PIECE_BYTES = 8 * 2**20

Contents = dict[str, "memoryview | bytes"]
"""extension -> content."""


class SampleReader:
    """Reads members. Owns its stores and threads; a context manager.

    Raises, from every read:
        SourceError: an object is gone. PackError: it is no longer as it was listed.
    """

    def __init__(self, source: str, target: str, storage: StorageConfig) -> None:
        self._source = open_store(source, storage)
        self._target = open_store(target, storage)
        self._target_url = target
        self._concurrency = storage.concurrency
        self._gathered: dict[str, int] = {}
        self._gathering: BinaryIO | None = None

    def __enter__(self) -> SampleReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._source.close()
        self._target.close()
        if self._gathering is not None:
            self._gathering.close()

    def chunks(self, samples: Sequence[SourceSample]) -> Iterator[list[tuple[SourceSample, Contents]]]:
        """The samples in order, some at a time; the next ones are read while the caller works on the last ones."""
        self._gather(samples)
        threads = max(1, min(self._concurrency, _CHUNK_SAMPLES // _READ_SAMPLES))
        pool = ThreadPoolExecutor(threads, thread_name_prefix="pack-read")
        try:
            ahead: list[Future[list[tuple[SourceSample, Contents]]]] = []
            for chunk in _chunks(samples):
                runs = [chunk[i : i + _READ_SAMPLES] for i in range(0, len(chunk), _READ_SAMPLES)]
                current, ahead = ahead, [pool.submit(self._read, run) for run in runs]
                if current:
                    yield [sample for future in current for sample in future.result()]
            yield [sample for future in ahead for sample in future.result()]
        finally:
            # Every read has a deadline of its own, so this wait ends.
            pool.shutdown(wait=True, cancel_futures=True)

    def member(self, member: Member) -> memoryview | bytes:
        """The bytes of one member."""
        if member.data is not None:
            return member.data
        if member.path in self._gathered and self._gathering is not None:
            at = self._gathered[member.path] + member.start
            return os.pread(self._gathering.fileno(), member.num_bytes, at)
        store = self._target if member.in_run else self._source
        try:
            if member.start == WHOLE:
                data = store.read(member.path)
            else:
                data = store.read(member.path, member.start, member.start + member.num_bytes)
        except ObjectNotFoundError as error:
            raise SourceError(
                f"{store.url}/{member.path} was listed but is gone: the source changed while it was packed; "
                "pack again when nothing writes to it"
            ) from error
        except IntegrityError as error:
            raise PackError(f"{store.url}/{member.path} changed while it was read: {error}; pack again") from error
        if len(data) != member.num_bytes:
            raise PackError(
                f"{store.url}/{member.path} changed while it was packed: {member.num_bytes} bytes listed, {len(data)} "
                "read; pack again when nothing writes to the source"
            )
        return data

    def _read(self, samples: Sequence[SourceSample]) -> list[tuple[SourceSample, Contents]]:
        return [(one, {member.extension: self.member(member) for member in one.members}) for one in samples]

    def _gather(self, samples: Sequence[SourceSample]) -> None:
        """Copies the part of each run that these samples need into one local file, in large reads.

        A run is sorted as the data set is, so that is one piece of it; runs on a local disk are read where they are.
        """
        if scheme_of(self._target_url) in ("", *FILE_SCHEMES):
            return
        parts: dict[str, tuple[int, int]] = {}
        for member in (m for sample in samples for m in sample.members if m.in_run):
            start, stop = parts.get(member.path, (member.start, member.start))
            parts[member.path] = (min(start, member.start), max(stop, member.start + member.num_bytes))
        if not parts:
            return
        self._gathering = temporary_file(self._target_url)
        at = 0
        for path, (start, stop) in sorted(parts.items()):
            self._gathered[path] = at - start
            for piece in range(start, stop, _PIECE_BYTES):
                at += self._gathering.write(self._target.read(path, piece, min(piece + _PIECE_BYTES, stop)))
        self._gathering.flush()


def _chunks(samples: Sequence[SourceSample]) -> Iterator[list[SourceSample]]:
    chunk: list[SourceSample] = []
    num_bytes = 0
    for sample in samples:
        if chunk and (len(chunk) == _CHUNK_SAMPLES or num_bytes + sample.num_bytes > _CHUNK_BYTES):
            yield chunk
            chunk, num_bytes = [], 0
        chunk.append(sample)
        num_bytes += sample.num_bytes
    yield chunk
