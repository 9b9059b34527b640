"""How samples are mixed (`shuffle.*`)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ShuffleConfig:
    """`shuffle.*`."""

    mode: str = "block"
    """`block` (sliding interleave of blocks, the default), `full` (every sample anywhere: reads sample by sample in
    effect, for small or fully cached sets), `none` (manifest order)."""
    seed: int = 0
    """Seeds the order and the augmentation."""
    window: int | float | str = 0.05
    """Bytes of all blocks that are open at once in the whole job: a size, or a fraction of the data set."""
    lanes: int | str = "auto"
    """L: independent streams of blocks; must divide the global batch. `auto` is gcd(B, 64)."""
    exchange: float = 0.0
    """q in [0, 1]: the share of each lane's blocks that is dealt anew every epoch."""
    kept: float = 0.0
    """The share of the data set that nodes keep near for good (cache.policy=pin): those blocks come evenly between the
    others, so that the lake sees a constant demand. Jobs that share a cache need the same lanes then."""
