"""What a data set holds, from its manifest alone."""

from __future__ import annotations

from typing import Any

from dalipipe.shards.manifest import Manifest


def info(manifest: Manifest) -> dict[str, Any]:
    """The facts of a data set, JSON-able; names that end in `bytes` are sizes in bytes. Reads no index."""
    num_bytes, num_samples = manifest.num_bytes, manifest.num_samples
    shard_bytes = [manifest.shard(i).num_bytes for i in range(manifest.num_shards)]
    facts = {
        "identity": manifest.identity,
        "kind": manifest.kind,
        "samples": num_samples,
        "shards": manifest.num_shards,
        "blocks": manifest.num_blocks,
        "bytes": num_bytes,
        "mean_sample_bytes": num_bytes // num_samples,
        "mean_block_bytes": num_bytes // manifest.num_blocks,
        "smallest_shard_bytes": min(shard_bytes),
        "largest_shard_bytes": max(shard_bytes),
        "block_samples": manifest.block_samples,
        "fields": [f"{field.name} ({', '.join(field.extensions)})" for field in manifest.fields],
        "num_classes": len(manifest.classes),
        "classes": list(manifest.classes),
        "quarantined": int(manifest.made_by.get("quarantined", "0")),
    }
    if "groups" in manifest.made_by:
        facts["groups"] = int(manifest.made_by["groups"])
    return facts
