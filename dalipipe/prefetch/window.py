"""The moving window: fetch threads keep the blocks of the next steps near and the steps themselves ready."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from dalipipe.cache.contract import BlockView, Cache
from dalipipe.errors import ClosedError, ConfigError, PipelineError, PipelineTimeoutError
from dalipipe.order.contract import Order
from dalipipe.prefetch.assemble import Assembler
from dalipipe.prefetch.config import PrefetchConfig
from dalipipe.prefetch.contract import Step
from dalipipe.prefetch.depth import MIN_DEPTH, DepthController
from dalipipe.prefetch.held import MAX_VIEWS, HeldBlocks
from dalipipe.prefetch.plan import StepPlan, StepPlanner
from dalipipe.shards.manifest import Manifest
from dalipipe.telemetry import Recorder
from dalipipe.units import format_bytes, parse_capacity

# Steps planned beyond the window, so that a block's next use is known when its step leaves.
_LOOKAHEAD_STEPS = 32
_JOIN_S = 1.5

_log = logging.getLogger(__name__)

_Task = Callable[[], None]


class _Pending:
    """A step in the window, from its entry until it is handed out."""

    __slots__ = ("lacks", "plan", "ready")

    def __init__(self, plan: StepPlan, lacks: set[int]) -> None:
        self.plan = plan
        self.lacks = lacks
        self.ready: Step | None = None


class WindowPrefetcher:
    """Prepares the steps of one rank ahead of the trainer; see `Prefetcher`.

    One lock guards the window. Threads take, in this order: a step whose blocks are all near, to be cut into samples;
    the next block in order of need, if memory allows; the planning of steps further ahead. All waiting is on
    conditions of that lock, so that closing wakes everybody at once.
    """

    def __init__(
        self,
        planner: StepPlanner,
        assembler: Assembler,
        cache: Cache,
        *,
        config: PrefetchConfig,
        cap_bytes: int,
        block_bytes: Callable[[int], int],
        block_samples: int,
        recorder: Recorder,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._planner = planner
        self._assembler = assembler
        self._cache = cache
        self._timeout_s = config.timeout_s
        self._cap_bytes = cap_bytes
        self._block_bytes = block_bytes
        self._recorder = recorder
        self._clock = clock
        self._controller = DepthController(config.depth)
        lock = threading.Lock()
        self._lock = lock
        self._work = threading.Condition(lock)
        self._ready = threading.Condition(lock)
        self._held = HeldBlocks(block_samples)
        self._plans: deque[StepPlan] = deque()
        self._num_announced = 0
        self._planning = False
        self._window: deque[_Pending] = deque()
        self._buildable: deque[_Pending] = deque()
        self._wanted: deque[int] = deque()
        self._fetching: dict[int, str] = {}
        self._reserved_bytes = 0
        self._epoch = -1
        self._failed_blocks: dict[int, Exception] = {}
        self._failure: Exception | None = None
        self._closed = False
        self._full_since: float | None = None
        self._asked_at = clock()
        self._threads = [
            threading.Thread(target=self._run, name=f"dalipipe-fetch-{i}", daemon=True) for i in range(config.threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def depth(self) -> int:
        """Steps that are prepared or under way just now."""
        return self._controller.depth

    def next(self) -> Step:
        """Returns the next step; see `Prefetcher.next`.

        Raises:
            PipelineError: a block of this step could not be had, or a thread died; the reason is the cause.
            PipelineTimeoutError: the step did not arrive within `prefetch.timeout_s`; names what is missing.
            ClosedError: `close` was called, also while waiting.
        """
        asked_at = self._clock()
        with self._lock:
            while True:
                step = self._take()
                if step is not None:
                    break
                now = self._clock()
                left_s = self._timeout_s - (now - asked_at)
                if left_s <= 0:
                    raise PipelineTimeoutError(self._describe_lack())
                lacks = self._lacks()
                self._ready.wait(left_s)
                self._recorder.add(f"wait_s.{lacks}", self._clock() - now)
            now = self._clock()
            self._controller.delivered(now - asked_at, now - self._asked_at)
            self._asked_at = now
            if self._full_since is not None:
                # The window was full of ready steps: the downstream side is the slow one.
                self._recorder.add("wait_s.consumer", now - self._full_since)
                self._full_since = None
            self._work.notify_all()
            return step

    def close(self) -> None:
        """Ends and joins all threads within 2 s and lets all blocks go. Idempotent.

        A thread that hangs in the store is left behind as a daemon, and said so. Steps handed out stay readable.
        """
        with self._lock:
            self._closed = True
            self._held.clear()
            self._window.clear()
            self._plans.clear()
            self._wanted.clear()
            self._buildable.clear()
            self._work.notify_all()
            self._ready.notify_all()
        deadline = time.monotonic() + _JOIN_S
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        hung = [thread.name for thread in self._threads if thread.is_alive()]
        self._threads = []
        if hung:
            _log.warning(
                "%s still wait for blocks %s from the store and were left behind; lower storage.request_timeout_s",
                ", ".join(hung),
                sorted(self._fetching)[:8],
            )

    def _take(self) -> Step | None:
        if self._closed:
            raise ClosedError("the next step was asked of a closed prefetcher")
        if self._failure is not None:
            raise PipelineError(f"a prefetch thread died: {self._failure}") from self._failure
        if not self._window:
            return None
        head = self._window[0]
        if head.ready is not None:
            self._window.popleft()
            return head.ready
        for block in head.lacks:
            error = self._failed_blocks.get(block)
            if error is not None:
                raise PipelineError(
                    f"epoch {head.plan.order.epoch} step {head.plan.step} needs block {block}, which could not be "
                    f"had: {error}"
                ) from error
        return None

    def _lacks(self) -> str:
        """What the head of the window lacks just now: where the wait that begins is charged to."""
        if not self._window:
            return "plan"
        lacks = self._window[0].lacks
        if not lacks:
            return "index"
        under_way = {self._fetching[block] for block in lacks if block in self._fetching}
        return "node" if under_way == {"node"} else "lake"

    def _describe_lack(self) -> str:
        begun = f"waited {self._timeout_s:g} s (prefetch.timeout_s) for the next step"
        if not self._window:
            return f"{begun}: no step is planned yet"
        head = self._window[0]
        where = f"epoch {head.plan.order.epoch} step {head.plan.step}"
        if not head.lacks:
            return f"{begun}: {where} has all its blocks and waits for their indices"
        missing = sorted(head.lacks)
        under_way = sorted(head.lacks & self._fetching.keys())
        return (
            f"{begun}: {where} lacks {len(missing)} blocks {missing[:8]}, of which {under_way[:8]} are under way; "
            "check the store, or raise prefetch.timeout_s"
        )

    def _run(self) -> None:
        try:
            while True:
                with self._lock:
                    task = self._pick()
                    while task is None and not self._closed:
                        self._work.wait()
                        task = self._pick()
                    if self._closed or task is None:
                        return
                task()
        except Exception as error:  # noqa: BLE001 - whatever ended the thread is raised by `next`
            with self._lock:
                self._failure = error
                self._ready.notify_all()

    def _pick(self) -> _Task | None:
        if self._closed:
            return None
        self._admit()
        if self._buildable:
            pending = self._buildable.popleft()
            views = {block: self._held.view(block) for block in pending.plan.blocks}
            return lambda: self._build(pending, views)
        short = len(self._window) < self._controller.depth
        if not self._planning and short and not self._plans:
            self._planning = True
            return self._plan
        if self._wanted:
            # A block of the head is fetched whatever the cap says: one step always fits.
            block = self._wanted[0]
            if block in self._window[0].lacks or self._fits(0):
                self._wanted.popleft()
                self._fetching[block] = "lake"
                return lambda: self._fetch(block)
        if not self._planning and len(self._plans) < _LOOKAHEAD_STEPS:
            self._planning = True
            return self._plan
        return None

    def _admit(self) -> None:
        while len(self._window) < self._controller.depth and self._plans and self._has_views():
            plan = self._plans.popleft()
            if plan.order.epoch != self._epoch:
                self._held.end_epoch()
                self._epoch = plan.order.epoch
            self._held.use(plan.blocks)
            lacks = {block for block in plan.blocks if block not in self._held}
            known = self._fetching.keys() | set(self._wanted)
            self._wanted.extend(block for block in plan.blocks if block in lacks and block not in known)
            pending = _Pending(plan, lacks)
            self._window.append(pending)
            if not lacks:
                self._buildable.append(pending)
            self._work.notify()

    def _has_views(self) -> bool:
        num_views = len(self._held) + len(self._wanted) + len(self._fetching)
        return num_views < MAX_VIEWS or len(self._window) < MIN_DEPTH

    def _plan(self) -> None:
        plans = self._planner.next_window()
        with self._lock:
            self._planning = False
            if self._closed:
                return
            for plan in plans:
                self._held.announce(self._num_announced, plan.blocks)
                self._num_announced += 1
            self._plans.extend(plans)
            self._work.notify_all()

    def _fetch(self, block: int) -> None:
        reserved_bytes = 0
        view: BlockView | None = None
        error: Exception | None = None
        try:
            if self._cache.contains(block):
                self._fetching[block] = "node"
            reserved_bytes = self._reserve(block)
            view = self._cache.get(block)
        except Exception as caught:  # noqa: BLE001 - raised by `next` for the step that needs the block
            error = caught
        with self._lock:
            self._reserved_bytes -= reserved_bytes
            self._fetching.pop(block, None)
            if error is not None:
                self._failed_blocks[block] = error
                self._ready.notify_all()
            elif view is not None:
                self._arrived(block, view)

    def _reserve(self, block: int) -> int:
        num_bytes = self._block_bytes(block)
        with self._lock:
            while not self._closed and not self._fits(num_bytes) and not self._is_urgent(block):
                self._work.wait()
            self._reserved_bytes += num_bytes
        return num_bytes

    def _fits(self, num_bytes: int) -> bool:
        return self._held.make_room(num_bytes + self._reserved_bytes, self._cap_bytes)

    def _is_urgent(self, block: int) -> bool:
        return bool(self._window) and block in self._window[0].lacks

    def _arrived(self, block: int, view: BlockView) -> None:
        if self._closed:
            view.release()
            return
        self._held.put(block, view)
        for pending in self._window:
            if block in pending.lacks:
                pending.lacks.discard(block)
                if not pending.lacks:
                    self._buildable.append(pending)
        self._work.notify_all()

    def _build(self, pending: _Pending, views: dict[int, BlockView]) -> None:
        try:
            step = self._assembler.build(pending.plan, views, self._release_once(list(pending.plan.blocks)))
        except ClosedError:
            # `close` let the views go while they were cut.
            return
        with self._lock:
            pending.ready = step
            self._ready.notify_all()
            if len(self._window) >= self._controller.depth and all(entry.ready for entry in self._window):
                self._full_since = self._clock()

    def _release_once(self, blocks: list[int]) -> Callable[[], None]:
        def release() -> None:
            with self._lock:
                if blocks and not self._closed:
                    self._held.leave(blocks)
                    self._work.notify_all()
                blocks.clear()

        return release


def open_prefetcher(
    *,
    orders: Callable[[int], Order],
    start: tuple[int, int],
    slots: npt.NDArray[np.int64],
    manifest: Manifest,
    cache: Cache,
    fields: Sequence[str],
    config: PrefetchConfig,
    recorder: Recorder,
) -> WindowPrefetcher:
    """Starts to prefetch the steps of one rank from `start` = (epoch, step) on, over epochs without end.

    Args:
        orders: gives the order of an epoch.
        slots: int64 [b]: the columns of the global batch that this rank loads.
        fields: the fields of a sample that go into `Step.fields`.

    Raises:
        ConfigError: a value of `config` can never work, or the data set has no such field.
    """
    if config.threads < 1:
        raise ConfigError(f"prefetch.threads={config.threads} must be at least 1")
    if not config.timeout_s > 0:
        raise ConfigError(f"prefetch.timeout_s={config.timeout_s} must be above 0")
    known = [field.name for field in manifest.fields]
    unknown = [name for name in fields if name not in known]
    if unknown:
        raise ConfigError(f"data.fields names {unknown}, which this data set lacks; it has {', '.join(known)}")
    return WindowPrefetcher(
        StepPlanner(orders, start, slots, manifest.block_samples),
        Assembler(manifest, cache, fields, recorder),
        cache,
        config=config,
        cap_bytes=_cap_bytes(config, manifest),
        block_bytes=manifest.block_bytes,
        block_samples=manifest.block_samples,
        recorder=recorder,
    )


def _cap_bytes(config: PrefetchConfig, manifest: Manifest) -> int:
    host_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    cap_bytes = parse_capacity(config.memory_cap, host_bytes, "prefetch.memory_cap")
    mean_bytes = -(-manifest.num_bytes // manifest.num_blocks)
    if cap_bytes < mean_bytes:
        raise ConfigError(
            f"prefetch.memory_cap={config.memory_cap!r} ({format_bytes(cap_bytes)}) does not hold one block of this "
            f"data set, {format_bytes(mean_bytes)} on average; give at least {mean_bytes} bytes"
        )
    return cap_bytes
