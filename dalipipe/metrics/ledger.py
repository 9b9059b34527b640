"""Where the wall time of training steps went.

Every second between `start` and `stop` is in exactly one row: the waits that the loader charged to the lake or to
decoding, the phases that the trainer marked, and what is left (`other`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from dalipipe.telemetry import step


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerReport:
    """Seconds by row; the rows sum to `wall_s`."""

    wall_s: float
    rows: dict[str, float]
    steps: int
    samples: int

    @property
    def samples_per_s(self) -> float:
        """Delivered samples per second of wall time."""
        return self.samples / self.wall_s if self.wall_s > 0 else 0.0


class StepLedger:
    """Splits wall time into waits and marked phases. `stats` is `loader.stats`, read at start and stop only."""

    def __init__(
        self, stats: Callable[[], Mapping[str, Any]] | None = None, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._stats = stats
        self._clock = clock
        self._phases: dict[str, float] = {}
        self._steps = self._samples = 0
        self._before: Mapping[str, Any] = {}
        self._started_at = 0.0

    def start(self) -> None:
        """Starts the clock and forgets what came before."""
        self._phases, self._steps, self._samples = {}, 0, 0
        self._before = self._stats() if self._stats else {}
        self._started_at = self._clock()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Charges the block to the row `name` (forward, backward, optimiser …). Phases must not nest."""
        begin = self._clock()
        try:
            with step(name):  # the loader's own ledger sees it too
                yield
        finally:
            self._phases[name] = self._phases.get(name, 0.0) + self._clock() - begin

    def step_done(self, samples: int) -> None:
        """Counts one step of `samples` samples."""
        self._steps += 1
        self._samples += samples

    def stop(self) -> LedgerReport:
        """Reads the clock and closes the books."""
        wall_s = self._clock() - self._started_at
        rows: dict[str, float] = {}
        if self._stats:
            after, before = self._stats(), self._before
            for cause, seconds in after["wait_by_s"].items():
                rows[f"wait: {cause}"] = seconds - before["wait_by_s"].get(cause, 0.0)
        rows |= self._phases
        rows["other"] = wall_s - sum(rows.values())
        return LedgerReport(wall_s=wall_s, rows=rows, steps=self._steps, samples=self._samples)
