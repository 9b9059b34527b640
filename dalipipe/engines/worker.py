"""What runs inside a worker process of `LocalEngine`."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import traceback
from dataclasses import dataclass
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from types import FrameType


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The first message of a worker: it has started and waits for tasks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a task ended.

    payload: the pickled result, or the pickled exception; None where it could not be pickled.
    trace: the traceback in the worker, as text; empty on success.
    """

    failed: bool
    payload: bytes | None
    trace: str


def serve(pipe: Connection) -> None:
    """Runs tasks from `pipe`, each a pickled function and what it takes, until it ends. The entry point of the
    process."""
    # Ctrl-C reaches the whole process group; the parent alone decides, and ends its workers by SIGTERM.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _leave)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_die_with_parent, name="dalipipe-parent-watch", daemon=True).start()
    try:
        pipe.send(Ready())
        while True:
            pipe.send(run_task(*pipe.recv()))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the parent is gone or has closed the engine


def run_task(function_pickle: bytes, task_pickle: bytes) -> Outcome:
    """Runs one task; its exception is part of the outcome, never raised."""
    try:
        result = pickle.loads(function_pickle)(pickle.loads(task_pickle))
    except Exception as error:  # noqa: BLE001 - raised again in the parent, as it is
        return Outcome(failed=True, payload=_pickled_error(error), trace=traceback.format_exc())
    try:
        return Outcome(failed=False, payload=pickle.dumps(result), trace="")
    except Exception:  # noqa: BLE001 - pickling runs code of the result's class
        return Outcome(failed=False, payload=None, trace=traceback.format_exc())


def _pickled_error(error: Exception) -> bytes | None:
    """Some exceptions pickle but cannot be built again, which would surface in the parent far from its cause."""
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:  # noqa: BLE001 - pickling runs code of the exception's class
        return None
    return data


def _leave(_number: int, _frame: FrameType | None) -> None:
    """SIGTERM unwinds the task, so that it removes its temporary files."""
    sys.exit(128 + signal.SIGTERM)


def _die_with_parent() -> None:
    """Ends this process when its parent was killed; a parent's death signal would follow the thread that spawned."""
    parent = parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGKILL)
