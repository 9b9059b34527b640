"""How a lake becomes shards (`source`, `target`, `pack.*`)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PackConfig:
    """`pack.*`; the group `pack=` chooses the kind of source."""

    kind: str = "images"
    shard_bytes: int | float | str = "512MiB"
    """Target size of a shard, 1 MiB to 4 GiB."""
    block_bytes: int | float | str = "auto"
    """Target size of a block, the unit of fetch and cache; `auto` is at most 4 MiB and at most a 32nd of a shard's
    samples."""
    workers: int = 0
    """Processes that write shards; 0 = one per CPU, 1 = in this process."""
    check: str = "decode"
    """`decode` (every image is decoded once), `header` (magic, size and end marker only) or `none`."""
    drop_corrupt: bool = False
    """Leave corrupt samples out and list them in `quarantine.jsonl` beside the shards, instead of stopping."""
    shuffle: bool = True
    """Order the samples by a seeded permutation, so that shards are not sorted by class."""
    seed: int = 0
    overwrite: bool = False
    """Replace another data set at the target."""
