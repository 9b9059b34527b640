"""One cache folder and two users of the node: shared where both may write, read otherwise."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
GROUP = 4000

JOB = """
import logging, os, sys
from pathlib import Path
from dalipipe.cache.config import CacheConfig, MemoryConfig, TierConfig, TiersConfig
from dalipipe.cache.open import open_cache
from dalipipe.telemetry import Recorder
from tests.support.lake import MemoryLake, image_set, open_folder
logging.basicConfig(format="%(message)s")
folder = image_set(100, num_bytes=60, num_shards=1)
manifest, lake = open_folder(folder), MemoryLake(folder)
os.umask(int(sys.argv[3], 8))
os.setgroups([])
os.setgid(int(sys.argv[4]))
os.setuid(int(sys.argv[2]))
tiers = TiersConfig(node=TierConfig(capacity="1MB"), memory=MemoryConfig(dir=sys.argv[1] + "/memory"))
cache = open_cache(manifest, lake, CacheConfig(dir=sys.argv[1], policy="lru", tiers=tiers), Recorder())
blocks = int(sys.argv[5])
for block in range(blocks):
    cache.get(block).release()
print(len(lake.reads))
cache.close()
"""


def job(folder: Path, uid: int, umask: str, blocks: int) -> tuple[int, str]:
    """(reads of the lake, what was said) of a job of this user that reads so many blocks."""
    words = [sys.executable, "-c", JOB, str(folder), str(uid), umask, str(GROUP), str(blocks)]
    done = subprocess.run(words, check=False, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-3000:]
    return int(done.stdout), done.stderr


@pytest.fixture
def open_to_all() -> Iterator[Path]:
    """A folder that all users may look into; pytest's own lie in one that each session closes to others at first."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.mark.skipif(os.getuid() != 0, reason="takes root to become other users")
@pytest.mark.parametrize("umask", ["002", "022"])
def test_two_users_share_a_folder_of_their_group(open_to_all: Path, umask: str) -> None:
    folder = open_to_all / "cache"
    folder.mkdir()
    os.chown(folder, 0, GROUP)
    folder.chmod(0o2775)
    assert job(folder, 4001, umask, 5) == (5, "")
    reads, said = job(folder, 4002, umask, 10)
    assert reads == 5  # what the other brought is used in any case
    again, _ = job(folder, 4001, umask, 10)
    if umask == "002":
        assert (said, again) == ("", 0)
    else:
        assert "belongs to user 4001" in said
        assert "umask 002" in said
        assert again == 5
