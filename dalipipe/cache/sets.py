"""How a tier that evicts shares out its budget: by sets of blocks, each changed under a lock of its own."""

from __future__ import annotations

from dataclasses import dataclass

from dalipipe.cache.blockstore import SET_BLOCKS

_LEAST_BLOCKS = 8
"""What the share of a set is to hold: a share of one and a half blocks keeps one, and wastes a third."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetSets:
    """Neighbouring blocks that share a part of the budget in proportion to their number.

    A set is the blocks of one folder (512), or of 2, 4, 8 … where the budget is a small part of the data set: so that
    each holds at least 8 mean blocks, as long as the budget itself does. What is left at the end of the data set
    belongs to the last whole set.

    Args:
        num_blocks: of the data set.
        num_bytes: of the data set.
        budget_bytes: of the tier.
    """

    num_blocks: int
    num_bytes: int
    budget_bytes: int

    @property
    def set_blocks(self) -> int:
        """Blocks of every set but the last: 512 times a power of two.

        A power, so that two processes whose budgets differ a little (shares of what is free) mostly agree, and sets
        that differ lie in each other.
        """
        set_blocks = SET_BLOCKS
        while set_blocks < self.num_blocks and self.budget_bytes * set_blocks < _LEAST_BLOCKS * self.num_bytes:
            set_blocks *= 2
        return set_blocks

    def blocks_beside(self, block: int) -> range:
        """The blocks of the set of `block`, itself among them."""
        set_blocks = self.set_blocks
        last = max(0, self.num_blocks // set_blocks - 1)
        number = min(block // set_blocks, last)
        return range(number * set_blocks, self.num_blocks if number == last else (number + 1) * set_blocks)

    def share_bytes(self, blocks: range) -> int:
        """What a set may hold."""
        return self.budget_bytes * len(blocks) // max(1, self.num_blocks)


def folders_of(blocks: range) -> range:
    """The numbers of the folders in which a set's blocks lie."""
    return range(blocks.start // SET_BLOCKS, -(-blocks.stop // SET_BLOCKS))
