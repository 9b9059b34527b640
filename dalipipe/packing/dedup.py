"""Finding images with the same bytes before they are packed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from dalipipe.engines.engine import Engine
from dalipipe.packing.read import SampleReader
from dalipipe.packing.sample import SourceSample
from dalipipe.shards.digest import Digest128
from dalipipe.storage.store import StorageConfig

_TASK_SAMPLES = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Duplicate:
    """A sample that was left out, and the one with the same image that is kept."""

    path: str
    same_as: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HashTask:
    """Samples whose images are read and hashed."""

    source: str
    target: str
    storage: StorageConfig
    samples: tuple[SourceSample, ...]


def hash_images(task: HashTask) -> list[str]:
    """The xxh3-128 of each sample's image in hexadecimal; empty for a sample without one."""
    with SampleReader(task.source, task.target, task.storage) as reader:
        found = []
        for sample in task.samples:
            digest = Digest128()
            image = sample.image
            if image is not None:
                digest.update(reader.member(image))
            found.append("" if image is None else digest.hex)
        return found


def find_duplicates(
    samples: Sequence[SourceSample],
    *,
    source: str,
    target: str,
    storage: StorageConfig,
    engine: Engine,
    progress: Callable[[int, int], None],
) -> tuple[list[SourceSample], list[Duplicate]]:
    """The samples to keep, in order, and the duplicates; the first of equal images (in the given order) is kept.

    Only images that share their size with another one are read.
    """
    by_size: dict[int, list[int]] = defaultdict(list)
    for number, sample in enumerate(samples):
        if sample.image is not None:
            by_size[sample.image.num_bytes].append(number)
    suspects = sorted(chain.from_iterable(numbers for numbers in by_size.values() if len(numbers) > 1))
    parts = [suspects[i : i + _TASK_SAMPLES] for i in range(0, len(suspects), _TASK_SAMPLES)]
    tasks = [
        HashTask(source=source, target=target, storage=storage, samples=tuple(samples[i] for i in part))
        for part in parts
    ]
    digests: dict[int, str] = {}
    for done in engine.run(hash_images, tasks, names=[f"hash {i}" for i in range(len(tasks))]) if tasks else ():
        assert isinstance(done.result, list)
        digests.update(zip(parts[done.index], done.result, strict=True))
        progress(len(digests), len(suspects))
    first: dict[str, int] = {}
    kept = np.ones(len(samples), bool)
    duplicates = []
    for number in suspects:
        original = first.setdefault(digests[number], number)
        if original != number:
            kept[number] = False
            duplicates.append(Duplicate(path=samples[number].name, same_as=samples[original].name))
    return [samples[i] for i in np.flatnonzero(kept).tolist()], duplicates
