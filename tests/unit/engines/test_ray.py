"""`RayEngine` on a real cluster of this machine, with worker processes that are really killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from dalipipe.engines.config import RayConfig
from dalipipe.errors import ConfigError, PackError
from tests.contracts.engine import EngineContract
from tests.support.ray_cluster import ray_cluster

ray = pytest.importorskip("ray", reason="dalipipe[ray] is not installed")

from dalipipe.engines.ray_engine import RayEngine  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with ray_cluster():
        yield


class TestRay(EngineContract):
    @pytest.fixture
    def engine(self, cluster: None) -> Iterator[RayEngine]:
        engine = RayEngine(2)
        yield engine
        engine.close()
        assert ray.is_initialized(), "a session that was there before is left alone"

    def test_killed_worker_costs_one_retry(self, engine: RayEngine, tmp_path: Path) -> None:
        tasks = [(str(tmp_path / f"{number}.pid"), number == 2, 1) for number in range(6)]
        done = list(engine.run(_killed_at, tasks, names=[f"shard-{number}" for number in range(6)]))
        assert sorted(one.index for one in done) == list(range(6))
        assert len((tmp_path / "2.pid").read_text().split()) == 2, "it ran twice, in two processes"
        assert len((tmp_path / "3.pid").read_text().split()) == 1

    def test_task_that_always_kills_its_worker_is_named(self, cluster: None, tmp_path: Path) -> None:
        engine = RayEngine(2, RayConfig(retries=1))
        with pytest.raises(PackError, match=r"task shard-0 was lost .* after 1 retries .*run again"):
            list(engine.run(_killed_at, [(str(tmp_path / "0.pid"), True, 99)], names=["shard-0"]))
        engine.close()

    def test_negative_numbers_are_refused(self, cluster: None) -> None:
        with pytest.raises(ConfigError, match=r"ray\.retries=-1"):
            RayEngine(1, RayConfig(retries=-1))


def _killed_at(task: tuple[str, bool, int]) -> int:
    path, killed, times = task
    with Path(path).open("a") as file:
        file.write(f"{os.getpid()} ")
    if killed and len(Path(path).read_text().split()) <= times:
        os.kill(os.getpid(), signal.SIGKILL)
    return os.getpid()
