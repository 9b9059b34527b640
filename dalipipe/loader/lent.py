"""Device tensors that the trainer got and the pipeline's allocator must not give to others yet.

A batch comes out of DALI without a copy. When the last reference to it dies, its memory goes back to DALI's pool in the
order of the stream that decoded it; work of the trainer's stream that still reads it is unknown there (`record_stream`
knows torch's allocator only). So each batch is held here until the trainer has let it go *and* all work that its
stream had been given by then is done. That costs no copy and no wait, only the memory of one or two batches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

_CLOSE_WAIT_S = 1.0
_POLL_S = 0.001


class Event(Protocol):
    """A mark in a stream of work, such as torch.cuda.Event."""

    def query(self) -> bool:
        """Whether all work before the mark is done."""


@dataclass(slots=True)
class _Loan:
    tensors: list[torch.Tensor]
    left: Event | None = None  # since when the trainer has no reference


class Lent:
    """The batches that the trainer has, and those it had whose work is not done. Of one thread, the trainer's.

    mark: puts a mark at the end of the work that the trainer's stream has been given so far.
    """

    def __init__(self, mark: Callable[[], Event]) -> None:
        self._mark = mark
        self._loans: list[_Loan] = []

    def __len__(self) -> int:
        return len(self._loans)

    def lend(self, tensors: Iterable[torch.Tensor]) -> None:
        """Holds the tensors of a batch that goes to the trainer now."""
        # Aliases, so that a count of those who hold the memory tells ours from theirs.
        self._loans.append(_Loan([tensor.detach() for tensor in tensors]))

    def settle(self) -> None:
        """Lets go what the trainer left and the device is done with. Call it when the next batch is asked for."""
        for loan in self._loans:
            if loan.left is None and not _has_others(loan.tensors):
                loan.left = self._mark()
        self._loans = [loan for loan in self._loans if loan.left is None or not loan.left.query()]

    def close(self) -> None:
        """Lets everything go, after waiting for at most a second for the device. What the trainer still has is its
        own to keep."""
        if not self._loans:
            return
        mark, deadline = self._mark(), time.monotonic() + _CLOSE_WAIT_S
        while not mark.query() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        self._loans.clear()


def tensors_of(batch: dict[str, Any]) -> list[torch.Tensor]:
    """All tensors of a batch, those in lists included."""
    import torch

    found: list[torch.Tensor] = []
    for value in batch.values():
        found += [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, torch.Tensor)]
    return found


def _has_others(tensors: list[torch.Tensor]) -> bool:
    """Whether anyone beside us holds memory of the tensors, through whichever view."""
    import torch

    # Private, and the only way to see views; without it a batch counts as left when the next one is asked for.
    count = getattr(torch._C, "_storage_Use_Count", None)
    if count is None:
        return False
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if count(storage._cdata) > 2:  # our alias and the object that was made to ask
            return True
    return False
