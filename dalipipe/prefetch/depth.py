"""How many steps are prepared ahead."""

from __future__ import annotations

import math

from dalipipe.errors import ConfigError
from dalipipe.storage.latency import LatencyHistogram

MIN_DEPTH = 2
MAX_DEPTH = 256
_START = 3
_GROWTH = 1.5
_QUIET_STEPS = 100
_STALL_SHARE = 0.02
_MISS_SHARE = 0.01
_MIN_OBSERVED = 20
_INTERVAL_DECAY = 0.05


class DepthController:
    """Feed-forward from what is known, feedback from stalls.

    The floor of the window is the longer of two leads. Blocks are needed in lumps (`period` steps after all lanes open
    a block they all open the next), so a period and two steps keep the demand on the lake constant. And a fetch that
    takes as long as all but 1 % of the steps can expect must be begun that many steps before: the quantile
    1 - 0.01/m of the recent fetch latencies (m fetches a step) over the step time, plus one.

    Above it, the window grows by half when the trainer had to wait, and shrinks by a quarter of its excess after 100
    steps without. The window is a credit limit of a closed loop, so a deeper one adds no load in the steady state;
    growing is safe and reaches a sufficient depth within a logarithmic number of stalls, and each decrease is paid with
    100 quiet steps, so that the two cannot swing. Stalls among the steps that were under way when the depth grew do not
    count: the growth cannot have helped them yet.

    Args:
        depth: `auto`, or a fixed number of steps from 1 to 256.

    Raises:
        ConfigError: the depth is neither.
    """

    def __init__(self, depth: int | str = "auto") -> None:
        self._adapts = depth == "auto"
        self._quiet = 0
        self._unaffected = 0
        self._period = 0
        self._delivered = 0
        self._interval_s = 0.0
        self._latency = LatencyHistogram()
        self._fetches_per_step = 1.0
        self._fetches = 0
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

    def expect(self, period: int) -> None:
        """The blocks that a step touches last for `period` steps."""
        self._period = period
        if self._adapts:
            self._depth = max(self._depth, self._floor())

    def fetched(self, latency_s: float) -> None:
        """A block came from the lake after `latency_s`."""
        self._latency.add(latency_s)
        self._fetches += 1

    def delivered(self, waited_s: float, interval_s: float) -> None:
        """Takes one delivered step into account.

        Args:
            waited_s: how long the trainer waited for it.
            interval_s: time since it asked for the step before; a wait below 2 % of it is no stall.
        """
        if not self._adapts:
            return
        self._learn(interval_s)
        floor = self._floor()
        self._depth = max(self._depth, floor)
        self._unaffected = max(0, self._unaffected - 1)
        if waited_s > _STALL_SHARE * interval_s:
            self._quiet = 0
            if not self._unaffected:
                self._unaffected = self._depth
                self._depth = min(MAX_DEPTH, math.ceil(self._depth * _GROWTH))
            return
        self._quiet += 1
        if self._quiet >= _QUIET_STEPS:
            self._depth = max(floor, self._depth - max(1, (self._depth - floor) // 4))
            self._quiet = 0

    def _learn(self, interval_s: float) -> None:
        """Follows the step time, and how many blocks a step brings."""
        self._delivered += 1
        if self._delivered > 1:  # the first interval is the start-up
            decay = max(1 / (self._delivered - 1), _INTERVAL_DECAY)
            self._interval_s += decay * (interval_s - self._interval_s)
        self._fetches_per_step += _INTERVAL_DECAY * (self._fetches - self._fetches_per_step)
        self._fetches = 0

    def _floor(self) -> int:
        lead = 0
        # The first steps go at once into the queues behind and tell nothing about the step time.
        if self._latency.num_observed >= _MIN_OBSERVED and self._delivered >= _MIN_OBSERVED and self._interval_s > 0:
            tail_s = self._latency.quantile_s(1 - _MISS_SHARE / max(1.0, self._fetches_per_step))
            lead = math.ceil(min(MAX_DEPTH, tail_s / self._interval_s))
        return min(MAX_DEPTH, max(MIN_DEPTH, self._period + 2 if self._period > 1 else 0, lead + 1))
