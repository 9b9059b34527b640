"""Which blocks come by one request with another: neighbours that are needed at about the same time."""

from __future__ import annotations

from collections.abc import Callable, Iterable

# After so many blocks in a row that were near, neighbours are handed out one by one, as threads can then share them.
_PATIENCE = 16


class Neighbours:
    """Knows which step needs a block first, and from that which of its neighbours it may bring along.

    A block that is needed in j steps brings along those that are needed in at most 2 j: what the next step lacks is
    never read behind anything that is needed later, and a lake that keeps up with the trainer at all brings the data of
    the j steps more in about the time that there is. Steps are counted from the start of the run. Not thread-safe, no
    time.

    Args:
        most_blocks: read by one request, on average; 1 reads each alone.
    """

    def __init__(self, most_blocks: int) -> None:
        self._most_blocks = most_blocks
        self._needed_by: dict[int, int] = {}
        self._patience = _PATIENCE

    @property
    def may_join(self) -> bool:
        """Whether a block may bring any along just now."""
        return self._most_blocks > 1 and self._patience > 0

    def lacked(self, blocks: Iterable[int], step: int) -> None:
        """A step that lacks these blocks enters the window."""
        for block in blocks:
            self._needed_by.setdefault(block, step)

    def came(self, block: int) -> None:
        """The block is near."""
        self._needed_by.pop(block, None)

    def looked(self, *, is_near: bool) -> None:
        """Whether a block that was to be brought was near already, or in the pool."""
        self._patience = self._patience - 1 if is_near else _PATIENCE

    def needed_by(self, block: int) -> int | None:
        """The first step that lacked the block; None where no step of the window did."""
        return self._needed_by.get(block)

    def of(self, block: int, head: int, need: Callable[[int], int | None]) -> list[int]:
        """The blocks after `block` that may come with it.

        Args:
            head: the step that is handed out next.
            need: the first step that needs a block that may be brought; None where it may not.
        """
        found: list[int] = []
        first_step = self._needed_by.get(block)
        if first_step is None or not self.may_join:
            return found
        last_step = head + 2 * max(0, first_step - head)
        for other in range(block + 1, block + self._most_blocks):
            step = need(other)
            # The samples of a step that was handed out were read alone: what it lacked can wait.
            if step is None or not head <= step <= last_step:
                break
            found.append(other)
        return found

    def clear(self) -> None:
        """Forgets all steps."""
        self._needed_by.clear()
