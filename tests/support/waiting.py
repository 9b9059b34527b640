"""Waiting for something to become true, with a deadline and a word about what it was."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Callable


def wait_until(
    condition: Callable[[], object],
    what: str | Callable[[], str] = "the condition",
    *,
    timeout_s: float = 60.0,
    process: subprocess.Popen[bytes] | subprocess.Popen[str] | None = None,
    every_s: float = 0.01,
) -> None:
    """Returns as soon as `condition()` is true; looks at it again and again.

    Args:
        what: what did not come true, or a function that tells: a log, say.
        process: gives up at once when this has ended.
    """
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        ended = process is not None and process.poll() is not None
        if ended or time.monotonic() > deadline_s:
            told = what if isinstance(what, str) else what()
            how = f"the process ended with {process.returncode}" if ended and process else f"waited {timeout_s:g} s"
            raise AssertionError(f"{how}: {told} did not come true")
        time.sleep(every_s)


def listens(port: int) -> bool:
    """Whether a server on loopback takes connections at `port`."""
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True
