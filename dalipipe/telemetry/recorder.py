"""Counters, spans, histograms and gauges that cost a dictionary update.

A counter bump from several threads must neither lose counts nor take a lock, so each thread adds into a dictionary of
its own and a reader sums them. Readers (stats, exporters) may be slow; writers may not.
"""

from __future__ import annotations

import contextlib
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum

from dalipipe.telemetry.causes import Causes

# Upper bounds of latency histograms in seconds; one more bucket holds what is slower.
LATENCY_BOUNDS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Stage(str, Enum):
    """The stages that wall time is charged to; `stage_s` in `loader.stats()` has these keys."""

    LAKE = "lake"  # bytes from the store
    NODE = "node"  # bytes from the node's cache, page faults included
    INDEX = "index"  # shard indices: where samples lie in a block
    DECODE = "decode"  # encoded bytes to pixels
    RESIZE = "resize"  # crop and resize, where it is apart from decode
    NORMALIZE = "normalize"  # flip, layout and dtype
    SALVAGE = "salvage"  # looking for the bad sample of a failed batch
    HANDOVER = "handover"  # from the graph's output to tensors of the caller


# What the trainer lacks while the thread that it waits for is in a stage: the row of the ledger.
_CAUSE_OF = {stage: stage.value for stage in Stage} | dict.fromkeys(
    (Stage.RESIZE, Stage.NORMALIZE, Stage.SALVAGE), "decode"
)


class Recorder:
    """Cumulative counters of one process, by dotted name such as `bytes_read.lake` or `stage_s.decode`.

    `ranges`, where it is set, opens and closes a range by name around each span (NVTX on a GPU host).
    """

    def __init__(self) -> None:
        self._cells: list[dict[str, float]] = []
        self._histograms: list[dict[str, list[float]]] = []
        self._gauges: dict[str, Callable[[], float]] = {}
        self._lock = threading.Lock()
        self._local = threading.local()
        self.ranges: tuple[Callable[[str], object], Callable[[], object]] | None = None

    def add(self, name: str, amount: float = 1) -> None:
        """Adds to a counter (about 0.1 µs; safe from any thread)."""
        try:
            cell = self._local.cell
        except AttributeError:
            cell = self._new_cell()
        cell[name] = cell.get(name, 0) + amount

    def observe(self, name: str, seconds: float) -> None:
        """Puts one latency into the histogram `name` (bounds: `LATENCY_BOUNDS_S`; safe from any thread)."""
        try:
            histograms = self._local.histograms
        except AttributeError:
            self._new_cell()
            histograms = self._local.histograms
        counts = histograms.get(name)
        if counts is None:
            counts = histograms[name] = [0.0] * (len(LATENCY_BOUNDS_S) + 2)
        counts[bisect_left(LATENCY_BOUNDS_S, seconds)] += 1
        counts[-1] += seconds

    def gauge(self, name: str, read: Callable[[], float]) -> None:
        """`read` is called by whoever wants the present value of `name`; the last one registered answers."""
        with self._lock:
            self._gauges[name] = read

    @contextmanager
    def span(self, stage: Stage) -> Iterator[None]:
        """Adds the wall seconds of the block to `stage_s.<stage>` of the calling thread.

        On a thread that the trainer waits for (`follow`) the block is also what the trainer lacks meanwhile.
        """
        causes: Causes | None = getattr(self._local, "causes", None)
        before = causes.enter(_CAUSE_OF[stage]) if causes is not None else ""
        ranges = self.ranges
        if ranges is not None:
            ranges[0](f"dalipipe.{stage.value}")
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(f"stage_s.{stage.value}", time.perf_counter() - start)
            if ranges is not None:
                ranges[1]()
            if causes is not None:
                causes.enter(before)

    def follow(self, causes: Causes) -> None:
        """From now on the calling thread writes down in `causes` what it is busy with."""
        self._local.causes = causes

    @contextmanager
    def lacking(self, cause: str) -> Iterator[None]:
        """The block is a wait for `cause`, where somebody follows the calling thread; else nothing."""
        causes: Causes | None = getattr(self._local, "causes", None)
        if causes is None:
            yield
            return
        before = causes.enter(cause)
        try:
            yield
        finally:
            causes.enter(before)

    def lacked(self, cause: str, since_s: float) -> None:
        """The calling thread, where somebody follows it, has just waited for `cause` since `since_s`, the time at
        which it last said anything or later (`time.perf_counter`). For waits whose cause is known at their end."""
        causes: Causes | None = getattr(self._local, "causes", None)
        if causes is not None:
            causes.fill(cause, since_s)

    def snapshot(self) -> dict[str, float]:
        """The sum over all threads, ended ones included."""
        total: dict[str, float] = {}
        with self._lock:
            cells = list(self._cells)
        for cell in cells:
            for name, value in list(cell.items()):
                total[name] = total.get(name, 0) + value
        return total

    def total(self, name: str) -> float:
        """The sum of one counter over all threads."""
        with self._lock:
            return sum(cell.get(name, 0.0) for cell in self._cells)

    def histograms(self) -> dict[str, list[float]]:
        """By name: counts per bucket of `LATENCY_BOUNDS_S`, the count above the last bound, the sum in seconds."""
        total: dict[str, list[float]] = {}
        with self._lock:
            parts = list(self._histograms)
        for part in parts:
            for name, counts in list(part.items()):
                known = total.setdefault(name, [0.0] * len(counts))
                for place, count in enumerate(list(counts)):
                    known[place] += count
        return total

    def gauges(self) -> dict[str, float]:
        """The present value of each gauge; one whose owner is gone is left out."""
        with self._lock:
            gauges = dict(self._gauges)
        values = {}
        for name, read in gauges.items():
            with contextlib.suppress(Exception):  # a figure that cannot be read must not end a scrape
                values[name] = float(read())
        return values

    def _new_cell(self) -> dict[str, float]:
        cell: dict[str, float] = {}
        histograms: dict[str, list[float]] = {}
        with self._lock:
            self._cells.append(cell)
            self._histograms.append(histograms)
        self._local.cell = cell
        self._local.histograms = histograms
        return cell
