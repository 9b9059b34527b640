"""The ledger of steps: where each second between two requests for a batch went."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dalipipe.telemetry.phases import enter_loader, leave_loader, phase_seconds

OTHER = "other"
# A writer that stalls for so many steps loses detail, never totals.
_REMEMBERED = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One step of one rank, from the request for its batch to the request for the next. `rows` sum to `wall_s`.

    waits: seconds in the loader by what was lacking; phases: by the trainer's marks, and `other`, what was not marked.
    began_at: seconds since 1970; lake_bytes: read from the lake in this process meanwhile.
    """

    number: int
    epoch: int
    step: int
    samples: int
    began_at: float
    wall_s: float
    waits: dict[str, float]
    phases: dict[str, float]
    lake_bytes: int

    @property
    def rows(self) -> dict[str, float]:
        """Waits and phases together."""
        return {**self.waits, **self.phases}


@dataclass(slots=True, kw_only=True)
class _Open:
    epoch: int
    step: int
    samples: int
    asked_s: float
    began_at: float
    waits: dict[str, float]
    phases_before: dict[str, float]
    lake_bytes: float


class StepBook:
    """The steps of one loader. The thread that trains writes; others read totals and take rows.

    Args:
        lake_bytes: cumulative bytes from the lake, read once a step.
    """

    def __init__(self, lake_bytes: Callable[[], float] = lambda: 0.0) -> None:
        self._lake_bytes = lake_bytes
        self._lock = threading.Lock()
        self._open: _Open | None = None
        self._rows: deque[StepRow] = deque(maxlen=_REMEMBERED)
        self._totals: dict[str, float] = {}
        self._wall_s = 0.0
        self._number = 0
        self._asked = (0.0, 0.0, 0.0)
        self.on_boundary: Callable[[], Mapping[str, float] | None] | None = None
        """Called between two steps; what it returns are shares by which unmarked time of the step is split."""

    def ask(self) -> float:
        """The trainer asks for a batch: the step before ends. Returns the time. `got` or `gave_up` must follow."""
        asked_s = enter_loader()
        self._close(asked_s)
        # Counted from here, so that what comes while the trainer waits for the batch is in the batch's own row.
        self._asked = (asked_s, time.time(), self._lake_bytes())
        return asked_s

    def got(self, *, epoch: int, step: int, samples: int, waits: Mapping[str, float]) -> None:
        """The batch is handed out; `waits` charge the time since `ask`, what they leave is the hand-over."""
        phases = phase_seconds()
        got_s = leave_loader()
        asked_s, began_at, lake_bytes = self._asked
        charged = {cause: seconds for cause, seconds in waits.items() if seconds > 0}
        rest_s = got_s - asked_s - sum(charged.values())
        charged["handover"] = charged.get("handover", 0.0) + max(0.0, rest_s)
        self._open = _Open(
            epoch=epoch,
            step=step,
            samples=samples,
            asked_s=asked_s,
            began_at=began_at,
            waits=charged,
            phases_before=phases,
            lake_bytes=lake_bytes,
        )

    def gave_up(self) -> None:
        """No batch came (the end, an error)."""
        leave_loader()

    def leave(self) -> None:
        """The trainer leaves the loop: the open step ends here, what follows belongs to no step."""
        now_s = enter_loader()
        self._close(now_s)
        leave_loader()

    def totals(self) -> tuple[dict[str, float], float, int]:
        """Seconds by row, seconds of all steps, number of steps; steps that are done only."""
        with self._lock:
            return dict(self._totals), self._wall_s, self._number

    def after(self, number: int) -> list[StepRow]:
        """The remembered rows with a number of at least `number`, oldest first."""
        with self._lock:
            return [row for row in self._rows if row.number >= number]

    def _close(self, now_s: float) -> None:
        step, self._open = self._open, None
        if step is None:
            return
        after, before = phase_seconds(), step.phases_before
        phases = {name: seconds - before.get(name, 0.0) for name, seconds in after.items()}
        phases = {name: seconds for name, seconds in phases.items() if seconds > 0}
        wall_s = now_s - step.asked_s
        unmarked_s = max(0.0, wall_s - sum(step.waits.values()) - sum(phases.values()))
        shares = self.on_boundary() if self.on_boundary is not None else None
        if shares:
            for name, share in shares.items():
                phases[name] = phases.get(name, 0.0) + share * unmarked_s
            unmarked_s *= max(0.0, 1.0 - sum(shares.values()))
        phases[OTHER] = unmarked_s
        with self._lock:
            row = StepRow(
                number=self._number,
                epoch=step.epoch,
                step=step.step,
                samples=step.samples,
                began_at=step.began_at,
                wall_s=wall_s,
                waits=step.waits,
                phases=phases,
                lake_bytes=int(self._lake_bytes() - step.lake_bytes),
            )
            self._number += 1
            self._rows.append(row)
            self._wall_s += wall_s
            for name, seconds in row.rows.items():
                self._totals[name] = self._totals.get(name, 0.0) + seconds
