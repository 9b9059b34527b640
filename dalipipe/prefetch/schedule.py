"""What to do next to keep a window of steps ready: the window's state, without threads or time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping

from dalipipe.cache.contract import BlockView
from dalipipe.order.step import Step
from dalipipe.prefetch.cold import LooseSamples
from dalipipe.prefetch.coldstart import ColdStart
from dalipipe.prefetch.depth import MIN_DEPTH
from dalipipe.prefetch.held import MAX_VIEWS, HeldBlocks
from dalipipe.prefetch.plan import StepPlan
from dalipipe.prefetch.tasks import BuildTask, ColdTask, FetchTask, PendingStep, PlanTask, Task, WarmTask
from dalipipe.prefetch.together import Neighbours

# Steps planned beyond the window, so that a block's next use is known when its step leaves.
_LOOKAHEAD_STEPS = 32


class Schedule:
    """The steps of the window, the blocks that they lack, and the memory that blocks take.

    Not thread-safe: the owner's lock guards it.

    Args:
        cap_bytes: cap on blocks in memory, those under way included. A block that the first step of the window lacks
            is fetched whatever the cap says: one step always fits.
        block_bytes: what a block takes before its size is known: the mean.
        num_samples: of a block.
        spare_threads: so many threads at most read samples alone, or blocks from beyond the window.
        warms: whether blocks from beyond the window are brought at all.
        most_blocks: that one request brings together.
    """

    def __init__(
        self,
        *,
        cap_bytes: int,
        block_bytes: int,
        num_samples: Callable[[int], int],
        spare_threads: int = 1,
        warms: bool = False,
        most_blocks: int = 1,
    ) -> None:
        self._cap_bytes = cap_bytes
        self._block_bytes = block_bytes
        self._num_samples = num_samples
        self._held = HeldBlocks(num_samples)
        self._plans: deque[StepPlan] = deque()
        self._num_announced = 0
        self._num_admitted = 0
        self._planning = False
        self._window: deque[PendingStep] = deque()
        self._buildable: deque[PendingStep] = deque()
        self._wanted: deque[int] = deque()
        self._not_pressing: PendingStep | None = None
        self._spare_threads = spare_threads
        self._warms = warms
        self._num_warming = 0
        self._warm_bytes = block_bytes * most_blocks
        self._neighbours = Neighbours(most_blocks)
        self._ahead: set[int] = set()  # brought beside others for steps beyond the window
        self._cold = ColdStart(block_bytes=block_bytes, num_samples=num_samples, threads=spare_threads)
        self._under_way: dict[int, str] = {}
        self._reserved: dict[int, int] = {}
        self._failed: dict[int, Exception] = {}
        self._unasked: tuple[int, Exception] | None = None
        self._epoch = -1

    def begin_cold(self, num_steps: int, period: int) -> None:
        """Before the first plan: so many steps may have their samples read alone. The blocks of the first one last for
        `period` steps."""
        self._cold.begin(num_steps, period)

    @property
    def head(self) -> PendingStep | None:
        """The step that is handed out next; None before the first plan."""
        return self._window[0] if self._window else None

    @property
    def num_planned(self) -> int:
        """Steps that were planned so far."""
        return self._num_announced

    @property
    def resident_bytes(self) -> int:
        """Bytes of blocks held in memory."""
        return self._held.resident_bytes

    @property
    def under_way(self) -> dict[int, str]:
        """The blocks that are being fetched and the tier that each is expected from: lake or node."""
        return self._under_way

    def count_samples(self, blocks: Iterable[int]) -> int:
        """All samples that these blocks hold."""
        return sum(map(self._num_samples, blocks))

    def next_task(self, depth: int) -> Task | None:
        """What a free thread does now: ready steps first, then cold samples, blocks in order of need, and plans."""
        depth += self._cold.steps_ahead
        self._admit(depth)
        if self._buildable:
            pending = self._buildable.popleft()
            near = {block: self._held.view(block) for block in pending.plan.blocks if block in self._held}
            return BuildTask(pending=pending, views=near)
        if self._cold.is_on:
            self._not_pressing = None  # blocks may be wanted again
        if (cold := self._cold.next_task(self._window, self._wanted)) is not None:
            return cold
        if not self._plans and len(self._window) < depth and self._may_plan():
            return PlanTask()
        if self._cold.unchecked and any(pending.ends_epoch for pending in self._window):
            self._wanted.extend(block for block in self._cold.unchecked if self._cold.want(block))
        if (block := self._next_wanted()) is not None:
            self._under_way[block] = "lake"
            return FetchTask(block=block, beside=self._take_beside(block))
        if len(self._plans) < _LOOKAHEAD_STEPS and self._may_plan():
            return PlanTask()
        if (
            self._warms
            and self._num_warming < self._spare_threads
            and not self._wanted
            and self._fits(self._warm_bytes)
        ):
            self._num_warming += 1
            return WarmTask()
        return None

    def is_pressing(self) -> bool:
        """Whether a thread that waits for room is needed for something else: without it the next step may never come.

        A step that was cut from single samples goes before its blocks have come, so that blocks of later steps can be
        under way while nobody plans, or brings what the next step lacks.
        """
        if self._buildable or self._cold.has_task(self._window):
            return True
        if not self._window:
            return bool(self._plans) or not self._planning
        return self._first_urgent() is not None

    def give_back(self, block: int) -> None:
        """A FetchTask that found no room is put first in the queue again."""
        self._under_way.pop(block, None)
        self._wanted.appendleft(block)
        self._not_pressing = None

    def looked(self, *, is_near: bool) -> None:
        """Whether the block of a FetchTask was near already, or in the pool."""
        self._neighbours.looked(is_near=is_near)

    def keep_beside(self, sizes: Mapping[int, int]) -> list[int]:
        """Takes room for blocks beside one that has it, in bytes, as far as there is some; the blocks that have it."""
        kept = []
        for block, num_bytes in sizes.items():
            if not self._fits(num_bytes):
                break
            self._reserved[block] = num_bytes
            kept.append(block)
        return kept

    def give_back_beside(self, blocks: Iterable[int]) -> None:
        """Blocks beside another that did not come with it are wanted again in order of need, if by any step yet."""
        again = []
        for block in blocks:
            self._end_fetch(block)
            # Also where the step had its samples from elsewhere meanwhile: they are to be compared.
            if self._neighbours.needed_by(block) is not None:
                again.append(block)
            self._ahead.discard(block)
        if again:
            self._wanted = deque(
                sorted([*again, *self._wanted], key=lambda block: self._neighbours.needed_by(block) or 0)
            )
            self._not_pressing = None

    def warmed(self, *, more: bool) -> None:
        """The answer to a WarmTask; without `more` the epoch is through."""
        self._num_warming -= 1
        self._warms = self._warms and more

    def planned(self, plans: Iterable[StepPlan]) -> None:
        """The answer to a PlanTask."""
        self._planning = False
        for plan in plans:
            self._held.announce(self._num_announced, plan.blocks)
            self._num_announced += 1
            self._plans.append(plan)

    def reserve(self, block: int, num_bytes: int) -> bool:
        """Takes room for a block under way until it has come or failed, if there is some or it must be."""
        # Room goes in order of need: blocks that were started earlier and have none yet are counted as if they had.
        before = list(self._under_way).index(block)
        num_ahead = sum(other not in self._reserved for other in list(self._under_way)[:before])
        fits = self._fits(num_bytes * (num_ahead + 1))
        if not fits and not self._is_urgent(block):
            return False
        self._reserved[block] = num_bytes
        return True

    def arrived(self, block: int, view: BlockView) -> None:
        """The answer to a FetchTask; the schedule owns the view from here on."""
        self._end_fetch(block)
        self._cold.came_whole(block)
        self._neighbours.came(block)
        self._held.put(block, view)
        for pending in self._window:
            if block in pending.lacks:
                pending.lacks.discard(block)
                if not pending.lacks:
                    self._buildable.append(pending)

    def came_loose(self, task: ColdTask, samples: LooseSamples | None) -> None:
        """The answer to a ColdTask; with None its steps wait for the block, as all others do."""
        self._buildable.extend(self._cold.came(task, samples))
        if samples is None and self._cold.want(task.block):
            self._wanted.appendleft(task.block)
            self._not_pressing = None

    def has_loose(self, block: int) -> bool:
        """Whether samples of a block were read alone and are not yet compared with it."""
        return self._cold.has_unchecked(block)

    def take_loose(self, block: int) -> list[Mapping[int, tuple[int, int]]]:
        """`LooseSamples.digests` of what was read alone of a block and not yet compared with it."""
        return self._cold.take_unchecked(block)

    def failed(self, block: int, error: Exception) -> None:
        """The other answer to a FetchTask: `failure_of` tells it to the steps that lack the block."""
        self._end_fetch(block)
        self._failed[block] = error
        if not any(block in pending.lacks for pending in self._window):
            self._unasked = (block, error)

    def failure_of(self, pending: PendingStep) -> tuple[int, Exception] | None:
        """The first block that this step lacks and cannot have, and why; or one that nobody waits for, as its samples
        were read alone: nobody else would tell."""
        unchecked = self._cold.unchecked if pending.ends_epoch else ()
        for block in pending.lacks.union(unchecked) & self._failed.keys():
            return block, self._failed[block]
        return self._unasked

    def take(self) -> Step | None:
        """Removes the head and returns its step, if it is ready. Its blocks stay in use until `leave`."""
        head = self.head
        if head is None or head.ready is None or self.awaits_checks:
            return None
        self._window.popleft()
        if self._cold.ends_with(head):
            self._wanted.extendleft(reversed(self._cold.want_again(self._window)))
        self._not_pressing = None
        return head.ready

    def leave(self, blocks: Iterable[int]) -> None:
        """A step that was handed out is done with its blocks."""
        self._held.leave(blocks)
        # A step that needed more than the cap was let through; what it leaves idle above the cap goes.
        self._held.make_room(0, self._cap_bytes)

    @property
    def awaits_checks(self) -> bool:
        """Whether the next step is the last of its epoch and waits until what was read alone is compared: no epoch ends
        with bytes that are wrong and that nobody told of."""
        return bool(self._cold.unchecked) and self._window[0].ends_epoch if self._window else False

    def is_full(self, depth: int) -> bool:
        """Whether `depth` steps lie ready, so that there is nothing to do but to wait for the consumer."""
        return len(self._window) >= depth and all(pending.ready is not None for pending in self._window)

    def clear(self) -> None:
        """Lets all blocks go and forgets all steps."""
        self._held.clear()
        for steps in (
            self._plans,
            self._window,
            self._buildable,
            self._wanted,
            self._cold,
            self._neighbours,
            self._ahead,
        ):
            steps.clear()
        self._not_pressing = None

    def _admit(self, depth: int) -> None:
        while len(self._window) < depth and self._plans and self._may_admit(self._plans[0]):
            plan = self._plans.popleft()
            if plan.order.epoch != self._epoch:
                self._held.end_epoch()
                self._epoch = plan.order.epoch
            self._held.use(plan.blocks)
            self._ahead.difference_update(plan.blocks)
            lacks = {block for block in plan.blocks if block not in self._held}
            pending = PendingStep(plan, lacks)
            known = self._under_way.keys() | set(self._wanted)
            self._wanted.extend(block for block in self._cold.admit(pending) if block not in known)
            self._not_pressing = None
            self._neighbours.lacked(lacks, self._num_admitted)
            self._num_admitted += 1
            self._window.append(pending)
            if not pending.lacks:
                self._buildable.append(pending)

    def _take_beside(self, block: int) -> tuple[int, ...]:
        """Neighbours that may come with a block, now under way with it: wanted ones, and such as steps that are planned
        need, while half of the memory is free, so that none of these is dropped again before its turn."""
        following = block + 1
        is_needed = self._neighbours.needed_by(following) is not None or self._held.next_use(following) is not None
        if not self._neighbours.may_join or not is_needed:
            return ()
        wanted = set(self._wanted)
        num_coming = len(wanted) + len(self._under_way)
        spare_bytes = self._cap_bytes // 2 - self._held.resident_bytes - num_coming * self._block_bytes
        num_spare = 0 if self._cold.is_on else min(spare_bytes // self._block_bytes, MAX_VIEWS // 2 - len(self._held))

        def need(other: int) -> int | None:
            nonlocal num_spare
            if other in self._held or other in self._under_way or other in self._failed:
                return None
            if other in wanted:
                return self._neighbours.needed_by(other)
            if num_spare <= 0 or self._neighbours.needed_by(other) is not None:
                return None
            num_spare -= 1
            return self._held.next_use(other)

        beside = self._neighbours.of(block, self._num_admitted - len(self._window), need)
        if not wanted.isdisjoint(beside):
            self._wanted = deque(other for other in self._wanted if other not in beside)
        self._ahead.update(other for other in beside if other not in wanted)
        self._under_way.update(dict.fromkeys(beside, "lake"))
        return tuple(beside)

    def _end_fetch(self, block: int) -> None:
        self._under_way.pop(block, None)
        self._reserved.pop(block, None)

    def _may_admit(self, plan: StepPlan) -> bool:
        # Blocks of the window are in use and cannot make room, so the steps let in are those whose blocks fit.
        if not self._window:
            return True
        num_coming = len(self._wanted) + len(self._under_way)
        # What was brought ahead is for the very next steps: to make room for this one it would be read twice.
        num_coming += sum(block in self._held and block not in plan.blocks for block in self._ahead)
        room_bytes = self._cap_bytes - self._held.busy_bytes - num_coming * self._block_bytes
        if not self._held.adds_at_most(room_bytes, plan.blocks, self._block_bytes):
            return False
        return len(self._held) + num_coming < MAX_VIEWS or len(self._window) < MIN_DEPTH

    def _may_plan(self) -> bool:
        may, self._planning = not self._planning, True
        return may

    def _next_wanted(self) -> int | None:
        """The block to bring next: what the next step lacks in any case, else the first while there is room."""
        if (block := self._first_urgent()) is not None:
            self._wanted.remove(block)
            return block
        if self._wanted:
            may = self._cold.may_fetch(len(self._under_way)) and self._fits(0)
            return self._wanted.popleft() if may else None
        return self._next_put_off()

    def _next_put_off(self) -> int | None:
        """A block that nobody waits for, when nothing else is to be brought."""
        block = self._cold.next_put_off()
        if block is None or self._under_way or not self._fits(self._block_bytes):
            return None
        self._cold.want(block)
        return block

    def _first_urgent(self) -> int | None:
        """The first wanted block that the next step lacks. That there is none holds until a block is wanted anew or
        another step is the next: what a step lacks only becomes less."""
        head = self.head
        if head is None or head is self._not_pressing:
            return None
        for block in self._wanted:
            if block in head.lacks:
                return block
        if not head.ends_epoch:
            self._not_pressing = head
        elif self.awaits_checks and not any(map(self._cold.has_unchecked, self._under_way)):
            return next(filter(self._cold.has_unchecked, self._wanted), None)
        return None

    def _is_urgent(self, block: int) -> bool:
        if not self._window or block in self._window[0].lacks:
            return bool(self._window)
        # One of these at a time is let past the cap.
        due = self.awaits_checks and self._cold.has_unchecked(block)
        return due and not any(map(self._cold.has_unchecked, self._reserved))

    def _fits(self, num_bytes: int) -> bool:
        coming_bytes = sum(self._reserved.values()) + self._num_warming * self._warm_bytes
        return self._held.make_room(num_bytes + coming_bytes, self._cap_bytes)
