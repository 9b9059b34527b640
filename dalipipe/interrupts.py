"""Ctrl-C and SIGTERM: how a command ends by them, and the few places where they have to wait a moment.

Python raises an interrupt between any two instructions of the main thread: also between the start of a thread and the
assignment that makes somebody its owner, and in the middle of joining it. A thread that is left running inside native
code takes the process with it when the interpreter goes away.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, TypeVar

_Self = TypeVar("_Self", bound="Undisturbed")
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PATIENCE_S = 3.0
_REMIND_S = 0.1
_IMPORT_S = 30.0
_CLEAN_UP_S = 15.0


class Undisturbed:
    """Holds interrupts back while the main thread is inside; the first is delivered at the end.

    For short pieces of work in which something changes its owner. Whoever sends another interrupt more than 3 s after
    the first that waits is heard at once. Does nothing in other threads, which no interrupt reaches.
    """

    depth = 0
    """How many of them the main thread is inside."""

    def __init__(self) -> None:
        self._is_on = False
        self._saved: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._waiting: tuple[int, FrameType | None] | None = None
        self._since_s = 0.0

    def __enter__(self: _Self) -> _Self:
        self._is_on = threading.current_thread() is threading.main_thread()
        if self._is_on:
            Undisturbed.depth += 1
            try:
                for number in _SIGNALS:
                    handler = signal.getsignal(number)
                    if callable(handler):  # else it is ignored, or ends the process without asking Python
                        self._saved[number] = handler
                        signal.signal(number, self._wait)
            except BaseException:
                self._restore()
                raise
        return self

    def __exit__(self, *error: object) -> None:
        self._restore()
        if self._waiting is not None:
            number, frame = self._waiting
            self._waiting = None
            self._saved[number](number, frame)

    def _restore(self) -> None:
        if self._is_on:
            self._is_on = False
            Undisturbed.depth -= 1
        for number, handler in self._saved.items():
            signal.signal(number, handler)

    def _wait(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if self._waiting is None:
            self._waiting, self._since_s = (number, frame), now_s
        elif now_s - self._since_s > _PATIENCE_S:
            self._waiting = None
            self._saved[number](number, frame)


class Stopping:
    """While inside, SIGINT and SIGTERM raise KeyboardInterrupt in the main thread, and the clean-up then runs in peace.

    Further signals do not break into a clean-up; after 15 s of it they end the process as it is. An interrupt that
    somebody swallowed, as a finaliser does, is raised again. An import is let come to its end: broken off, it leaves
    native modules half made and import locks held; whoever sends another signal 3 s later does not want to wait for it.

    Attributes:
        number: the signal that came first, None while none did.

    Args:
        ends_process: the process ends after this: signals that come later do not break into the exit of the
            interpreter either, unless it takes longer than 15 s.
    """

    def __init__(self, *, ends_process: bool = False) -> None:
        self.number: int | None = None
        self._ends_process = ends_process
        self._saved: dict[int, Any] = {}
        self._saved_hook = sys.unraisablehook
        self._since_s = 0.0

    def __enter__(self) -> Stopping:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup and shells' background jobs have it
                    self._saved[number] = signal.signal(number, self._stop)
            sys.unraisablehook = self._unraisable
            if self._ends_process:
                atexit.register(self._ignore)  # registered first, so it comes last
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.number is not None and signal.SIGALRM in self._saved:
            signal.setitimer(signal.ITIMER_REAL, 0)
        if self.number is None:
            self._since_s = time.monotonic()
        for number, handler in self._saved.items():
            stays = self._ends_process and number in _SIGNALS
            signal.signal(number, self._leave if stays else handler or signal.SIG_DFL)
        sys.unraisablehook = self._saved_hook

    def _stop(self, number: int, frame: FrameType | None) -> None:
        waited_s = 0.0
        if self.number is None:
            self.number, self._since_s = number, time.monotonic()
            if signal.getsignal(signal.SIGALRM) is signal.SIG_DFL:
                self._saved[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._remind)
                signal.setitimer(signal.ITIMER_REAL, _REMIND_S, _REMIND_S)
        else:
            waited_s = time.monotonic() - self._since_s
        self._leave(number, frame)
        if waited_s > _PATIENCE_S or signal.SIGALRM not in self._saved:
            frame = None
        self._remind(number, frame)

    def _ignore(self) -> None:
        # The interpreter gives up its handlers next, and then takes its modules apart.
        for number in self._saved.keys() & set(_SIGNALS):
            signal.signal(number, signal.SIG_IGN)

    def _leave(self, number: int, _frame: FrameType | None) -> None:
        if time.monotonic() - self._since_s > _CLEAN_UP_S:
            with contextlib.suppress(OSError):
                os.write(2, b"dalipipe: ended in the middle of its clean-up\n")
            os._exit(128 + (self.number or number))

    def _remind(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGALRM and Undisturbed.depth:
            return
        if _is_interrupt(sys.exc_info()[1]):
            return  # the clean-up is under way
        if _is_importing(frame) and time.monotonic() - self._since_s < _IMPORT_S:
            return
        raise KeyboardInterrupt

    def _unraisable(self, about: Any) -> None:
        if not _is_interrupt(about.exc_value):
            self._saved_hook(about)


def _is_interrupt(error: BaseException | None) -> bool:
    """Whether `error` is an interrupt, or came out of one."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, KeyboardInterrupt):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
