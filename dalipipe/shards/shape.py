"""The shape of a data set: all that the order needs to know of a manifest."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DataShape:
    """N samples in manifest order, cut into blocks of K (the last one may be short), `num_bytes` in all."""

    num_samples: int
    block_samples: int
    num_bytes: int

    @property
    def num_blocks(self) -> int:
        """Blocks, the short last one included."""
        return -(-self.num_samples // self.block_samples)
