"""Packing on a Ray cluster: the bytes of a local pack, though in each pack a worker process is killed."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dalipipe.packing.config import PackConfig
from dalipipe.packing.run import pack
from dalipipe.storage.store import StorageConfig
from tests.support.archives import write_tar
from tests.support.images import jpeg_bytes, write_image_tree
from tests.support.ray_cluster import ray_cluster
from tests.unit.packing.reading import contents, run_pack

ray = pytest.importorskip("ray", reason="dalipipe[ray] is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with ray_cluster():
        yield


@pytest.fixture(scope="module")
def lakes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("lakes")
    write_image_tree(root / "images", num_images=600, height=100, width=120)
    pictures = [jpeg_bytes(i, height=100, width=120) for i in range(20)]
    for number in range(3):
        first = 200 * number
        members = [(f"k{i:04d}.{e}", d) for i in range(first, first + 200) for e, d in _sample(i, pictures)]
        write_tar(root / f"tars/{number}.tar", members)
        write_tar(root / f"gz/{number}.tar.gz", members, mode="w:gz")
    return root


def _sample(number: int, pictures: list[bytes]) -> list[tuple[str, bytes]]:
    return [("jpg", pictures[number % 20]), ("cls", b"%d" % (number % 3))]


@pytest.mark.parametrize(
    ("lake", "options"),
    [
        ("images", {}),
        ("images", {"shuffle": False, "resize": 64}),
        ("tars", {"kind": "tars"}),
        ("gz", {"kind": "tars", "dedup": True, "check": "header"}),
    ],
)
def test_ray_packs_the_same_bytes_though_a_worker_is_killed(cluster, lakes, tmp_path, lake, options):
    from dalipipe.engines.ray_engine import RayEngine

    options = {"check": "decode", **options}
    run_pack(lakes / lake, tmp_path / "local", **options)
    engine = RayEngine(2)
    stop, killed = threading.Event(), []

    def kill_one() -> None:
        """Kills the first Ray worker process that is in the middle of a shard or run."""
        while not stop.is_set() and not killed:
            for pid in workers_at(tmp_path / "ray"):
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
                return
            stop.wait(0.003)

    killer = threading.Thread(target=kill_one)
    try:
        killer.start()
        config = PackConfig(**{"shard_bytes": "1MiB", "workers": 2, **options})
        pack(str(lakes / lake), str(tmp_path / "ray"), config, StorageConfig(), engine=engine)
    finally:
        stop.set()
        killer.join(10)
        engine.close()
    assert killed, "no worker was seen at work"
    assert contents(tmp_path / "ray") == contents(tmp_path / "local")
    assert sum(name.endswith(".tar") for name in contents(tmp_path / "ray")) >= 1


def workers_at(target: Path) -> list[int]:
    """Ray's worker processes that hold a file without a name open at the target."""
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
        if any(link.startswith(f"{target}/.pack/") and link.endswith("(deleted)") for link in links):
            found.append(int(entry.name))
    return found
