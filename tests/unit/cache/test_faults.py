"""What kills, full and read-only disks and other jobs do to the cache, tried with real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]


def run(*words: object, mount: tuple[Path, str] | None = None) -> tuple[dict[str, Any], str]:
    """Runs a fault, with a file system of its own when `mount` = (folder, options) of a tmpfs; skips where the host
    lets no user mount. Returns what it printed and what it logged."""
    command = [sys.executable, "-m", "tests.unit.cache.faults", *map(str, words)]
    if mount is not None:
        script = f'mount -t tmpfs -o {mount[1]} none {mount[0]} || exit 77; exec "$@"'
        command = ["unshare", "-Urm", "sh", "-c", script, "sh", *command]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    if mount is not None and (done.returncode == 77 or done.stderr.startswith("unshare:")):
        pytest.skip("this host lets no user mount a file system")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


@pytest.mark.parametrize(
    ("policy", "point"),
    [
        ("pin", "locked"),
        ("pin", "writing"),
        ("pin", "written"),
        ("pin", "linked"),
        ("lru", "writing"),
        ("lru", "written"),
    ],
)
def test_a_killed_holder_costs_its_waiters_a_moment_and_nothing_else(tmp_path: Path, policy: str, point: str) -> None:
    seen, _ = run("kill", tmp_path, policy, point)
    assert seen["kills"] >= 25
    assert seen["wrong"] == 0
    assert seen["corrupt"] == 0
    assert seen["longest_wait_s"] < 2
    assert set(seen["names"]) <= {"locks", "usage"}
    # One of the two waiters fetches; after the link nobody need.
    assert seen["reads"] == ([0] if point == "linked" else [1])


def test_views_of_another_process_outlive_the_eviction_of_their_blocks(tmp_path: Path) -> None:
    seen, _ = run("evict", tmp_path)
    assert seen["intact"] is True
    assert seen["named"] == []
    assert seen["evicted"] >= 4
    assert seen["held_unnamed_bytes"] > 0
    assert seen["bytes"] <= seen["budget"]


def test_a_disk_that_fills_up_costs_hits_is_counted_and_said_once(tmp_path: Path) -> None:
    seen, log = run("full", tmp_path, mount=(tmp_path, "size=4m"))
    assert set(seen["tiers"]) == {"lake"}
    assert 0 < seen["again"].count("node") < len(seen["again"])
    assert seen["counts"]["node_write_failures"] > 0
    assert seen["reads"] > len(seen["tiers"])
    assert log.count("No space left") == 1
    assert "cache.tiers.node.capacity" in log


def test_a_read_only_folder_serves_what_it_has(tmp_path: Path) -> None:
    seen, log = run("read-only", tmp_path, mount=(tmp_path, "size=4m"))
    assert seen["tiers"] == ["node" if block % 2 == 0 else "lake" for block in range(len(seen["tiers"]))]
    assert "bytes_written.node" not in seen["counts"]
    assert set(seen["other"]) == {"lake"}
    assert "cannot be written" in log


def test_two_jobs_with_equal_shard_names_do_not_meet(tmp_path: Path) -> None:
    seen, _ = run("names", tmp_path)
    assert seen == {"right": [True, True], "sets": 2}
