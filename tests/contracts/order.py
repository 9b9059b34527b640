"""What every `Order` must hold, whoever makes it."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import pytest

from dalipipe.order.contract import Order


class OrderContract(ABC):
    """Inherit it, and make an order of a few steps over `num_blocks` blocks."""

    @abstractmethod
    def make_order(self, epoch: int) -> Order:
        """A new order of `epoch`, of at least 3 steps; the same arguments make an equal order."""

    @abstractmethod
    def block_of(self, sample: int) -> int:
        """The block that holds `sample`."""

    def test_the_scan_has_every_step_and_empty_slots_only_at_its_end(self) -> None:
        order = self.make_order(0)
        ids = order.ids(0, order.num_steps)
        assert ids.shape == (order.num_steps, order.batch_size)
        assert ids.dtype == np.int64
        empty = ids.reshape(-1) < 0
        assert not empty[: empty.size - int(empty.sum())].any()
        assert empty.sum() < order.batch_size
        assert (ids[ids < 0] == -1).all()

    def test_random_access_equals_the_scan(self) -> None:
        order = self.make_order(1)
        scan = order.ids(0, order.num_steps)
        for step in range(order.num_steps):
            np.testing.assert_array_equal(self.make_order(1).ids(step, 1), scan[step : step + 1])
        middle = order.num_steps // 2
        np.testing.assert_array_equal(order.ids(middle, order.num_steps - middle), scan[middle:])

    def test_slots_are_columns_of_the_whole_answer(self) -> None:
        order = self.make_order(1)
        scan = order.ids(0, order.num_steps)
        every = np.arange(order.batch_size)
        for slots in (every[:0], every[:1], every[1::3], every[::-1], every[-1:].repeat(2)):
            np.testing.assert_array_equal(order.ids(0, order.num_steps, slots), scan[:, slots])
        for slots in (every + 1, every[:1] - 1):
            with pytest.raises(IndexError, match=f"slots .*{order.batch_size}"):
                order.ids(0, 1, slots)

    def test_no_steps_are_an_empty_answer(self) -> None:
        order = self.make_order(0)
        assert order.ids(order.num_steps, 0).shape == (0, order.batch_size)
        assert order.blocks(0, 0, np.arange(order.batch_size)).blocks.size == 0

    def test_steps_outside_the_epoch_are_refused(self) -> None:
        order = self.make_order(0)
        for step, num_steps in ((-1, 1), (0, order.num_steps + 1), (order.num_steps, 1)):
            with pytest.raises(IndexError, match=f"{order.num_steps} steps"):
                order.ids(step, num_steps)

    def test_blocks_are_those_of_the_ids_with_first_and_last_use(self) -> None:
        order = self.make_order(1)
        start, stop = 1, order.num_steps
        for slots in (np.arange(order.batch_size), np.arange(order.batch_size)[1::2]):
            uses: dict[int, list[int]] = {}
            for step, row in enumerate(order.ids(start, stop - start)[:, slots], start):
                for sample in row[row >= 0]:
                    uses.setdefault(self.block_of(int(sample)), []).append(step)
            answer = order.blocks(start, stop - start, slots)
            # A dict keeps the order of insertion: blocks by first need.
            assert answer.blocks.tolist() == list(uses)
            assert answer.first.tolist() == [steps[0] for steps in uses.values()]
            assert answer.last.tolist() == [steps[-1] for steps in uses.values()]

    def test_next_block_stays_among_the_blocks_that_the_epoch_reads(self) -> None:
        order = self.make_order(2)
        used = order.blocks(0, order.num_steps, np.arange(order.batch_size)).blocks.tolist()
        assert {order.next_block(block) for block in used} <= set(used)

    def test_an_epoch_knows_its_number(self) -> None:
        assert self.make_order(2).epoch == 2
