"""From blocks that are near to the samples of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from dalipipe.cache.contract import BlockView, Cache
from dalipipe.order.step import Bytes, Sample, Step
from dalipipe.prefetch.cold import LooseSamples
from dalipipe.prefetch.plan import StepPlan
from dalipipe.shards.manifest import Located, Manifest
from dalipipe.telemetry import Recorder, Stage

_NOTHING: Bytes = np.empty(0, np.uint8)
_NOTHING.flags.writeable = False


class Assembler:
    """Cuts samples out of blocks: views, no copies."""

    def __init__(self, manifest: Manifest, cache: Cache, fields: Sequence[str], recorder: Recorder) -> None:
        self._manifest = manifest
        self._cache = cache
        self._fields = tuple(fields)
        self._recorder = recorder

    def build(
        self,
        plan: StepPlan,
        views: Mapping[int, BlockView],
        loose: Mapping[int, LooseSamples],
        on_release: Callable[[], None],
    ) -> Step:
        """The step, over the memory of `views`; of blocks that are not among them, over `loose` samples."""
        with self._recorder.span(Stage.INDEX):
            located = self._manifest.locate(plan.ids)
        blocks = {block: _as_array(view) for block, view in views.items()}

        def release() -> None:
            blocks.clear()
            on_release()

        return Step(
            epoch=plan.order.epoch,
            step=plan.step,
            ids=plan.ids,
            fields={name: self._cut(name, located, blocks, loose) for name in self._fields},
            sizes=located.sizes,
            valid=plan.valid,
            substitutes=lambda i: self._substitutes(plan, blocks, int(plan.ids[i])),
            release=release,
        )

    def _cut(
        self, name: str, located: Located, blocks: Mapping[int, Bytes], loose: Mapping[int, LooseSamples]
    ) -> list[Bytes]:
        offsets, sizes = located.fields[name]
        views = []
        for block, offset, size in zip(located.blocks.tolist(), offsets.tolist(), sizes.tolist(), strict=True):
            if size <= 0:  # a sample without the field (offset and size -1)
                views.append(_NOTHING)
            elif block in blocks:
                views.append(blocks[block][offset : offset + size])
            else:
                views.append(loose[block].data[offset])
        return views

    def _substitutes(self, plan: StepPlan, blocks: Mapping[int, Bytes], bad_id: int) -> Iterator[Sample]:
        """The other samples of the same block, cyclically from the bad one on, then those of the lane's next blocks."""
        home = int(self._manifest.block_of(np.array([bad_id]))[0])
        first, stop = self._manifest.block_samples_range(home)
        ring = np.concatenate([np.arange(bad_id + 1, stop), np.arange(first, bad_id)]).astype(np.int64)
        yield from self._samples(home, ring, blocks.get(home))
        block = plan.order.next_block(home)
        while block != home:
            yield from self._samples(block, np.arange(*self._manifest.block_samples_range(block), dtype=np.int64), None)
            block = plan.order.next_block(block)

    def _samples(self, block: int, ids: npt.NDArray[np.int64], data: Bytes | None) -> Iterator[Sample]:
        if data is None:
            # The arrays keep the bytes alive after the view is released.
            with self._cache.get(block) as view:
                data = _as_array(view)
        located = self._manifest.locate(ids)
        cut = {name: self._cut(name, located, {block: data}, {}) for name in self._fields}
        for i, sample_id in enumerate(ids.tolist()):
            height, width = located.sizes[i].tolist()
            yield Sample(
                id=sample_id, fields={name: views[i] for name, views in cut.items()}, height=height, width=width
            )


def _as_array(view: BlockView) -> Bytes:
    return np.frombuffer(view.memory, np.uint8)
