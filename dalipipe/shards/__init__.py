"""What lies on disk: shards, their indices and the manifest, digests, and the headers of images. No I/O of its own."""

from dalipipe.shards.digest import Digest64, Digest128, digest64
from dalipipe.shards.fields import Field
from dalipipe.shards.manifest import Extent, Located, Manifest, Shard
from dalipipe.shards.shape import BlockGrid, DataShape

__all__ = [
    "BlockGrid",
    "DataShape",
    "Digest64",
    "Digest128",
    "Extent",
    "Field",
    "Located",
    "Manifest",
    "Shard",
    "digest64",
]
