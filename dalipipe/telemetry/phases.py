"""The trainer's own marks: `with step("forward"): …`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from dalipipe.errors import ConfigError

# Rows of the ledger that are the loader's: a mark of such a name would count twice.
WAITS = ("start", "lake", "pool", "node", "memory", "index", "plan", "decode", "handover")
_RESERVED = frozenset((*WAITS, "other"))
_MAX_PHASES = 32
_UNCHARGED = "(loader)"

_ranges: tuple[Callable[[str], object], Callable[[], object]] | None = None


class _Clock(threading.local):
    """Seconds by phase of one thread. Marks nest: each second goes to the innermost one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.stack: list[str] = []
        self.since_s = 0.0

    def push(self, name: str) -> float:
        now_s = time.perf_counter()
        if self.stack:
            outer = self.stack[-1]
            self.seconds[outer] = self.seconds.get(outer, 0.0) + now_s - self.since_s
        self.stack.append(name)
        self.since_s = now_s
        return now_s

    def pop(self) -> float:
        now_s = time.perf_counter()
        name = self.stack.pop()
        self.seconds[name] = self.seconds.get(name, 0.0) + now_s - self.since_s
        self.since_s = now_s
        return now_s


_clock = _Clock()


class step:  # noqa: N801 - a context manager used like a function
    """Charges the block to the row `name` of the step that the calling thread trains: forward, backward, collective,
    optimiser or a word of your own. Marks may nest; each second goes to the innermost one.

    Raises:
        ConfigError: the name is one of the loader's rows, or the 33rd different one.
    """

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        _check(name)
        self._name = name

    def __enter__(self) -> None:
        if _ranges is not None:
            _ranges[0](self._name)
        _clock.push(self._name)

    def __exit__(self, *error: object) -> None:
        _clock.pop()
        if _ranges is not None:
            _ranges[1]()


def enter_loader() -> float:
    """The calling thread is in the loader from now on, whatever mark it is in. Returns the time."""
    return _clock.push(_UNCHARGED)


def leave_loader() -> float:
    """Ends `enter_loader`. Returns the time."""
    return _clock.pop()


def phase_seconds() -> dict[str, float]:
    """Cumulative seconds by phase of the calling thread, open marks up to the last change included."""
    return {name: seconds for name, seconds in _clock.seconds.items() if name != _UNCHARGED}


def set_ranges(push: Callable[[str], object], pop: Callable[[], object]) -> None:
    """Opens and closes a range of a profiler around each mark (NVTX, so that Nsight Systems shows them)."""
    global _ranges  # noqa: PLW0603 - marks have no owner: they are where the trainer writes them
    _ranges = (push, pop)


def _check(name: str) -> None:
    if not name.isidentifier() or name in _RESERVED:
        raise ConfigError(
            f"step({name!r}): a mark is a word such as forward, backward, collective or optimiser, and none of the "
            f"loader's rows: {', '.join(sorted(_RESERVED))}"
        )
    if name not in _clock.seconds:
        if len(_clock.seconds) > _MAX_PHASES:
            raise ConfigError(f"step({name!r}): more than {_MAX_PHASES} different marks; each is a row of every step")
        _clock.seconds[name] = 0.0
