"""Calls that may hang, made on threads that may be left behind.

A client call cannot be interrupted from outside: not by a deadline, not by Ctrl-C, not by `close`. So every call runs
on one of a few daemon threads, and the caller waits for the answer only as long as it wants to. Two rules keep this
safe: a stuck call keeps its thread, so that at most `num_threads` can ever be stuck; and results are handed over,
never written into the caller's memory, so that a late answer cannot touch a buffer that is in use again.
"""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures import wait as wait_for_futures
from typing import Any, TypeAlias, TypeVar

from dalipipe.errors import ClosedError, StorageError, StorageTimeoutError

R = TypeVar("R")
_Job: TypeAlias = "tuple[Future[Any], Callable[[], Any]]"
_Jobs: TypeAlias = "queue.SimpleQueue[_Job | None]"


class _Crew:
    """The threads of a pool, apart from it: they outlive a pool that nobody closed only until it is collected.

    Of the idle ones the last to come back is asked first. Calls come one at a time for most of a run, so they all go to
    the same few threads, whose stacks and whose share of the C library's memory are in use already; to ask all of them
    in turn would bring fresh pages into each.
    """

    __slots__ = ("idle", "lock", "queues", "waiting")

    def __init__(self) -> None:
        self.lock = threading.RLock()  # a pool may be collected, and its crew dismissed, wherever memory is taken
        self.queues: list[_Jobs] = []
        self.idle: list[_Jobs] = []
        self.waiting: deque[_Job] = deque()

    def give(self, job: _Job, num_threads: int) -> _Jobs | None:
        """Hands the job to an idle thread, else keeps it for the first that is free; the queue of a thread that is to
        be started for it, where there may be one more."""
        with self.lock:
            if self.idle:
                self.idle.pop().put(job)
            elif len(self.queues) < num_threads:
                self.queues.append(queue.SimpleQueue())
                self.queues[-1].put(job)
                return self.queues[-1]
            else:
                self.waiting.append(job)
        return None

    def next(self, own: _Jobs) -> _Job | None:
        """The next job of the thread with this queue; None when the crew is dismissed."""
        with self.lock:
            if self.waiting:
                return self.waiting.popleft()
            self.idle.append(own)
        return own.get()

    def dismiss(self) -> None:
        """Idle threads end, busy ones after their call."""
        with self.lock:
            self.waiting.clear()
            for own in self.queues:
                own.put(None)


# Idle threads end at once; one that is stuck in a client is not worth waiting for.
_JOIN_S = 0.2


