"""The blocks that a window holds: who uses them, what they cost, and which to let go first."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from dalipipe.cache.contract import BlockView

# Each mapped view is one entry of the kernel's table, 65,530 by default and shared with everything in the process.
MAX_VIEWS = 16_384
_NEVER = float("inf")


@dataclass(slots=True, kw_only=True)
class _Held:
    view: BlockView
    users: int
    retired: bool
    came: int


class HeldBlocks:
    """Views by block. A block is in use from the first to the last step of the window that reads it, and stays
    afterwards while it will be read again and there is room.

    Not thread-safe: the owner's lock guards it.

    `resident_bytes` counts all memory that the views hold, `busy_bytes` that of blocks in use. Blocks that may be let
    go for room stand in a heap, the one needed last on top; an entry that no longer says what is so is skipped.

    Args:
        num_samples: of a block; it is done when so many of its samples were used in the epoch. Sets that are mixed
            have blocks of different sizes.
    """

    def __init__(self, num_samples: Callable[[int], int]) -> None:
        self._num_samples = num_samples
        self._held: dict[int, _Held] = {}
        self._waiting_users: dict[int, int] = {}
        self._upcoming: dict[int, deque[int]] = {}
        self._used_samples: dict[int, int] = {}
        self._retired_unfetched: set[int] = set()
        self._idle: list[tuple[float, int, int]] = []
        self._came = itertools.count()
        self.resident_bytes = 0
        self.busy_bytes = 0

    def __contains__(self, block: int) -> bool:
        return block in self._held

    def __len__(self) -> int:
        return len(self._held)

    def view(self, block: int) -> BlockView:
        """The held view of a block."""
        return self._held[block].view

    def adds_at_most(self, room_bytes: int, blocks: Iterable[int], unknown_bytes: int) -> bool:
        """Whether these blocks would add no more than that to `busy_bytes`; `unknown_bytes` for each that nobody waits
        for yet."""
        left_bytes = room_bytes
        for block in blocks:
            if left_bytes < 0:
                break
            held = self._held.get(block)
            if held is None:
                left_bytes -= 0 if block in self._waiting_users else unknown_bytes
            elif not held.users:
                left_bytes -= held.view.held_bytes
        return left_bytes >= 0

    def announce(self, number: int, blocks: Iterable[int]) -> None:
        """Step `number` (counted from the start of the run) will use these blocks."""
        for block in blocks:
            upcoming = self._upcoming.setdefault(block, deque())
            upcoming.append(number)
            held = self._held.get(block)
            if len(upcoming) == 1 and held is not None and not held.users:
                self._offer(block, held)

    def next_use(self, block: int) -> int | None:
        """The number of the next announced step that will use the block and is not in the window yet."""
        upcoming = self._upcoming.get(block)
        return upcoming[0] if upcoming else None

    def use(self, blocks: dict[int, int]) -> None:
        """The next announced step enters the window; `blocks` counts its samples by block."""
        for block, num_samples in blocks.items():
            upcoming = self._upcoming[block]
            upcoming.popleft()
            if not upcoming:
                del self._upcoming[block]
            self._used_samples[block] = self._used_samples.get(block, 0) + num_samples
            held = self._held.get(block)
            if held is None:
                self._waiting_users[block] = self._waiting_users.get(block, 0) + 1
            else:
                self.busy_bytes += 0 if held.users else held.view.held_bytes
                held.users += 1
                held.retired = False

    def put(self, block: int, view: BlockView) -> None:
        """A block has come; the steps that wait for it use it from now on."""
        retired = block in self._retired_unfetched
        self._retired_unfetched.discard(block)
        held = _Held(view=view, users=self._waiting_users.pop(block, 0), retired=retired, came=next(self._came))
        self._held[block] = held
        self.resident_bytes += view.held_bytes
        self.busy_bytes += view.held_bytes if held.users else 0
        if not held.users:
            self._keep_or_drop(block, held)

    def leave(self, blocks: Iterable[int]) -> None:
        """A step is done with its blocks; those without a use ahead are let go."""
        for block in blocks:
            held = self._held.get(block)
            if held is None:
                # The step had its samples from elsewhere and was done before the block came.
                self._waiting_users[block] = self._waiting_users.get(block, 0) - 1
                if self._waiting_users[block] <= 0:
                    del self._waiting_users[block]
                continue
            held.users -= 1
            if held.users == 0:
                self.busy_bytes -= held.view.held_bytes
                self._keep_or_drop(block, held)

    def make_room(self, num_bytes: int, cap_bytes: int) -> bool:
        """Lets unused blocks in memory go, those needed last first, until `num_bytes` fit under the cap."""
        while self.resident_bytes + num_bytes > cap_bytes:
            if not self._idle:
                return False
            entry = heapq.heappop(self._idle)
            block = entry[-1]
            held = self._held.get(block)
            if held is not None and not held.users and entry == self._entry(block, held):
                self._drop(block)
        return True

    def end_epoch(self) -> None:
        """All steps of the epoch are in the window: what was kept for uses that were not planned yet is let go."""
        self._used_samples.clear()
        self._retired_unfetched.update(self._waiting_users)
        for block, held in list(self._held.items()):
            held.retired = True
            if held.users == 0 and block not in self._upcoming:
                self._drop(block)

    def clear(self) -> None:
        """Lets everything go."""
        for block in list(self._held):
            self._drop(block)
        self._waiting_users.clear()
        self._upcoming.clear()
        self._idle.clear()

    def _keep_or_drop(self, block: int, held: _Held) -> None:
        if self._worth_keeping(block, held):
            self._offer(block, held)
        else:
            self._drop(block)

    def _offer(self, block: int, held: _Held) -> None:
        """An unused block may make room, if it takes any."""
        if not held.view.held_bytes:
            return
        if len(self._idle) > 2 * len(self._held) + 64:  # most entries are of uses that are over
            self._idle = [self._entry(other, one) for other, one in self._held.items() if self._makes_room(one)]
            heapq.heapify(self._idle)
        heapq.heappush(self._idle, self._entry(block, held))

    def _entry(self, block: int, held: _Held) -> tuple[float, int, int]:
        """Sorts first what is needed last, then what came first."""
        upcoming = self._upcoming.get(block)
        return (-upcoming[0] if upcoming else -_NEVER, held.came, block)

    @staticmethod
    def _makes_room(held: _Held) -> bool:
        return not held.users and held.view.held_bytes > 0

    def _worth_keeping(self, block: int, held: _Held) -> bool:
        if not held.view.held_bytes:
            return block in self._upcoming and len(self._held) < MAX_VIEWS // 2
        # To fetch it again would cost the lake a second time, so it also waits for uses that are not planned yet.
        return block in self._upcoming or (not held.retired and not self._is_used_up(block))

    def _is_used_up(self, block: int) -> bool:
        return self._used_samples.get(block, 0) >= self._num_samples(block)

    def _drop(self, block: int) -> None:
        held = self._held.pop(block)
        view = held.view
        self.resident_bytes -= view.held_bytes
        self.busy_bytes -= view.held_bytes if held.users else 0
        if block not in self._upcoming and self._is_used_up(block):
            self._used_samples.pop(block, None)
        view.release()
