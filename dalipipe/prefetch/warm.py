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
    """

    def __init__(
        self,
        orders: Callable[[int], Order],
        start: tuple[int, int],
        slots: npt.NDArray[np.int64],
        keeps: Callable[[int], bool],
    ) -> None:
        self._keeps = keeps
        self._lock = threading.Lock()
        self._blocks = self._walk(orders, start, slots)

    def bring_one(self, cache: Cache) -> bool:
        """Brings the next block that is not near; False when the epoch is through or the node is full."""
        while True:
            with self._lock:
                block = next(self._blocks, None)
            if block is None:
                return False
            if not self._keeps(block) or cache.contains(block):
                continue
            try:
                with cache.get(block) as view:
                    # Held in memory: the node had no room for it, so the rest would be read for nothing as well.
                    return view.held_bytes == 0
            except DalipipeError as error:
                # The window will want it too, and raise what is raised then.
                _log.debug("block %d was not brought ahead: %s", block, error)
            return True

    @staticmethod
    def _walk(orders: Callable[[int], Order], start: tuple[int, int], slots: npt.NDArray[np.int64]) -> Iterator[int]:
        epoch, step = start
        order = orders(epoch)
        while step < order.num_steps:
            num_steps = min(_CHUNK_STEPS, order.num_steps - step)
            yield from order.blocks(step, num_steps, slots).blocks.tolist()
            step += num_steps
