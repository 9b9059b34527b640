"""Where a sample comes from, for records and messages."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dalipipe.shards.manifest import Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The sample's key, its shard, and where in the shard its image begins, in bytes (-1: it has none)."""

    key: str
    shard: str
    offset: int

    def __str__(self) -> str:
        return f"key {self.key} in {self.shard} at byte {self.offset}"


def origin_of(manifest: Manifest, sample_id: int, field: str = "image") -> Origin:
    """Where the field of a sample lies.

    Raises:
        ManifestError: an index is missing or torn.
    """
    ids = np.array([sample_id], np.int64)
    located = manifest.locate(ids)
    offset = int(located.fields[field][0][0])
    extents = manifest.extents(int(located.blocks[0]))
    at = max(offset, 0)
    for extent in extents[:-1]:  # a block that crosses a shard's end joins two extents
        if at < extent.stop - extent.start:
            break
        at -= extent.stop - extent.start
    else:
        extent = extents[-1]
    return Origin(key=manifest.keys(ids)[0], shard=extent.shard, offset=-1 if offset < 0 else extent.start + at)


def largest_image(manifest: Manifest) -> tuple[int, int]:
    """Height and width, upright, of the largest images of the first shard (0 where its index does not know them): what
    a GPU's decoder sets memory aside for. One shard, so that nothing grows with the data set.

    Raises:
        ManifestError: the index is missing or torn.
    """
    height, width = manifest.index(0).sizes.max(axis=0).tolist()
    return int(height), int(width)
