"""Reading a data set back as the loader does: by block, offset and size."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dalipipe.packing.config import PackConfig
from dalipipe.packing.run import PackReport, pack
from dalipipe.packing.verify import open_linked
from dalipipe.shards import Manifest
from dalipipe.storage.store import StorageConfig


def run_pack(source: object, target: object, **changed) -> PackReport:
    config = PackConfig(**{"shard_bytes": "1MiB", "workers": 1, "check": "header", **changed})
    return pack(str(source), str(target), config, StorageConfig())


def open_manifest(target: object) -> Manifest:
    return Manifest.open(open_linked(str(target), StorageConfig()).read)


def read_back(target: object, storage: StorageConfig | None = None) -> dict[str, dict[str, bytes]]:
    """key -> field -> bytes of every sample."""
    store = open_linked(str(target), storage or StorageConfig())
    manifest = Manifest.open(store.read)
    ids = np.arange(manifest.num_samples)
    located = manifest.locate(ids)
    found = {}
    for i, key in enumerate(manifest.keys(ids)):
        block = b"".join(store.read(e.shard, e.start, e.stop) for e in manifest.extents(int(located.blocks[i])))
        assert key not in found
        found[key] = {
            name: block[offsets[i] : offsets[i] + sizes[i]]
            for name, (offsets, sizes) in located.fields.items()
            if offsets[i] >= 0
        }
    return found


def contents(target: Path) -> dict[str, bytes]:
    return {str(p.relative_to(target)): p.read_bytes() for p in sorted(target.rglob("*")) if p.is_file()}
