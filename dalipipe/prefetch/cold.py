"""The first samples of a run, before the first block is near."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from dalipipe.errors import DalipipeError, IntegrityError
from dalipipe.order.step import Bytes
from dalipipe.prefetch.plan import StepPlan
from dalipipe.shards.manifest import Manifest
from dalipipe.storage.coalesce import read_ranges
from dalipipe.storage.store import Store
from dalipipe.telemetry import Recorder, Stage

LooseSamples = Mapping[int, Bytes]
"""The fields of some samples of a block, by their offset in the block: uint8 [n], read-only."""

_MAX_SHARE = 0.5

_log = logging.getLogger(__name__)


class SampleRanges:
    """Reads single samples from the lake: a first step touches as many blocks as it has samples, and needs little of
    each. What is read so is no part of the cache; it is compared with the block when that has come.
    """

    def __init__(self, manifest: Manifest, store: Store, fields: Sequence[str], recorder: Recorder) -> None:
        self._manifest = manifest
        self._store = store
        self._fields = tuple(fields)
        self._recorder = recorder

    def read(self, plan: StepPlan, block: int) -> LooseSamples | None:
        """The samples of a step that lie in `block`; None when that is not worth it (they are more than half of it) or
        does not work: the block is fetched as well, and its error is the one that counts.
        """
        try:
            return self._read(plan, block)
        except DalipipeError as error:
            _log.debug("samples of block %d were not read alone: %s", block, error)
            return None

    def check(self, block: int, memory: memoryview, loose: LooseSamples) -> None:
        """Compares samples that were read alone with the block, whose digest is the manifest's.

        Raises:
            IntegrityError: they differ; names shard and range.
        """
        whole = np.frombuffer(memory, np.uint8)
        for offset, data in loose.items():
            if not np.array_equal(whole[offset : offset + len(data)], data):
                ((shard, ((_, start, stop),)),) = self._by_shard(block, [(offset, offset + len(data))]).items()
                raise IntegrityError(
                    f"bytes [{start}, {stop}) of {self._store.url}/{shard} were read wrong at the start of the run: "
                    "the block that came later has the manifest's digest and they differ; the store or the way to it "
                    "damages bytes: start again, and use https where it can be had"
                )

    def _read(self, plan: StepPlan, block: int) -> LooseSamples | None:
        with self._recorder.span(Stage.INDEX):
            ids = np.unique(plan.ids[self._manifest.block_of(plan.ids) == block])
            located = self._manifest.locate(ids)
            spans = {
                (offset, offset + size)
                for name in self._fields
                for offset, size in zip(*(values.tolist() for values in located.fields[name]), strict=True)
                if size > 0
            }
            if sum(stop - start for start, stop in spans) > _MAX_SHARE * self._manifest.block_bytes(block):
                return None
        found: dict[int, Bytes] = {}
        with self._recorder.span(Stage.LAKE):
            for shard, parts in self._by_shard(block, sorted(spans)).items():
                pieces = read_ranges(self._store, shard, [(start, stop) for _, start, stop in parts])
                for (offset, _, _), piece in zip(parts, pieces, strict=True):
                    found[offset] = np.frombuffer(piece.toreadonly(), np.uint8)
        self._recorder.add("bytes_read.lake", sum(len(data) for data in found.values()))
        self._recorder.add("cold_samples", len(ids))
        return found

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
