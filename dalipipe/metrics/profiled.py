"""The trainer's phases without marks: torch.profiler looks at a few steps now and then."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

_WARM_STEPS = 5
_PROFILED_STEPS = 3
_COLLECTIVE = ("nccl:", "gloo:", "c10d::", "mpi:", "ucc:")


class ProfiledPhases:
    """Shares of a step's unmarked time by phase, from the steps that were last looked at.

    Steps 5 to 7 are profiled, then three in every `every`: outside of them it costs nothing. Collectives are those of
    torch.distributed, the optimiser is `Optimizer.step`, the backward pass is what autograd runs, every other operator
    is the forward pass; what no operator covers stays `other`.
    """

    def __init__(self, *, every: int) -> None:
        self._every = every
        self._step = 0
        self._profiler: Any = None
        self._shares: dict[str, float] | None = None

    def boundary(self) -> Mapping[str, float] | None:
        """Called between two steps, on the thread that trains; the shares for the step that just ended."""
        place = self._step % self._every
        self._step += 1
        if place == _WARM_STEPS:
            self._start()
        elif place == _WARM_STEPS + _PROFILED_STEPS and self._profiler is not None:
            self._stop()
        return self._shares

    def close(self) -> None:
        """Ends a look that is under way. Idempotent."""
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.__exit__(None, None, None)

    def _start(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        self._profiler = profile(activities=[ProfilerActivity.CPU])
        self._profiler.__enter__()

    def _stop(self) -> None:
        profiler, self._profiler = self._profiler, None
        profiler.__exit__(None, None, None)
        events = [(e.name, e.thread, e.time_range.start, e.time_range.end) for e in profiler.events()]
        self._shares = phase_shares(events)


def phase_shares(events: Iterable[tuple[str, int, float, float]]) -> dict[str, float]:
    """Shares of the time from the first to the last event by phase; an instant belongs to one phase only.

    Args:
        events: (name, thread, start, stop) of operators, in any one unit of time.
    """
    marks: list[tuple[float, int, str]] = []
    first, last = float("inf"), float("-inf")
    for name, _, start, stop in events:
        if stop <= start:
            continue
        first, last = min(first, start), max(last, stop)
        phase = _phase_of(name)
        marks += [(start, 1, phase), (stop, -1, phase)]
    seconds = dict.fromkeys(("collective", "optimiser", "backward", "forward"), 0.0)
    running = dict.fromkeys(seconds, 0)
    at = first
    for when, change, phase in sorted(marks):
        # What is rarer wins: an optimiser's step consists of operators that would be called forward.
        owner = next((name for name in seconds if running[name]), None)
        if owner is not None:
            seconds[owner] += when - at
        running[phase] += change
        at = when
    whole = last - first
    return {name: value / whole for name, value in seconds.items() if value > 0} if whole > 0 else {}


def _phase_of(name: str) -> str:
    if name.startswith(_COLLECTIVE):
        return "collective"
    if name.startswith("Optimizer.step"):
        return "optimiser"
    if name.startswith("autograd::engine") or name.endswith(("Backward0", "Backward1")):
        return "backward"
    return "forward"
