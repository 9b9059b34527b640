"""A link of a fixed rate, shared evenly by all who want something carried."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

_TICK_S = 0.02
_IDLE_S = 0.005
_LEAST_S = 0.001


@dataclass(slots=True, kw_only=True, eq=False)
class _Flow:
    left_bytes: int
    send: Callable[[int], int]
    done: asyncio.Future[None]


class Link:
    """Carries bytes for the tasks of one event loop; max-min fair, as one queue a connection would make it.

    A timer wakes up every 20 ms, or earlier where the smallest flow must be through by then, and sends what the link
    has carried since. So what the link costs the machine does not grow with the number of connections, and a small
    answer does not wait for large ones to end.
    """

    def __init__(self) -> None:
        self._flows: list[_Flow] = []
        self._timer: asyncio.TimerHandle | None = None
        self._carried_until_s = 0.0

    async def carry(self, num_bytes: int, rate: float, send: Callable[[int], int] = lambda wanted: wanted) -> None:
        """Returns when `num_bytes` went over a link of `rate` bytes a second.

        Args:
            send: is told how many bytes may go now, and returns how many did; what it raises is raised here.
        """
        if num_bytes <= 0:
            return
        loop = asyncio.get_running_loop()
        flow = _Flow(left_bytes=num_bytes, send=send, done=loop.create_future())
        if not self._flows:
            # Somebody who asks for one piece after the other does not leave the link idle in between.
            self._carried_until_s = max(self._carried_until_s, loop.time() - _IDLE_S)
        self._flows.append(flow)
        self._wake_in_time(loop, rate)
        try:
            await flow.done
        finally:
            if flow in self._flows:
                self._flows.remove(flow)

    def _wake_in_time(self, loop: asyncio.AbstractEventLoop, rate: float) -> None:
        least_bytes = len(self._flows) * min(flow.left_bytes for flow in self._flows)
        # Never without a pause: connections that take nothing must not keep the loop to themselves.
        due_s = max(loop.time() + _LEAST_S, self._carried_until_s + min(_TICK_S, least_bytes / rate))
        if self._timer is not None:
            if self._timer.when() <= due_s:
                return
            self._timer.cancel()
        self._timer = loop.call_at(due_s, self._wake, loop, rate)

    def _wake(self, loop: asyncio.AbstractEventLoop, rate: float) -> None:
        self._timer = None
        now_s = loop.time()
        self._share(int((now_s - self._carried_until_s) * rate))
        self._carried_until_s = now_s
        if self._flows:
            self._wake_in_time(loop, rate)

    def _share(self, num_bytes: int) -> None:
        flows = sorted(self._flows, key=lambda flow: flow.left_bytes)
        for number, flow in enumerate(flows):
            share = min(flow.left_bytes, num_bytes // (len(flows) - number))
            try:
                sent = flow.send(share) if share else 0
            except OSError as error:
                self._end(flow, error)
                continue
            num_bytes -= sent
            flow.left_bytes -= sent
            if not flow.left_bytes:
                self._end(flow)

    def _end(self, flow: _Flow, error: OSError | None = None) -> None:
        self._flows.remove(flow)
        if flow.done.done():
            return
        if error is None:
            flow.done.set_result(None)
        else:
            flow.done.set_exception(error)
