"""A real S3 server behind a proxy that misbehaves: what a reader sees, and what it costs."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dalipipe.errors import ClosedError, StorageError, StorageTimeoutError
from dalipipe.storage import StorageConfig, Store, open_store
from tests.support.faultproxy import Fault, FaultProxy, Request, fault_proxy
from tests.support.host import slowness, within
from tests.support.seaweed import S3Server
from tests.support.waiting import wait_until

DATA = bytes(range(256)) * 4096  # 1 MiB
Open = Callable[..., tuple[Store, Counter[str]]]


@pytest.fixture(scope="module")
def filled(s3: S3Server) -> S3Server:
    store = open_store("s3://bucket/faults", StorageConfig(endpoint_url=s3.endpoint_url))
    store.put("x", DATA)
    store.put("large", DATA * 20)
    store.close()
    return s3


@pytest.fixture
def proxy(filled: S3Server) -> Iterator[FaultProxy]:
    with fault_proxy(filled.endpoint_url) as proxy:
        yield proxy


@pytest.fixture
def open_lake(proxy: FaultProxy) -> Iterator[Open]:
    opened: list[Store] = []

    def open_with(**config: object) -> tuple[Store, Counter[str]]:
        counts: Counter[str] = Counter()
        lock = threading.Lock()

        def record(name: str, amount: float) -> None:
            with lock:
                counts[name] += int(amount)

        opened.append(
            open_store("s3://bucket/faults", StorageConfig(endpoint_url=proxy.url, **config), record=record)  # type: ignore[arg-type]
        )
        return opened[-1], counts

    yield open_with
    for store in opened:
        store.close()


def first(num_requests: int, fault: Fault) -> Callable[[Request], Fault | None]:
    return lambda request: fault if request.number < num_requests else None


@pytest.mark.parametrize(
    ("fault", "config"),
    [
        (Fault(status=503), {}),
        (Fault(status=429), {}),
        (Fault(status=500), {}),
        (Fault(cut=0), {}),
        (Fault(cut=0.5), {}),
        (Fault(stall_s=30), {"read_timeout_s": 0.4}),
    ],
    ids=["503", "429", "500", "reset", "reset in the body", "stall"],
)
def test_a_passing_fault_is_survived_and_counted(
    proxy: FaultProxy, open_lake: Open, fault: Fault, config: dict[str, float]
) -> None:
    proxy.rule = first(2, fault)
    store, counts = open_lake(**config)
    assert store.read("x", 1000, 900_000) == DATA[1000:900_000]
    assert counts["retries"] == 2
    assert counts["requests.lake"] == 3 == len(proxy.requests)
    assert counts["throttled"] == (2 if fault.status in (429, 503) else 0)


def test_a_truncated_answer_is_asked_for_again(proxy: FaultProxy, open_lake: Open) -> None:
    proxy.rule = first(1, Fault(short=0.5))
    assert open_lake()[0].read("x", 0, 1000) == DATA[:1000]
    proxy.rule = lambda request: Fault(short=0.5)
    with pytest.raises(StorageError, match=r"s3://bucket/faults/x bytes \[0, 1000\): the store answered 500 of 1000"):
        open_lake()[0].read("x", 0, 1000)


def test_a_storm_of_503_is_sat_out(proxy: FaultProxy, open_lake: Open) -> None:
    store, counts = open_lake()
    began_s = time.monotonic()
    proxy.rule = lambda request: Fault(status=503) if time.monotonic() - began_s < 1.5 else None
    assert store.read("x") == DATA
    assert counts["throttled"] >= 2
    assert counts["hedges"] == 0
    # Backing off: far fewer requests than a tight loop would send.
    assert len(proxy.requests) < 40


def test_a_slow_drip_ends_at_the_deadline_by_name(proxy: FaultProxy, open_lake: Open) -> None:
    proxy.rule = lambda request: Fault(rate=20_000)
    with within(5):
        with pytest.raises(StorageTimeoutError, match=r"cannot read s3://bucket/faults/x: no answer within"):
            open_lake(request_timeout_s=1.0, hedge=False)[0].read("x", 0, 500_000)


def test_one_slow_answer_is_overtaken_by_its_hedge(proxy: FaultProxy, open_lake: Open) -> None:
    store, counts = open_lake()
    for _ in range(32):
        store.read("x", 0, 1000)
    victim = len(proxy.requests)
    proxy.rule = lambda request: Fault(delay_s=20) if request.number == victim else None
    with within(10):
        assert store.read("x", 0, 1000) == DATA[:1000]
    assert counts["hedges_won"] >= 1
    assert counts["retries"] == 0


def test_hedges_fall_to_none_when_every_request_is_slow(proxy: FaultProxy, open_lake: Open) -> None:
    store, counts = open_lake()
    for _ in range(32):
        store.read("x", 0, 1000)
    before = counts["hedges"]
    proxy.latency_s = 0.03
    for _ in range(32):
        store.read("x", 0, 1000)
    assert counts["hedges"] - before <= 4
    settled = counts["hedges"]
    for _ in range(24):
        store.read("x", 0, 1000)
    assert counts["hedges"] - settled <= 2


def test_a_hedge_that_fails_leaves_the_first_answer(proxy: FaultProxy, open_lake: Open) -> None:
    store, counts = open_lake()
    for _ in range(32):
        store.read("x", 0, 1000)
    victim = len(proxy.requests)

    def rule(request: Request) -> Fault | None:
        if request.number == victim:
            return Fault(delay_s=1.0)
        return Fault(cut=0) if request.number == victim + 1 else None

    proxy.rule = rule
    assert store.read("x", 0, 1000) == DATA[:1000]
    assert counts["hedges"] >= 1
    assert counts["retries"] == 0


def test_an_object_replaced_between_two_parts_is_an_error_with_url_and_range(
    filled: S3Server, proxy: FaultProxy, open_lake: Open
) -> None:
    direct = open_store("s3://bucket/faults", StorageConfig(endpoint_url=filled.endpoint_url))
    direct.put("changing", DATA * 20)

    replaced_after_s = 0.5 * slowness()

    def rule(request: Request) -> Fault | None:
        # The second part waits until the object has been replaced.
        is_first = request.headers.get("range", "bytes=0-").startswith("bytes=0-")
        return None if is_first else Fault(delay_s=min(3 * replaced_after_s, 8.0))

    proxy.rule = rule
    replacing = threading.Timer(replaced_after_s, lambda: direct.put("changing", bytes(reversed(DATA)) * 20))
    replacing.start()
    try:
        with pytest.raises(StorageError, match=r"faults/changing bytes \[8388608, .*replaced while being read.*ETag"):
            open_lake()[0].read("changing", 0, 20 << 20)
    finally:
        replacing.join()
        direct.close()


def test_nobody_listens_is_an_error_within_the_retries() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        store = open_store("s3://bucket/x", StorageConfig(endpoint_url=url, retries=2))
        with pytest.raises(
            StorageError, match=r"cannot look up s3://bucket/x/y.*error sending request.*check host, port"
        ):
            store.head("y")
        store.close()


def test_a_host_without_a_name_is_an_error_within_the_retries() -> None:
    store = open_store("http://no-such-host.invalid/set", StorageConfig(retries=1))
    with pytest.raises(StorageError, match=r"no-such-host\.invalid/set/y"):
        store.read("y", 0, 10)
    store.close()


def test_close_ends_a_read_that_backs_off(proxy: FaultProxy, open_lake: Open) -> None:
    proxy.rule = lambda request: Fault(status=503)
    store, counts = open_lake(retries=1000)
    outcome: list[BaseException] = []

    def read() -> None:
        try:
            store.read("x", 0, 10)
        except ClosedError as error:
            outcome.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    wait_until(lambda: counts["retries"] >= 3, "three retries")
    with within(2):
        store.close()
        reader.join(60)
        assert isinstance(outcome[0], ClosedError)


def test_a_store_is_refused_behind_a_fork(tmp_path: Path) -> None:
    program = (
        "import os, sys\nfrom dalipipe.storage import open_store\nfrom dalipipe.errors import StorageError\n"
        "store = open_store('memory://fork')\nstore.put('x', b'1')\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    try:\n        store.read('x')\n    except StorageError as error:\n"
        "        os._exit(0 if 'before a fork' in str(error) else 1)\n    os._exit(2)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        check=False,
        timeout=60,
        cwd=Path(__file__).parents[3],
        env=dict(os.environ),
    )
    assert done.returncode == 0
