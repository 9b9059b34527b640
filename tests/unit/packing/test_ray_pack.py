"""Packing on a Ray cluster: the bytes of a local pack, also when worker processes are killed."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from dalipipe.packing.config import PackConfig
from dalipipe.packing.run import pack
from dalipipe.storage.store import StorageConfig
from tests.support.images import write_image_tree
from tests.unit.packing.reading import contents, run_pack

ray = pytest.importorskip("ray", reason="dalipipe[ray] is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")


def test_ray_packs_the_same_bytes_though_a_worker_is_killed(tmp_path):
    from dalipipe.engines.ray_engine import RayEngine

    write_image_tree(tmp_path / "src", num_images=900, height=100, width=120)
    run_pack(tmp_path / "src", tmp_path / "local", check="decode")
    engine = RayEngine(2)
    stop, killed = threading.Event(), []

    def kill_one() -> None:
        """Kills the first Ray worker process that is in the middle of a shard."""
        while not stop.is_set() and not killed:
            for pid in workers_in("write_shard"):
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
                return
            time.sleep(0.005)

    killer = threading.Thread(target=kill_one)
    config = PackConfig(shard_bytes="1MiB", workers=2, check="decode")
    done: list[int] = []
    try:
        killer.start()
        report = pack(
            str(tmp_path / "src"),
            str(tmp_path / "ray"),
            config,
            StorageConfig(),
            engine=engine,
            progress=lambda count, _total: done.append(count),
        )
    finally:
        stop.set()
        killer.join(10)
        engine.close()
    assert killed, "no worker was seen at work"
    assert report.samples == 900
    assert contents(tmp_path / "ray") == contents(tmp_path / "local")


def workers_in(_name: str) -> list[int]:
    """Ray's worker processes of this test that hold an unnamed shard file open."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if not (entry / "cmdline").read_bytes().startswith(b"ray::"):
                continue
            links = [str(link.readlink()) for link in (entry / "fd").iterdir()]
        except OSError:
            continue
        if any("/ray/.pack/" in link and link.endswith("(deleted)") for link in links):
            found.append(int(entry.name))
    return found
