"""Which samples and blocks this rank needs in which step: the order, cut into steps of one rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dalipipe.order.contract import Order

# The order costs least per id when this many are computed at once.
_WINDOW_IDS = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What one rank reads in one step.

    ids: int64 [b], real samples only. valid: bool [b], False where a slot of the step is empty and another sample of
    the same global step fills it. A partial last step has fewer samples, on some ranks perhaps none.
    blocks: how many of `ids` lie in each block, in order of first need.
    """

    order: Order
    step: int
    ids: npt.NDArray[np.int64]
    valid: npt.NDArray[np.bool_]
    blocks: dict[int, int]


class StepPlanner:
    """Plans the steps of one rank, from `start` on and over epochs without end.

    Args:
        orders: gives the order of an epoch.
        start: (epoch, step) of the first step; a step at the end of its epoch is the first of the next.
        slots: int64 [b]: the columns of the global batch that this rank loads.
        block_of: the block of each id.
    """

    def __init__(
        self,
        orders: Callable[[int], Order],
        start: tuple[int, int],
        slots: npt.NDArray[np.int64],
        block_of: Callable[[npt.NDArray[np.int64]], npt.NDArray[np.int64]],
    ) -> None:
        self._orders = orders
        self._epoch, self._step = start
        self._order: Order | None = None
        self._slots = slots
        self._block_of = block_of

    def next_window(self) -> list[StepPlan]:
        """The next steps, at least one and as many as make 8,192 ids of this rank, all of one epoch."""
        order = self._current()
        num_steps = min(order.num_steps - self._step, -(-_WINDOW_IDS // max(1, len(self._slots))))
        ids = order.ids(self._step, num_steps, self._slots)
        plans = [self._plan(order, self._step + i, row) for i, row in enumerate(ids)]
        self._step += num_steps
        return plans

    def _current(self) -> Order:
        order = self._order or self._orders(self._epoch)
        if self._step >= order.num_steps:
            self._epoch, self._step = self._epoch + 1, 0
            order = self._orders(self._epoch)
        self._order = order
        return order

    def _plan(self, order: Order, step: int, ids: npt.NDArray[np.int64]) -> StepPlan:
        valid = ids >= 0
        if not order.pads:
            ids, valid = ids[valid], valid[valid]
        elif not valid.all():
            # Chosen by slot among the samples of the global step, so that it does not depend on the world size.
            batch = order.ids(step, 1)[0]
            real = batch[batch >= 0]
            ids = np.where(valid, ids, real[self._slots % len(real)])
        blocks = dict(Counter(self._block_of(ids).tolist()))
        return StepPlan(order=order, step=step, ids=ids, valid=valid, blocks=blocks)
