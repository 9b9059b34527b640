"""Parts of a data set by name: shards, patterns of shards, classes (`data.repeat`)."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np
import numpy.typing as npt

from dalipipe.errors import ConfigError
from dalipipe.shards.manifest import Manifest

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Either whole blocks, as ascending ranges [start, stop), or the ids of samples (int64 [n], ascending)."""

    blocks: tuple[tuple[int, int], ...] = ()
    samples: Ints | None = None


def select(manifest: Manifest, name: str) -> Selection:
    """What `name` stands for in a data set (not one of several that are joined).

    A shard's name or a pattern of them (`*` is the whole set) selects blocks; a block that crosses a shard's end
    belongs to the shard in which it begins. The name of a class selects samples, by the folder that their keys begin
    with, as `pack` writes them; that reads every index once.

    Raises:
        ConfigError: it names nothing, a shard and a class, or a shard in which no block begins.
    """
    shards = [number for number, own in enumerate(_names(manifest)) if own == name or fnmatchcase(own, name)]
    if name in manifest.classes:
        if shards:
            raise ConfigError(f"data.repeat.{name}: there is a class of that name and {len(shards)} shards; rename one")
        samples = _class_samples(manifest, name)
        if not samples.size:
            raise ConfigError(
                f"data.repeat.{name}: no sample's key begins with {name + '/'!r}, so its samples cannot be told; name "
                "shards instead"
            )
        return Selection(samples=samples)
    if not shards:
        known = [*manifest.classes, *_names(manifest)]
        near = difflib.get_close_matches(name, known, n=1) or known[:3]
        raise ConfigError(
            f"data.repeat.{name}: no shard and no class of that name; nearest: {', '.join(near)}, or '*' for all"
        )
    size = manifest.block_samples
    ranges: list[tuple[int, int]] = []
    for shard in (manifest.shard(number) for number in shards):
        start, stop = -(-shard.first_sample // size), -(-(shard.first_sample + shard.num_samples) // size)
        if ranges and ranges[-1][1] == start:
            ranges[-1] = (ranges[-1][0], stop)
        elif stop > start:
            ranges.append((start, stop))
    if not ranges:
        raise ConfigError(
            f"data.repeat.{name}: no block of {size} samples begins in that shard; name its neighbour too"
        )
    return Selection(blocks=tuple(ranges))


def _names(manifest: Manifest) -> list[str]:
    names: list[str] = manifest.files[1].names.to_pylist()
    return names


def _class_samples(manifest: Manifest, name: str) -> Ints:
    import pyarrow.compute as pc

    found = []
    for number in range(manifest.num_shards):
        inside = pc.starts_with(manifest.index(number).keys, pattern=f"{name}/")
        rows = np.flatnonzero(inside.to_numpy(zero_copy_only=False))
        found.append(rows + manifest.shard(number).first_sample)
    return np.concatenate(found).astype(np.int64)
