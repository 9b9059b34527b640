"""Memory of batches is not given back while the trainer's device may still read it."""

from __future__ import annotations

import torch

from dalipipe.loader.lent import Lent, tensors_of


class Stream:
    """Work that is done when the test says so."""

    def __init__(self) -> None:
        self.given = self.done = 0

    def mark(self) -> Mark:
        return Mark(self, self.given)


class Mark:
    """All work up to a number."""

    def __init__(self, stream: Stream, number: int) -> None:
        self._stream, self._number = stream, number

    def query(self) -> bool:
        return self._stream.done >= self._number


def test_a_batch_stays_until_it_is_left_and_its_work_is_done() -> None:
    stream = Stream()
    lent = Lent(stream.mark)
    image = torch.zeros(4, 3)
    lent.lend([image])
    stream.given = 5
    lent.settle()  # the trainer still has it
    assert len(lent) == 1
    view = image[1:].t()
    del image
    lent.settle()  # and now a view of it
    assert len(lent) == 1
    stream.given = 7
    del view
    lent.settle()  # left, but the device has not done the seven pieces of work
    assert len(lent) == 1
    stream.given, stream.done = 9, 6
    lent.settle()
    assert len(lent) == 1
    stream.done = 7
    lent.settle()
    assert len(lent) == 0


def test_a_loop_holds_two_batches_at_most() -> None:
    """As `for batch in loader` lets go of a batch: when the next one has come."""
    stream = Stream()
    lent, most = Lent(stream.mark), 0
    for step in range(20):
        lent.settle()
        batch = {"image": torch.full((8,), float(step)), "raw": [torch.zeros(3), torch.zeros(2)]}
        lent.lend(tensors_of(batch))
        stream.given += 1
        stream.done = stream.given
        most = max(most, len(lent))
    assert most == 2
    assert float(batch["image"][0]) == 19


def test_closing_waits_for_the_device_and_not_for_ever() -> None:
    stream = Stream()
    lent = Lent(stream.mark)
    lent.lend([torch.zeros(2)])
    lent.close()
    assert len(lent) == 0
    stream.given = 1  # never done
    lent.lend([torch.zeros(2)])
    lent.close()
    assert len(lent) == 0
    lent.close()
