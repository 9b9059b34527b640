"""Jobs under torchrun: its workers are in sessions of their own, so that killing the launcher's group misses them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path


def kill_job(job: subprocess.Popen[bytes]) -> None:
    """SIGKILL to a launcher and its workers."""
    with contextlib.suppress(FileNotFoundError):
        children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
        for pid in [job.pid, *map(int, children)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    job.wait(30)
