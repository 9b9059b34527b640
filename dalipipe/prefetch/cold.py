"""The first samples of a run, before the first block is near."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dalipipe.errors import DalipipeError, IntegrityError
from dalipipe.order.step import Bytes
from dalipipe.prefetch.plan import StepPlan
from dalipipe.shards.digest import digest64
from dalipipe.shards.manifest import Manifest
from dalipipe.storage.coalesce import read_ranges
from dalipipe.storage.store import Store
from dalipipe.telemetry import Recorder, Stage

# Where these few bytes lie between two samples, as the header of the second does, both share a request.
_GAP_BYTES = 4 << 10

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LooseSamples:
    """Fields of some samples of a block, by their offset in the block: `data` (uint8 [n], read-only) and `digests`,
    each with the number of bytes, which are left to compare when the bytes themselves are gone.
    """

    data: Mapping[int, Bytes]
    digests: Mapping[int, tuple[int, int]]


class SampleRanges:
    """Reads single samples from the lake: a first step touches as many blocks as it has samples, and needs little of
    each. What is read so is no part of the cache; it is compared with the block when that has come.
    """

    def __init__(self, manifest: Manifest, store: Store, fields: Sequence[str], recorder: Recorder) -> None:
        self._manifest = manifest
        self._store = store
        self._fields = tuple(fields)
        self._recorder = recorder

    def read(self, plans: Iterable[StepPlan], block: int) -> LooseSamples | None:
        """The samples of some steps that lie in `block`; None when they cannot be had: the block is fetched then, and
        its error is the one that counts.
        """
        try:
            return self._read(plans, block)
        except DalipipeError as error:
            _log.debug("samples of block %d were not read alone: %s", block, error)
            return None

    def check(self, block: int, memory: memoryview, loose: Mapping[int, tuple[int, int]]) -> None:
        """Compares samples that were read alone with the block, whose digest is the manifest's.

        Args:
            loose: `LooseSamples.digests`.

        Raises:
            IntegrityError: they differ; names shard and range.
        """
        for offset, (num_bytes, digest) in loose.items():
            if digest64(memory[offset : offset + num_bytes]) != digest:
                ((shard, ((_, start, stop),)),) = self._by_shard(block, [(offset, offset + num_bytes)]).items()
                raise IntegrityError(
                    f"bytes [{start}, {stop}) of {self._store.url}/{shard} were read wrong at the start of the run: "
                    "the block that came later has the manifest's digest and they differ; the store or the way to it "
                    "damages bytes: start again, and use https where it can be had"
                )

    def _read(self, plans: Iterable[StepPlan], block: int) -> LooseSamples:
        with self._recorder.span(Stage.INDEX):
            ids = np.unique(np.concatenate([plan.ids[self._manifest.block_of(plan.ids) == block] for plan in plans]))
            located = self._manifest.locate(ids)
            spans = {
                (offset, offset + size)
                for name in self._fields
                for offset, size in zip(*(values.tolist() for values in located.fields[name]), strict=True)
                if size > 0
            }
        found: dict[int, Bytes] = {}
        with self._recorder.span(Stage.LAKE):
            for shard, parts in self._by_shard(block, sorted(spans)).items():
                ranges = [(start, stop) for _, start, stop in parts]
                pieces = read_ranges(self._store, shard, ranges, gap_bytes=_GAP_BYTES)
                for (offset, _, _), piece in zip(parts, pieces, strict=True):
                    found[offset] = np.frombuffer(piece.toreadonly(), np.uint8)
        self._recorder.add("bytes_read.lake", sum(len(data) for data in found.values()))
        self._recorder.add("cold_samples", len(ids))
        digests = {offset: (len(data), digest64(data.data)) for offset, data in found.items()}
        return LooseSamples(data=found, digests=digests)

    def _by_shard(self, block: int, spans: Sequence[tuple[int, int]]) -> dict[str, list[tuple[int, int, int]]]:
        """(offset in the block, start and stop in the shard) of each span, by shard."""
        found: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
        extents, at = iter(self._manifest.extents(block)), 0
        extent = next(extents)
        for offset, end in spans:
            while offset >= at + extent.stop - extent.start:
                at += extent.stop - extent.start
                extent = next(extents)
            found[extent.shard].append((offset, extent.start + offset - at, extent.start + end - at))
        return found
