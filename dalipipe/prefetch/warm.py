"""The blocks of a whole epoch in order of first need, for threads that have nothing nearer to do."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from dalipipe.cache.contract import Cache
from dalipipe.errors import DalipipeError
from dalipipe.order.contract import Order

_CHUNK_STEPS = 64

_log = logging.getLogger(__name__)


class EpochWarmer:
    """Brings the blocks that one rank reads from `start` to the end of that epoch, each step's in turn. Thread-safe.

    A block comes up again when a later chunk of steps reads it too: to ask twice whether it is near is cheaper than to
    remember all.

    Args:
        keeps: whether the node would keep a block; the others are left to the window.
        most_blocks: brought at once, where they lie one behind the other.
    """

    def __init__(
        self,
        orders: Callable[[int], Order],
        start: tuple[int, int],
        slots: npt.NDArray[np.int64],
        keeps: Callable[[int], bool],
        most_blocks: int = 1,
    ) -> None:
        self._keeps = keeps
        self._most_blocks = most_blocks
        self._lock = threading.Lock()
        self._next: int | None = None
        self._blocks = self._walk(orders, start, slots)

    def bring_one(self, cache: Cache) -> bool:
        """Brings the next block that is not near, and those that come with it; False when the epoch is through or the
        node is full."""
        while True:
            with self._lock:
                run = self._take()
            if not run:
                return False
            near = [cache.contains(block) for block in run]
            if not all(near):
                return self._bring(cache, [block for block, is_near in zip(run, near, strict=True) if not is_near])

    @staticmethod
    def _bring(cache: Cache, blocks: list[int]) -> bool:
        while blocks:
            try:
                dealt = cache.bring(blocks)
            except DalipipeError as error:
                # The window will want it too, and raise what is raised then.
                _log.debug("block %d was not brought ahead: %s", blocks[0], error)
                dealt = {blocks[0]: True}
            if not all(dealt.values()):
                return False  # the node had no room for it, so the rest would be read for nothing as well
            blocks = [block for block in blocks if block not in dealt]
        return True

    def _take(self) -> list[int]:
        """The next block that is to be kept, and those whose numbers follow; under the lock."""
        run: list[int] = []
        while len(run) < self._most_blocks:
            block, self._next = next(self._blocks, None) if self._next is None else self._next, None
            if block is None:
                break
            if run and (block != run[-1] + 1 or not self._keeps(block)):
                self._next = block
                break
            if self._keeps(block):
                run.append(block)
        return run

    @staticmethod
    def _walk(orders: Callable[[int], Order], start: tuple[int, int], slots: npt.NDArray[np.int64]) -> Iterator[int]:
        epoch, step = start
        order = orders(epoch)
        while step < order.num_steps:
            num_steps = min(_CHUNK_STEPS, order.num_steps - step)
            yield from order.blocks(step, num_steps, slots).blocks.tolist()
            step += num_steps