class CallPool:
    """At most `num_threads` calls at once, each with a deadline. Thread-safe; belongs to the process that made it."""

    def __init__(self, *, url: str, num_threads: int) -> None:
        self._url = url
        self._num_threads = num_threads
        self._crew = _Crew()
        self._threads: list[threading.Thread] = []
        self._pending: set[Future[Any]] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._ended = threading.Event()
        self._pid = os.getpid()
        self._release = weakref.finalize(self, _dismiss, self._crew, self._pid)

    def run(self, call: Callable[[], R], *, timeout_s: float, action: str) -> R:
        """Returns what `call` returns; its exception is raised as it is.

        Raises:
            StorageTimeoutError: no answer within `timeout_s`, waiting for a free thread included.
            ClosedError: the pool was closed, before or meanwhile.
        """
        return self.wait(self.submit(call), timeout_s, action)

    def run_in_order(self, calls: Iterable[Callable[[], R]], *, timeout_s: float, action: str) -> Iterator[R]:
        """Yields the results in the order of `calls`, at most `num_threads` of them ahead; `timeout_s` is for each."""
        ahead: deque[Future[R]] = deque()
        try:
            for call in calls:
                ahead.append(self.submit(call))
                if len(ahead) >= self._num_threads:
                    yield self.wait(ahead.popleft(), timeout_s, action)
            while ahead:
                yield self.wait(ahead.popleft(), timeout_s, action)
        finally:
            for future in ahead:
                self.abandon(future)

    def sleep(self, delay_s: float) -> None:
        """Sleeps, but not longer than the pool lives.

        Raises:
            ClosedError: the pool was closed, before or meanwhile.
        """
        if self._ended.wait(delay_s):
            raise self._closed_error()

    def check_open(self) -> None:
        """Raises ClosedError when the pool was closed."""
        if self._closed:
            raise self._closed_error()

    def close(self) -> None:
        """Fails the calls that wait, ends the idle threads; one that is stuck ends with its call. Idempotent."""
        if os.getpid() != self._pid:
            # None of the threads came along in a fork, and whatever lock one of them held stays locked for ever.
            self._closed = True
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._ended.set()
            pending = list(self._pending)
            self._pending.clear()
        for future in pending:
            if not future.cancel():
                _settle(future, error=self._closed_error())
        self._release()
        deadline = time.monotonic() + _JOIN_S
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(deadline - time.monotonic(), 0))

    def submit(self, call: Callable[[], R]) -> Future[R]:
        """Starts a call as soon as a thread is free; `wait` or `abandon` what is returned."""
        if os.getpid() != self._pid:
            raise StorageError(
                f"the store {self._url} was opened before a fork and cannot be used after it; "
                "open it in the child process, or start processes with 'spawn'"
            )
        future: Future[R] = Future()
        with self._lock:
            if self._closed:
                raise self._closed_error()
            self._pending.add(future)
            own = self._crew.give((future, call), self._num_threads)
            if own is not None:
                self._add_thread(own)
        return future

    def _add_thread(self, own: _Jobs) -> None:
        name = f"dalipipe-storage-{len(self._threads)}"
        thread = threading.Thread(target=_serve, args=(self._crew, own), name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    def wait(self, future: Future[R], timeout_s: float, action: str, *, waited_s: float = 0.0) -> R:
        """The answer of a submitted call, that was waited for `waited_s` before; see `run`."""
        try:
            return future.result(timeout_s)
        except CancelledError:
            raise self._closed_error() from None
        except (TimeoutError, FutureTimeoutError) as error:  # one type only from Python 3.11 on
            if future.done() and not future.cancelled() and future.exception() is error:
                raise
            future.cancel()
            raise StorageTimeoutError(
                f"cannot {action}: no answer within {waited_s + timeout_s:.1f} s; "
                "raise storage.request_timeout_s if the store is slow, storage.concurrency if many calls wait"
            ) from None
        finally:
            self.abandon(future)

    def settles(self, futures: Sequence[Future[R]], timeout_s: float) -> bool:
        """Waits until one of the submitted calls is over; False when none was in time."""
        return bool(wait_for_futures(futures, timeout_s, FIRST_COMPLETED).done)

    def abandon(self, future: Future[Any]) -> None:
        """Nobody waits for this call any more; its answer is dropped when it comes."""
        future.cancel()
        with self._lock:
            self._pending.discard(future)

    def _closed_error(self) -> ClosedError:
        return ClosedError(f"the store {self._url} is closed; open it again")


def _serve(crew: _Crew, own: _Jobs) -> None:
    job = own.get()
    while job is not None:
        future, call = job
        if future.set_running_or_notify_cancel():
            _answer(future, call)
        # An idle thread must not keep the last answer or its caller's frames alive.
        del job, future, call
        job = crew.next(own)


def _answer(future: Future[Any], call: Callable[[], Any]) -> None:
    try:
        result = call()
    except BaseException as error:  # noqa: BLE001 - handed to the caller; a Rust client may even panic
        _settle(future, error=error)
    else:
        _settle(future, result=result)


def _settle(future: Future[Any], *, result: object = None, error: BaseException | None = None) -> None:
    try:
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)
    except InvalidStateError:
        pass  # close() and the call's own answer met; whichever came first is what the caller sees


def _dismiss(crew: _Crew, process: int) -> None:
    if os.getpid() == process:
        crew.dismiss()
