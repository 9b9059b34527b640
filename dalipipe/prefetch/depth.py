"""How many steps are prepared ahead."""

from __future__ import annotations

import math

from dalipipe.errors import ConfigError

MIN_DEPTH = 2
MAX_DEPTH = 256
_MAX_AUTO_DEPTH = 64
_START = 3
_GROWTH = 1.5
_QUIET_STEPS = 100
_STALL_SHARE = 0.02


class DepthController:
    """Follows the stalls: grows by half when the trainer had to wait, shrinks slowly after 100 steps without.

    The window is a credit limit of a closed loop, so a deeper one adds no load in the steady state; growing is safe and
    reaches a sufficient depth within a logarithmic number of stalls, and each decrease is paid with 100 quiet steps,
    so that the two cannot swing. Stalls among the steps that were under way when the depth grew do not count: the
    growth cannot have helped them yet.

    Args:
        depth: `auto`, or a fixed number of steps from 1 to 256.

    Raises:
        ConfigError: the depth is neither.
    """

    def __init__(self, depth: int | str = "auto") -> None:
        self._adapts = depth == "auto"
        self._quiet = 0
        self._unaffected = 0
        if self._adapts:
            self._depth = _START
            return
        try:
            self._depth = int(depth)
        except ValueError:
            self._depth = 0
        if not 1 <= self._depth <= MAX_DEPTH:
            raise ConfigError(f"prefetch.depth={depth!r} must be auto or a number of steps from 1 to {MAX_DEPTH}")

    @property
    def depth(self) -> int:
        """Steps to keep prepared or under way."""
        return self._depth

    def delivered(self, waited_s: float, interval_s: float) -> None:
        """Takes one delivered step into account.

        Args:
            waited_s: how long the trainer waited for it.
            interval_s: time since it asked for the step before; a wait below 2 % of it is no stall.
        """
        if not self._adapts:
            return
        self._unaffected = max(0, self._unaffected - 1)
        if waited_s > _STALL_SHARE * interval_s:
            self._quiet = 0
            if not self._unaffected:
                self._unaffected = self._depth
                self._depth = min(_MAX_AUTO_DEPTH, math.ceil(self._depth * _GROWTH))
            return
        self._quiet += 1
        if self._quiet >= _QUIET_STEPS:
            self._depth = max(MIN_DEPTH, self._depth - max(1, (self._depth - MIN_DEPTH) // 4))
            self._quiet = 0
