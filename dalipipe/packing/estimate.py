"""How much smaller images get when they are encoded again, from a few of them."""

from __future__ import annotations

from collections.abc import Sequence

from dalipipe.errors import CorruptSampleError
from dalipipe.packing.plan import keyed_hash
from dalipipe.packing.read import SampleReader
from dalipipe.packing.sample import SourceSample
from dalipipe.packing.transform import Transform
from dalipipe.storage.store import StorageConfig

_TRIED_SAMPLES = 32


def transformed_share(
    samples: Sequence[SourceSample],
    transform: Transform,
    *,
    source: str,
    target: str,
    storage: StorageConfig,
    seed: int,
) -> float:
    """Bytes after `transform` over bytes before, so that shards get their size: of up to 32 samples drawn by a hash of
    their names, and so the same in every run."""
    step = max(1, len(samples) // (_TRIED_SAMPLES * 16))
    drawn = sorted(samples[::step], key=lambda sample: keyed_hash(sample.name, seed))[:_TRIED_SAMPLES]
    before = after = 0
    with SampleReader(source, target, storage) as reader:
        for sample in drawn:
            image = sample.image
            if image is None:
                continue
            data = memoryview(reader.member(image))
            try:
                after += len(transform.apply(data, image.extension)[0])
            except CorruptSampleError:
                continue
            before += len(data)
    return after / before if before else 1.0
