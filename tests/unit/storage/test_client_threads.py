"""The event loop of the object stores' client has one thread a process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.faultproxy import FolderServer

READ = """
import os, sys, time
from pathlib import Path
from dalipipe.storage import open_store

def count():
    return sum(task.read_text().startswith("tokio-rt") for task in Path("/proc/self/task").glob("*/comm"))

store = open_store(sys.argv[1])
print(count())
assert bytes(store.read("x", 1, 4)) == b"123"
deadline_s = time.monotonic() + 30
while count() < int(sys.argv[2]) and time.monotonic() < deadline_s:
    time.sleep(0.01)
print(count(), os.environ.get("TOKIO_WORKER_THREADS"))
store.close()
"""


@pytest.mark.parametrize("given", [None, "3"])
def test_the_client_has_one_thread_unless_the_environment_says_otherwise(tmp_path: Path, given: str | None) -> None:
    (tmp_path / "x").write_bytes(b"0123456789")
    environment = {name: value for name, value in os.environ.items() if name != "TOKIO_WORKER_THREADS"}
    if given is not None:
        environment["TOKIO_WORKER_THREADS"] = given
    server = FolderServer(tmp_path)
    try:
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", READ, server.url, given or "1"],
            env=environment, capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip
    finally:
        server.stop()
    assert done.stderr == ""
    # Opening a store starts nothing; and what is set for the loop's start is not left to children.
    assert done.stdout.split("\n") == ["0", f"{given or 1} {given}", ""]
