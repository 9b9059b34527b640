"""One request to a remote store, from admission to answer: budget, place, hedge, retry, deadline.

All remote stores send their reads through here, so that what a store's bad day looks like is decided once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from dalipipe.errors import StorageTimeoutError
from dalipipe.storage.budget import declared_rate, open_budget
from dalipipe.storage.calls import CallPool
from dalipipe.storage.failures import is_throttling, is_transient
from dalipipe.storage.gradient import GradientLimit
from dalipipe.storage.hedging import Flight, HedgePolicy
from dalipipe.storage.retry import call_with_retries
from dalipipe.storage.store import StorageConfig

R = TypeVar("R")
Record = Callable[[str, float], None]
"""Adds an amount to a counter by name; what `Recorder.add` does."""


def discard(_name: str, _amount: float) -> None:
    """Counts nothing."""


class Transport:
    """Sends the requests of one store. Thread-safe; belongs to the process that made it.

    Counts `requests.lake`, `retries`, `hedges`, `hedges_won`, `throttled` and `budget_wait_s.<class>`.
    """

    def __init__(self, url: str, config: StorageConfig, record: Record) -> None:
        self._config = config
        self._budget = open_budget(config.budget_dir, declared_rate(config.bandwidth))
        self._record = record
        # A request that was beaten by its hedge keeps its thread until the client lets go of it.
        self._calls = CallPool(url=url, num_threads=2 * config.concurrency)
        self.limit = GradientLimit(config.concurrency)
        self.hedging = HedgePolicy(enabled=config.hedge)
        self._pid = os.getpid()

    def run(
        self,
        call: Callable[[], R],
        action: str,
        *,
        num_bytes: int = 0,
        timeout_s: float | None = None,
        retries: int | None = None,
        hedge: bool = False,
        retryable: Callable[[BaseException], bool] = is_transient,
    ) -> R:
        """Returns what `call` returns, tried again while `retryable` says so; its last exception is raised as it is.

        Args:
            action: a verb with the full URL, for messages.
            num_bytes: what the answer will hold; it is charged to the budget.
            hedge: whether the call may be made twice at once (it must have no effect but its answer).

        Raises:
            StorageTimeoutError: no answer within `timeout_s` (the request timeout), waiting and retries included.
            ClosedError: `close` was called, before or meanwhile.
        """
        timeout_s = self._config.request_timeout_s if timeout_s is None else timeout_s
        return call_with_retries(
            lambda left_s: self._attempt(call, action, num_bytes, left_s, hedge),
            retries=self._config.retries if retries is None else retries,
            timeout_s=timeout_s,
            retryable=retryable,
            on_retry=partial(self._record, "retries", 1),
            sleep=self._calls.sleep,
        )

    def pace(self, num_bytes: int, action: str, timeout_s: float) -> None:
        """Waits until the budget of this class has room for `num_bytes`."""
        if self._budget is None:
            return
        began_s = time.monotonic()
        while (wait_s := self._budget.admit(self._config.io_class, num_bytes)) > 0:
            if time.monotonic() - began_s + wait_s > timeout_s:
                raise StorageTimeoutError(
                    f"cannot {action}: the node's I/O budget had no room for class {self._config.io_class} within "
                    f"{timeout_s:.1f} s; raise storage.bandwidth, or read less at a time"
                )
            self._calls.sleep(wait_s)
        waited_s = time.monotonic() - began_s
        if waited_s > 0.001:
            self._record(f"budget_wait_s.{self._config.io_class}", waited_s)

    def moved(self, num_bytes: int) -> None:
        """Counts bytes that came or went."""
        if self._budget is not None and num_bytes:
            self._budget.moved(num_bytes)

    def close(self) -> None:
        """Fails the calls that wait and ends the threads. Idempotent."""
        self._calls.close()  # first: who then gets no place any more is told that the store is closed
        if os.getpid() != self._pid:  # as there: the locks of the rest may be held by threads that are not here
            return
        self.limit.close()
        if self._budget is not None:
            self._budget.close()

    def _attempt(self, call: Callable[[], R], action: str, num_bytes: int, left_s: float, hedge: bool) -> R:
        deadline_s = time.monotonic() + left_s
        self._calls.check_open()
        if num_bytes:
            self.pace(num_bytes, action, left_s)
        if not self.limit.acquire(deadline_s - time.monotonic()):
            self._calls.check_open()
            raise StorageTimeoutError(
                f"cannot {action}: {self.limit.limit} other requests kept the store busy for {left_s:.1f} s; "
                "raise storage.concurrency or storage.request_timeout_s"
            )
        try:
            self._record("requests.lake", 1)
            began_s = time.monotonic()
            answer = self._send(call, action, num_bytes, deadline_s, hedge)
        except BaseException as error:
            if is_throttling(error):
                self._record("throttled", 1)
                self.hedging.throttled()
                self.limit.throttled()
            raise
        finally:
            self.limit.release()
        if num_bytes:
            self.limit.finished(num_bytes, time.monotonic() - began_s)
            self.moved(num_bytes)
        return answer

    def _send(self, call: Callable[[], R], action: str, num_bytes: int, deadline_s: float, hedge: bool) -> R:
        if not hedge:
            return self._calls.run(call, timeout_s=deadline_s - time.monotonic(), action=action)
        flight, began_s = self.hedging.started(num_bytes), time.monotonic()
        try:
            first = self._calls.submit(call)
            second: Future[R] | None = None
            if self._lags(first, flight, deadline_s):
                second = self._calls.submit(call)
                self._record("hedges", 1)
            answer, hedge_won = self._first_of(first, second, began_s, deadline_s, action)
        except BaseException:
            self.hedging.failed(flight)
            raise
        self.hedging.finished(flight, hedge_won=hedge_won)
        return answer

    def _lags(self, first: Future[R], flight: Flight, deadline_s: float) -> bool:
        """Waits for the answer until a hedge is to be sent; whether it is."""
        # Asked again each time: what is known changes, and so does what else is under way.
        while (wait_s := self.hedging.hedge_in_s(flight)) > 0:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or self._calls.settles([first], min(wait_s, left_s)):
                return False
        return True

    def _first_of(
        self, first: Future[R], second: Future[R] | None, began_s: float, deadline_s: float, action: str
    ) -> tuple[R, bool]:
        """The first good answer of a request and its hedge, and whether the hedge gave it; else the request's error."""

        def wait(future: Future[R]) -> R:
            now_s = time.monotonic()
            return self._calls.wait(future, max(0.0, deadline_s - now_s), action, waited_s=now_s - began_s)

        if second is None:
            return wait(first), False
        self._calls.settles([first, second], deadline_s - time.monotonic())
        won = second.done() and not first.done()
        order = [second, first] if won else [first, second]
        try:
            if order[0].done() and (order[0].cancelled() or order[0].exception() is None):
                answer = wait(order[0])
                self._calls.abandon(order[1])
            else:
                self._calls.abandon(order[0])
                answer = wait(order[1])
                won = order[1] is second
        finally:
            self._calls.abandon(first)
            self._calls.abandon(second)
        if won:
            self._record("hedges_won", 1)
        return answer, won
