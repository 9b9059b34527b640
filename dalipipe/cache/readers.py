"""Who reads a data set on a node, as far as it matters to the cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dalipipe.cache.policies import pinned_share

if TYPE_CHECKING:
    from dalipipe.order.signature import OrderSignature
    from dalipipe.shards.shape import DataShape
    from dalipipe.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class Readers:
    """Who reads this data set on the node, as far as it matters to the cache.

    node_share: the share of the data set that this node reads over all epochs. local_ranks: processes of the job on
    the node. working_blocks: blocks that the order keeps open on the node at once. uneven: some samples come more
    often than others. keep_rank: where a block stands among those to be kept, evenly spread in [0, 1); else a hash.
    """

    node_share: float = 1.0
    local_ranks: int = 1
    working_blocks: int = 1
    uneven: bool = False
    keep_rank: Callable[[int], float] | None = None

    def kept_share(self, kept_bytes: int, dataset_bytes: int, num_blocks: int) -> float:
        """Up to where in hash space blocks fit so many bytes of what this node reads."""
        total_bytes = int(dataset_bytes * self.node_share)
        if self.keep_rank is not None:
            return min(1.0, kept_bytes / max(total_bytes, 1))
        return pinned_share(kept_bytes, total_bytes, num_blocks)


def cache_readers(signature: OrderSignature, shape: DataShape, world: World, *, replicas: int = 1) -> Readers:
    """What the cache needs to know of this job: how much of the data set its node reads, and how unevenly."""
    from dalipipe.order.sequence import signature_lanes

    # A lane keeps its blocks over epochs, and a rank its lanes, unless blocks are dealt anew.
    stays = signature.mode == "block" and signature.exchange == 0
    share = min(1.0, max(world.local_world_size, replicas) / world.world_size) if stays else 1.0
    num_open = signature.lanes * signature.window_blocks
    # Ranks that have lanes of their own meet in no block, so there is nothing to share while it passes.
    are_apart = signature.mode == "block" and replicas == 1 and signature.lanes % world.world_size == 0
    return Readers(
        node_share=share,
        local_ranks=1 if are_apart else world.local_world_size,
        working_blocks=max(1, round(num_open * share)),
        uneven=signature.recipe.startswith(("repeat", "mix")),
        keep_rank=signature_lanes(shape, signature).keep_rank if signature.kept else None,
    )
