"""The moving window: fetch threads keep the blocks of the next steps near and the steps themselves ready."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from dalipipe.cache.contract import BlockView, Cache
from dalipipe.errors import ClosedError, DalipipeError, PipelineError, PipelineTimeoutError
from dalipipe.order.step import Step
from dalipipe.prefetch.assemble import Assembler
from dalipipe.prefetch.cold import SampleRanges
from dalipipe.prefetch.coldstart import COLD_PERIODS
from dalipipe.prefetch.config import PrefetchConfig
from dalipipe.prefetch.depth import DepthController
from dalipipe.prefetch.plan import StepPlanner
from dalipipe.prefetch.schedule import Schedule
from dalipipe.prefetch.tasks import BuildTask, ColdTask, FetchTask, PendingStep, Task, WarmTask
from dalipipe.prefetch.warm import EpochWarmer
from dalipipe.telemetry import Recorder

_JOIN_S = 1.5
_LONGEST_WAIT_S = 1.0  # a thread looks again after so long, whatever it was or was not told
_FAR_TO_NEAR = ("lake", "pool", "node", "memory")

_log = logging.getLogger(__name__)


class WindowPrefetcher:
    """Prepares the steps of one rank ahead of the trainer; see `Prefetcher`.

    One lock guards the schedule, and all waiting is on conditions of that lock, so that closing wakes everybody at
    once. Nothing that may block (order, store, disk) is called while it is held. A change wakes one idle thread, and
    each thread that finds something to do wakes one more: to wake all of them for each block took more CPU than
    reading it.

    The hand-over is measured on both sides: `get_wait_s.<what the step lacked>` is how long `next` waited (lake, node,
    index or plan), `put_wait_s.prefetch` how long a full window waited for `next`. The trainer's own waits are the
    loader's to count.
    """

    def __init__(
        self,
        planner: StepPlanner,
        assembler: Assembler,
        cache: Cache,
        schedule: Schedule,
        *,
        config: PrefetchConfig,
        block_bytes: Callable[[int], int],
        where: Callable[[int], str] = str,
        recorder: Recorder,
        aside: SampleRanges | None = None,
        cold_steps: int | None = None,
        warmer: EpochWarmer | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._planner = planner
        self._assembler = assembler
        self._cache = cache
        self._schedule = schedule
        self._controller = DepthController(config.depth)
        self._timeout_s = config.timeout_s
        self._block_bytes = block_bytes
        self._where = where  # the files that a block lies in, for messages
        self._aside = aside
        self._cold_steps = cold_steps
        self._warmer = warmer
        self._recorder = recorder
        controller = self._controller  # not self: the recorder outlives the prefetcher
        recorder.gauge("prefetch_depth", lambda: controller.depth)
        self._clock = clock
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._room = threading.Condition(self._lock)
        self._ready = threading.Condition(self._lock)
        self._failure: Exception | None = None
        self._closed = False
        self._full_since_s: float | None = None
        self._came_from = ""
        self._asked_s = clock()
        self._threads = [
            threading.Thread(target=self._run, name=f"dalipipe-fetch-{i}", daemon=True) for i in range(config.threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def depth(self) -> int:
        """Steps that are kept ready or under way just now."""
        return self._controller.depth

    @property
    def resident_bytes(self) -> int:
        """Bytes of blocks that this process holds in memory just now; `prefetch.memory_cap` bounds them."""
        with self._lock:
            return self._schedule.resident_bytes

    def is_full(self) -> bool:
        """Whether all steps of the window lie ready, so that only the consumer is waited for."""
        with self._lock:
            return self._schedule.is_full(self._controller.depth)

    def next(self) -> Step:
        """Returns the next step; see `Prefetcher.next`.

        Raises:
            IntegrityError, StorageError, CacheError …: a block of this step could not be had.
            PipelineError: a thread died; the reason is the cause.
            PipelineTimeoutError: the step did not arrive within `prefetch.timeout_s`; names what is missing.
            ClosedError: `close` was called, also while waiting.
        """
        asked_s = self._clock()
        with self._lock:
            while True:
                self._raise_failures()
                step = self._schedule.take()
                now_s = self._clock()
                if step is not None:
                    break
                left_s = asked_s + self._timeout_s - now_s
                if left_s <= 0:
                    raise PipelineTimeoutError(self._describe_lack())
                lack, self._came_from = self._lack(), ""
                self._ready.wait(left_s)
                # Where the block really came from is known when it is there.
                lack = self._came_from or lack
                self._recorder.lacked(lack, now_s)
                self._recorder.add(f"get_wait_s.{lack}", self._clock() - now_s)
            self._controller.delivered(now_s - asked_s, now_s - self._asked_s)
            self._asked_s = now_s
            if self._full_since_s is not None:
                # All steps lay ready: the downstream side is the slow one.
                self._recorder.add("put_wait_s.prefetch", now_s - self._full_since_s)
                self._full_since_s = None
            self._changed()
            return step

    def close(self) -> None:
        """Ends and joins all threads within 2 s and lets all blocks go. Idempotent.

        A thread that hangs in the store is left behind as a daemon, and said so. Steps handed out stay readable.
        """
        with self._lock:
            self._closed = True
            self._schedule.clear()
            for condition in (self._idle, self._room, self._ready):
                condition.notify_all()
            threads, self._threads = self._threads, []
        deadline_s = time.monotonic() + _JOIN_S
        for thread in threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        hung = [thread.name for thread in threads if thread.is_alive()]
        if hung:
            _log.warning(
                "%s did not come back from the store (blocks %s%s) and were left behind; lower "
                "storage.request_timeout_s, or look at the mount",
                ", ".join(hung),
                sorted(self._schedule.under_way)[:8],
                self._files(sorted(self._schedule.under_way)),
            )

    def _raise_failures(self) -> None:
        if self._closed:
            raise ClosedError("the next step was asked of a closed prefetcher")
        if self._failure is not None:
            raise PipelineError(f"a prefetch thread died: {self._failure!r}") from self._failure
        head = self._schedule.head
        failure = self._schedule.failure_of(head) if head is not None else None
        if head is not None and failure is not None:
            block, error = failure
            if isinstance(error, DalipipeError):
                raise error  # it names shard, URL and remedy, and its type is what a caller wants to catch
            raise PipelineError(f"{head.name} needs block {block}, which could not be had: {error}") from error

    def _lack(self) -> str:
        """What the next step lacks just now: where the wait that begins is charged to."""
        head = self._schedule.head
        if head is None:
            return "plan"
        if not head.lacks:
            return "lake" if self._schedule.awaits_checks else "index"
        tiers = {tier for block, tier in self._schedule.under_way.items() if block in head.lacks}
        # The farthest one decides; a block that no thread has taken up yet counts as the lake's.
        return next((tier for tier in _FAR_TO_NEAR if tier in tiers), "lake")

    def _describe_lack(self) -> str:
        begun = f"waited {self._timeout_s:g} s (prefetch.timeout_s) for the next step"
        head = self._schedule.head
        if head is None:
            return f"{begun}: no step is planned yet"
        if not head.lacks and self._schedule.awaits_checks:
            under_way = sorted(self._schedule.under_way)
            return (
                f"{begun}: {head.name} ends its epoch and waits for blocks with which samples are compared that were "
                f"read alone; {under_way[:8]} are under way{self._files(under_way)}; check the store, or raise "
                "prefetch.timeout_s"
            )
        if not head.lacks:
            return f"{begun}: {head.name} has all its blocks and waits to be cut into samples"
        under_way = sorted(head.lacks & self._schedule.under_way.keys())
        return (
            f"{begun}: {head.name} lacks {len(head.lacks)} blocks {sorted(head.lacks)[:8]}, of which "
            f"{under_way[:8]} are under way{self._files(under_way)}; check the store (a mount that hangs lets no read "
            "of such a file come back: try one by hand, mount it again), or raise prefetch.timeout_s"
        )

    def _files(self, blocks: list[int]) -> str:
        files = list(dict.fromkeys(self._where(block) for block in blocks))
        return f" from {', '.join(files[:3])}{' …' if files[3:] else ''}" if files else ""

    def _run(self) -> None:
        try:
            while (task := self._wait_for_task()) is not None:
                if isinstance(task, BuildTask):
                    self._build(task)
                elif isinstance(task, FetchTask):
                    self._fetch(task)
                elif isinstance(task, ColdTask):
                    self._read_cold(task)
                elif isinstance(task, WarmTask):
                    self._warm()
                else:
                    self._plan()
        except Exception as error:  # noqa: BLE001 - whatever ended the thread is raised by `next`
            with self._lock:
                self._failure = error
                self._ready.notify_all()

    def _wait_for_task(self) -> Task | None:
        with self._lock:
            while not self._closed:
                head = self._schedule.head
                task = self._schedule.next_task(self._controller.depth)
                if task is not None or self._schedule.head is not head:
                    self._changed()
                if task is not None:
                    return task
                self._idle.wait(_LONGEST_WAIT_S)
        return None

    def _changed(self) -> None:
        """There may be more to do, or more room; under the lock."""
        self._idle.notify()
        # Few at most, and any of them may be the one that is needed for what the next step lacks.
        self._room.notify_all()

    def _plan(self) -> None:
        plans = self._planner.next_window()
        with self._lock:
            if not self._closed:
                if plans[0].blocks:
                    period = self._schedule.count_samples(plans[0].blocks) // max(1, len(plans[0].ids))
                    self._controller.expect(period)
                    if self._aside is not None and not self._schedule.num_planned:
                        steps = COLD_PERIODS * max(1, period) if self._cold_steps is None else self._cold_steps
                        self._schedule.begin_cold(steps, period)
                self._schedule.planned(plans)
                self._changed()

    def _fetch(self, task: FetchTask) -> None:
        block, left = task.block, dict.fromkeys(task.beside)
        try:
            is_near = self._cache.contains(block)
            run = [block] if is_near or not left else self._cache.together([block, *left])
            sizes = {one: self._block_bytes(one) for one in run}
            run = self._reserve(sizes, [one for one in left if one not in sizes], "node" if is_near else "lake")
            if not run:
                return
            left = dict.fromkeys(run[1:])
            began_s = self._clock()

            def deliver(one: int, view: BlockView) -> None:
                left.pop(one, None)
                self._take_in(one, view, self._clock() - began_s, is_first=one == block)

            self._cache.get_run(run, deliver)
        except Exception as error:  # noqa: BLE001 - raised by `next` for the step that needs the block
            self._fail(block, error)
        with self._lock:
            if left and not self._closed:
                self._schedule.give_back_beside(left)
                self._changed()

    def _fail(self, block: int, error: Exception) -> None:
        with self._lock:
            self._schedule.failed(block, error)
            self._ready.notify_all()

    def _take_in(self, block: int, view: BlockView, fetched_s: float, *, is_first: bool) -> None:
        """Puts a block that came into the schedule; `is_first`: it is not one that came beside another."""
        try:
            # Until none came meanwhile: what came after the last look and before the arrival would never be compared.
            while not self._arrive(block, view, fetched_s, is_first=is_first):
                self._check_loose(block, view)
        except Exception as error:  # noqa: BLE001 - raised by `next` for the step that needs the block
            view.release()
            self._fail(block, error)

    def _arrive(self, block: int, view: BlockView, fetched_s: float, *, is_first: bool) -> bool:
        """Puts a fetched block into the schedule; False, and nothing done, while samples of it are unchecked."""
        with self._lock:
            if self._closed:
                view.release()
                return True
            if self._schedule.has_loose(block):
                return False
            if view.tier == "lake":
                self._recorder.observe("lake_block_s", fetched_s)
            if is_first:
                self._schedule.looked(is_near=view.tier != "lake")
                if view.tier == "lake":
                    self._controller.fetched(fetched_s)
            head = self._schedule.head
            if head is not None and block in head.lacks and self._came_from != "lake":
                self._came_from = view.tier
            self._schedule.arrived(block, view)
            self._changed()
            self._ready.notify_all()  # what the next step lacks may be another thing now
            return True

    def _check_loose(self, block: int, view: BlockView) -> None:
        """What was read alone before its block came is compared with it."""
        with self._lock:
            loose = self._schedule.take_loose(block)
        for samples in loose:
            assert self._aside is not None
            self._aside.check(block, view.memory, samples)

    def _read_cold(self, task: ColdTask) -> None:
        assert self._aside is not None
        plans = [pending.plan for pending in task.pendings]
        samples = None if self._cache.contains(task.block) else self._aside.read(plans, task.block)
        with self._lock:
            if not self._closed:
                self._schedule.came_loose(task, samples)
                self._changed()

    def _warm(self) -> None:
        assert self._warmer is not None
        more = self._warmer.bring_one(self._cache)
        with self._lock:
            self._schedule.warmed(more=more)
            self._changed()

    def _reserve(self, sizes: dict[int, int], apart: list[int], tier: str) -> list[int]:
        """Waits for room for the first block, takes it for the others as far as there is some, and gives back those
        that stand `apart`. The blocks that have room: none when the prefetcher was closed meanwhile, or the thread is
        needed elsewhere.
        """
        block, *beside = sizes
        with self._lock:
            self._schedule.under_way[block] = tier
            self._schedule.give_back_beside(apart)
            if apart:
                self._changed()
            self._ready.notify_all()
            while not self._closed:
                if self._schedule.reserve(block, sizes[block]):
                    kept = self._schedule.keep_beside({one: sizes[one] for one in beside})
                    self._schedule.give_back_beside(beside[len(kept) :])
                    if sizes.keys() != {block}:
                        self._room.notify_all()  # others count room for what has none yet
                    return [block, *kept]
                # Nobody waits for room with blocks in hand that another step may be waiting for.
                self._schedule.give_back_beside(beside)
                beside = []
                if self._schedule.is_pressing():
                    self._schedule.give_back(block)
                    return []
                self._room.wait(_LONGEST_WAIT_S)
        return []

    def _build(self, task: BuildTask) -> None:
        try:
            pending = task.pending
            step = self._assembler.build(pending.plan, task.views, pending.loose, self._release_once(pending))
        except ClosedError:
            # `close` let the views go while they were cut; `next` says so.
            return
        with self._lock:
            task.pending.ready = step
            self._ready.notify_all()
            if self._schedule.is_full(self._controller.depth):
                self._full_since_s = self._clock()

    def _release_once(self, pending: PendingStep) -> Callable[[], None]:
        blocks = list(pending.plan.blocks)

        def release() -> None:
            with self._lock:
                if blocks and not self._closed:
                    self._schedule.leave(blocks)
                    self._changed()
                blocks.clear()

        return release
