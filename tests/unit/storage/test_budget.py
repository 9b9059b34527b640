from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dalipipe.errors import ConfigError, StorageTimeoutError
from dalipipe.storage import StorageConfig, open_store
from dalipipe.storage.budget import NodeBudget, open_budget
from tests.support.faultproxy import fault_proxy
from tests.support.host import within
from tests.support.seaweed import S3Server

MB = 1_000_000
ROOT = Path(__file__).parents[3]


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def serve(budget: NodeBudget, clock: Clock, wishes: dict[str, bool], seconds: float) -> dict[str, float]:
    """Bytes by class when each class that wishes asks for 1 MB again and again, the clock going in milliseconds."""
    got = dict.fromkeys(wishes, 0.0)
    end_s = clock.now_s + seconds
    while clock.now_s < end_s:
        for io_class, wants in wishes.items():
            if wants and budget.admit(io_class, MB) == 0:
                got[io_class] += MB
        clock.now_s += 0.001
    return got


def test_data_leaves_the_others_their_floor_and_no_more(tmp_path: Path) -> None:
    clock = Clock()
    budget = NodeBudget(tmp_path / "b", 100 * MB, clock=clock)
    got = serve(budget, clock, {"data": True, "checkpoint": True, "eval": True}, 20)
    assert got["data"] == pytest.approx(20 * 100 * MB, rel=0.02)
    assert got["checkpoint"] == pytest.approx(20 * 5 * MB, rel=0.1)
    assert got["eval"] == pytest.approx(20 * 10 * MB, rel=0.1)


