"""Counters and spans that cost a dictionary update.

A counter bump from several threads must neither lose counts nor take a lock, so each thread adds into a dictionary of
its own and a reader sums them. Readers (stats, exporters) may be slow; writers may not.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum


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


class Recorder:
    """Cumulative counters of one process, by dotted name such as `bytes_read.lake` or `stage_s.decode`."""

    def __init__(self) -> None:
        self._cells: list[dict[str, float]] = []
        self._lock = threading.Lock()
        self._local = threading.local()

    def add(self, name: str, amount: float = 1) -> None:
        """Adds to a counter (about 0.1 µs; safe from any thread)."""
        try:
            cell = self._local.cell
        except AttributeError:
            cell = self._new_cell()
        cell[name] = cell.get(name, 0) + amount

    @contextmanager
    def span(self, stage: Stage) -> Iterator[None]:
        """Adds the wall seconds of the block to `stage_s.<stage>` of the calling thread."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(f"stage_s.{stage.value}", time.perf_counter() - start)

    def snapshot(self) -> dict[str, float]:
        """The sum over all threads, ended ones included."""
        total: dict[str, float] = {}
        with self._lock:
            cells = list(self._cells)
        for cell in cells:
            for name, value in list(cell.items()):
                total[name] = total.get(name, 0) + value
        return total

    def _new_cell(self) -> dict[str, float]:
        cell: dict[str, float] = {}
        with self._lock:
            self._cells.append(cell)
        self._local.cell = cell
        return cell
