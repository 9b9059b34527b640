"""Images of odd sizes in a few large pieces of memory, each cut into slots of one size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

PIECE_BYTES = 32 * 2**20
_LEAST_BYTES = 4096
_STEPS = 4
_WAYS = 8


class Memory(Protocol):
    """Where pieces come from. A piece is a flat uint8 tensor."""

    def allocate(self, num_bytes: int) -> Any:
        """A piece. Raises MemoryError when there is no room for it."""

    def is_short(self, num_bytes: int) -> bool:
        """Whether others would lack memory if so many bytes more were taken."""

    def give_back(self) -> None:
        """Lets freed pieces go to other users of the device, not only to this allocator's."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Piece:
    memory: Any
    slot_bytes: int
    num_bytes: int
    free: list[int]  # offsets
    samples: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A kept image: flat uint8 memory, and its height and width in pixels."""

    memory: Any
    height: int
    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """pieces_bytes: taken from the device. images_bytes: of them, filled with pixels. num_samples: kept images."""

    pieces_bytes: int
    images_bytes: int
    num_samples: int


def size_class(num_bytes: int) -> int:
    """The slot that an image of so many bytes takes: four sizes an octave, so that less than a quarter is lost."""
    octave = _LEAST_BYTES
    while octave * 2 < num_bytes:
        octave *= 2
    step = octave // _STEPS
    return max(_LEAST_BYTES, -(-num_bytes // step) * step)


class Arena:
    """Kept images by sample id within a budget. The first that come stay; only giving way drops any.

    Not thread-safe: its owner takes one call at a time.

    Args:
        budget_bytes: of all pieces together.
        piece_bytes: of a piece; an image that is larger has a piece to itself.
    """

    def __init__(
        self,
        memory: Memory,
        budget_bytes: int,
        *,
        piece_bytes: int = PIECE_BYTES,
        record: Callable[[str], None] = lambda _name: None,
    ) -> None:
        self.budget_bytes = budget_bytes
        self._memory = memory
        self._piece_bytes = piece_bytes
        self._record = record
        self._pieces: list[_Piece] = []
        self._places: dict[int, tuple[_Piece, int, int, int]] = {}

    def find(self, sample_id: int) -> Slot | None:
        """The kept image. What is dropped later stays valid while its slot is held."""
        place = self._places.get(sample_id)
        if place is None:
            return None
        piece, offset, height, width = place
        return Slot(memory=piece.memory[offset : offset + 3 * height * width], height=height, width=width)

    def put(self, sample_id: int, height: int, width: int) -> Slot | None:
        """A slot for an image to be written into now; None when there is no room, or the image is here."""
        if sample_id in self._places:
            return None
        slot_bytes = size_class(3 * height * width)
        piece = next((one for one in self._pieces if one.slot_bytes == slot_bytes and one.free), None)
        piece = piece or self._grow(slot_bytes)
        if piece is None:
            return None
        self._places[sample_id] = (piece, piece.free.pop(), height, width)
        piece.samples.add(sample_id)
        return self.find(sample_id)

    def release(self, num_bytes: int | None = None) -> int:
        """Drops pieces, the emptiest first, until `num_bytes` are free (None = all); the budget shrinks by as much.

        Returns: the bytes that were freed.
        """
        freed_bytes = 0
        for piece in sorted(self._pieces, key=lambda one: len(one.samples) * one.slot_bytes):
            if num_bytes is not None and freed_bytes >= num_bytes:
                break
            for sample_id in piece.samples:
                del self._places[sample_id]
            self._pieces.remove(piece)
            piece.memory = None
            freed_bytes += piece.num_bytes
        self.budget_bytes -= freed_bytes
        if freed_bytes:
            self._memory.give_back()
            self._record("device_gave_way")
        return freed_bytes

    def make_way(self) -> None:
        """Drops an eighth of what is kept where others lack memory. To be called at every step: what steps in work hold
        is free only after them, so all at once would be too much."""
        if self._pieces and self._memory.is_short(0):
            self.release(max(1, self.usage.pieces_bytes // _WAYS))

    @property
    def usage(self) -> Usage:
        """What is taken and what of it is filled."""
        return Usage(
            pieces_bytes=sum(piece.num_bytes for piece in self._pieces),
            images_bytes=sum(3 * height * width for _, _, height, width in self._places.values()),
            num_samples=len(self._places),
        )

    def _grow(self, slot_bytes: int) -> _Piece | None:
        num_slots = max(1, self._piece_bytes // slot_bytes)
        num_bytes = num_slots * slot_bytes
        if self.usage.pieces_bytes + num_bytes > self.budget_bytes or self._memory.is_short(num_bytes):
            return None
        try:
            memory = self._memory.allocate(num_bytes)
        except MemoryError:
            self._record("device_out_of_memory")
            self.budget_bytes = self.usage.pieces_bytes  # the device has no more: do not ask at every image
            return None
        offsets = [slot_bytes * i for i in reversed(range(num_slots))]
        piece = _Piece(memory=memory, slot_bytes=slot_bytes, num_bytes=num_bytes, free=offsets)
        self._pieces.append(piece)
        return piece