def test_the_ledger_is_its_users_alone(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        budget = open_budget(str(tmp_path), 100 * MB)
    finally:
        os.umask(before)
    assert budget is not None
    assert [path.stat().st_mode & 0o777 for path in tmp_path.iterdir()] == [0o600]
    budget.close()


def test_an_idle_link_is_for_whoever_wants_it(tmp_path: Path) -> None:
    clock = Clock()
    budget = NodeBudget(tmp_path / "b", 100 * MB, clock=clock)
    assert serve(budget, clock, {"checkpoint": True}, 5)["checkpoint"] == pytest.approx(500 * MB, rel=0.1)
    assert serve(budget, clock, {"data": True, "checkpoint": True}, 5)["data"] >= 450 * MB


def test_without_a_declared_rate_data_never_waits_and_the_highest_seen_is_the_measure(tmp_path: Path) -> None:
    clock = Clock()
    budget = NodeBudget(tmp_path / "b", clock=clock)
    assert serve(budget, clock, {"checkpoint": True}, 0.1)["checkpoint"] > 0
    for _ in range(2000):
        budget.moved(MB // 10)
        clock.now_s += 0.001
    assert budget.rate == pytest.approx(100 * MB, rel=0.05)
    assert budget.admit("data", 10**12) == 0
    got = serve(budget, clock, {"data": True, "checkpoint": True}, 10)
    assert got["checkpoint"] == pytest.approx(10 * 5 * MB, rel=0.2)
    clock.now_s += 1
    assert serve(budget, clock, {"checkpoint": True}, 1)["checkpoint"] > 500 * MB


def test_two_processes_share_one_ledger(tmp_path: Path) -> None:
    clock = Clock()
    first, second = (NodeBudget(tmp_path / "b", 100 * MB, clock=clock) for _ in range(2))
    got = [0, 0]
    for _ in range(5000):
        for i, budget in enumerate((first, second)):
            got[i] += budget.admit("data", MB) == 0
        clock.now_s += 0.001
    assert sum(got) == pytest.approx(500, rel=0.05)


USER = """
import sys
from pathlib import Path
from dalipipe.storage.budget import NodeBudget
budget = NodeBudget(Path(sys.argv[1]))
print("ready", flush=True)
for line in sys.stdin:
    budget.close()
    budget = NodeBudget(Path(sys.argv[1]))
    print("again", flush=True)
budget.close()
"""


def test_the_last_process_takes_the_ledger_away_whoever_was_killed(tmp_path: Path) -> None:
    path = tmp_path / "new" / "b"
    users = [
        subprocess.Popen(
            [sys.executable, "-c", USER, str(path)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    try:
        for user in users:
            assert user.stdout is not None
            assert user.stdout.readline() == "ready\n"
        ledger = path.stat().st_ino
        os.kill(users[0].pid, signal.SIGKILL)
        users[0].wait(30)
        assert users[1].stdin is not None
        assert users[1].stdout is not None
        users[1].stdin.write("once more\n")
        users[1].stdin.flush()
        assert users[1].stdout.readline() == "again\n"
        assert path.stat().st_ino == ledger, "it went away under a process that uses it"
        for user in users[1:]:
            user.communicate(timeout=30)
        assert not path.exists()
    finally:
        for user in users:
            user.kill()
            user.communicate()
    NodeBudget(path).close()
    assert not path.exists()


def test_a_budget_that_nobody_closed_leaves_neither_descriptor_nor_ledger(tmp_path: Path) -> None:
    def num_open() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    gc.collect()  # what other tests left
    before = num_open()
    budget = NodeBudget(tmp_path / "b")
    child = os.fork()
    if not child:
        budget.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert (tmp_path / "b").exists(), "a child that was forked takes nothing away"
    NodeBudget(tmp_path / "b").close()
    assert (tmp_path / "b").exists(), "nor its parent's mark"
    del budget
    gc.collect()
    assert num_open() <= before
    assert not (tmp_path / "b").exists()


def test_a_ledger_that_vanished_or_was_left_by_killed_processes_is_no_obstacle(tmp_path: Path) -> None:
    path = tmp_path / "b"
    path.write_bytes(b"torn")
    first = NodeBudget(path)
    assert first.admit("data", MB) == 0
    path.unlink()
    second = NodeBudget(path)
    first.close()  # not the last one of the file that is there now
    assert path.exists()
    second.close()
    assert not path.exists()


def test_a_stopped_process_that_holds_the_lock_blocks_nobody(tmp_path: Path) -> None:
    path = tmp_path / "b"
    budget = NodeBudget(path, 100 * MB)
    program = (
        "import sys, time\nfrom pathlib import Path\nfrom dalipipe.storage.budget import NodeBudget, _Locked\n"
        f"budget = NodeBudget(Path({str(path)!r}))\n"
        "with _Locked(budget._descriptor, time.monotonic):\n    print('held', flush=True)\n    time.sleep(60)\n"
    )
    holder = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=ROOT)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        os.kill(holder.pid, signal.SIGSTOP)
        with within(2):
            assert budget.admit("data", MB) == 0
    finally:
        holder.kill()
        holder.wait(10)
        assert holder.stdout is not None
        holder.stdout.close()


def test_a_torn_ledger_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "b"
    path.write_bytes(b"\xff" * 200)
    budget = NodeBudget(path, 100 * MB)
    assert budget.admit("checkpoint", MB) == 0
    budget.close()
    budget.close()


def test_a_folder_that_cannot_be_written_costs_the_budget_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    assert open_budget(str(tmp_path / "file"), None) is None
    assert "storage.budget_dir" in caplog.text
    store = open_store(f"memory://{uuid.uuid4().hex}", StorageConfig(budget_dir=str(tmp_path / "file")))
    store.put("x", b"1")
    assert bytes(store.read("x")) == b"1"
    store.close()


def test_a_budget_without_room_is_an_error_at_the_deadline(tmp_path: Path) -> None:
    config = StorageConfig(bandwidth="1kB", budget_dir=str(tmp_path), request_timeout_s=0.4, retries=0)
    store = open_store(f"memory://{uuid.uuid4().hex}", config)
    store.put("x", bytes(5000))
    with pytest.raises(StorageTimeoutError, match=r"class data.*storage\.bandwidth"):
        store.read("x", 0, 5000)
    store.close()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (StorageConfig(io_class="train"), r"storage\.io_class='train'.*data, checkpoint, eval"),
        (StorageConfig(bandwidth=0), r"storage\.bandwidth=0"),
        (StorageConfig(bandwidth="fast"), r"storage\.bandwidth='fast'"),
    ],
)
def test_values_that_can_never_work_are_refused(config: StorageConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_store("memory://x", config)


UPLOAD = """
import sys, time
from dalipipe.storage import StorageConfig, open_store
url, folder, io_class = sys.argv[1:]
config = StorageConfig(endpoint_url=url, budget_dir=folder, io_class=io_class, bandwidth="3MB")
store = open_store("s3://bucket/upload", config)
print("ready", flush=True)
body = bytes(3 << 20)
while True:
    store.put("checkpoint", body)
"""


def test_training_reads_win_over_the_checkpoint_of_another_process(s3: S3Server, tmp_path: Path) -> None:
    # So slow a link that it is what is short, and not the CPU of a busy host: that is shared without regard to classes.
    with fault_proxy(s3.endpoint_url, rate=3 * MB) as proxy:
        rates = {
            io_class: _read_rate(s3, proxy.url, tmp_path / io_class, io_class) for io_class in ("data", "checkpoint")
        }
    # Against another reader's traffic of its own class it gets about half of the link.
    assert rates["checkpoint"] >= 1.3 * rates["data"]


def _read_rate(s3: S3Server, url: str, folder: Path, upload_class: str) -> float:
    """Bytes a second of training reads while another process uploads in a class."""
    config = StorageConfig(endpoint_url=url, budget_dir=str(folder), bandwidth="3MB")
    with subprocess.Popen(
        [sys.executable, "-c", UPLOAD, url, str(folder), upload_class], stdout=subprocess.PIPE, cwd=ROOT
    ) as other:
        store = open_store("s3://bucket/reads", config)
        try:
            open_store("s3://bucket/reads", StorageConfig(endpoint_url=s3.endpoint_url)).put("x", bytes(1 << 20))
            assert other.stdout is not None
            assert other.stdout.readline() == b"ready\n"
            stop_s = time.monotonic() + 3

            def read(_: int) -> int:
                num_bytes = 0
                while time.monotonic() < stop_s:
                    num_bytes += len(store.read("x", 0, 128 << 10))
                return num_bytes

            with ThreadPoolExecutor(6) as threads:
                return sum(threads.map(read, range(6))) / 3
        finally:
            other.kill()
            store.close()
