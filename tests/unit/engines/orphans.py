"""A parent with two busy workers, for the tests that kill it: `python -m tests.unit.engines.orphans FOLDER`."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from dalipipe.engines import LocalEngine


def linger(folder: str) -> None:
    (Path(folder) / f"{os.getpid()}.pid").write_bytes(b"")
    time.sleep(60)


if __name__ == "__main__":
    list(LocalEngine(2).run(linger, [sys.argv[1]] * 2, names=["a", "b"]))
