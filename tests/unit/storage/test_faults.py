"""A web server that fails on purpose: what recovers, what does not, and how long it takes."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from dalipipe.errors import (
    AccessDeniedError,
    ClosedError,
    ConfigError,
    DalipipeError,
    NoSpaceError,
    StorageError,
    StorageTimeoutError,
)
from dalipipe.storage import StorageConfig, Store, open_store
from dalipipe.storage.transport import Transport, discard
from tests.support.host import within
from tests.support.waiting import wait_until
from tests.support.webserver import WebServer, web_server

DATA = bytes(range(256)) * 64


@pytest.fixture
def server() -> Iterator[WebServer]:
    with web_server({"x": DATA}) as server:
        yield server


@pytest.fixture
def open_at(server: WebServer) -> Iterator[Callable[..., Store]]:
    opened: list[Store] = []

    def open_with(**config: float) -> Store:
        opened.append(open_store(server.url, StorageConfig(**config)))  # type: ignore[arg-type]
        return opened[-1]

    yield open_with
    for store in opened:
        store.close()


@pytest.mark.parametrize("faults", [[503, 503], [500], [429], ["cut"], ["cut", 503], ["short"]])
def test_passing_faults_are_survived(server: WebServer, open_at: Callable[..., Store], faults: list[int | str]) -> None:
    server.faults["x"] = list(faults)
    assert bytes(open_at(retries=4).read("x", 10, 5000)) == DATA[10:5000]
    assert len(server.requests) == len(faults) + 1


def test_short_answer_twice_is_an_error_with_url_and_range(server: WebServer, open_at: Callable[..., Store]) -> None:
    server.faults["x"] = ["short"] * 9
    with pytest.raises(StorageError, match=r"/x bytes \[10, 5000\): the store answered \d+ of 4990 bytes, twice"):
        open_at(retries=4).read("x", 10, 5000)
    assert len(server.requests) == 2


def test_short_answer_never_touches_the_buffer_half_way(server: WebServer, open_at: Callable[..., Store]) -> None:
    server.faults["x"] = ["short"] * 9
    buffer = bytearray(100)
    with pytest.raises(StorageError):
        open_at(retries=0).read("x", 10, 110, into=memoryview(buffer))
    assert buffer == bytearray(100)


@pytest.mark.parametrize(
    ("status", "kind"), [(403, AccessDeniedError), (401, AccessDeniedError), (507, NoSpaceError), (503, StorageError)]
)
def test_lasting_faults_are_typed_and_short(
    server: WebServer, open_at: Callable[..., Store], status: int, kind: type[StorageError]
) -> None:
    server.faults["x"] = [status] * 9
    with pytest.raises(kind, match=f"{server.url}/x") as caught:
        open_at(retries=1).read("x", 0, 100)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500
    assert (status == 503) == ("storage.retries" in str(caught.value))
    assert caught.value.__cause__ is not None


def test_stall_is_read_again_after_the_read_timeout(server: WebServer, open_at: Callable[..., Store]) -> None:
    server.faults["x"] = ["stall"]
    assert bytes(open_at(retries=2, read_timeout_s=0.3).read("x", 0, 1000)) == DATA[:1000]


def test_stall_that_the_client_gives_up_is_a_timeout_too(server: WebServer, open_at: Callable[..., Store]) -> None:
    server.faults["x"] = ["stall"]
    with pytest.raises(StorageTimeoutError, match=rf"cannot read {server.url}/x.*read_timeout_s"):
        open_at(retries=0, read_timeout_s=0.3).read("x", 0, 1000)


def test_stall_that_lasts_ends_at_the_deadline_of_the_call(server: WebServer, open_at: Callable[..., Store]) -> None:
    server.faults["x"] = ["stall"] * 9
    with within(3):
        told = rf"cannot read {server.url}/x: no answer within 0\.[45] s; raise storage\.request_timeout_s"
        with pytest.raises(StorageTimeoutError, match=told):
            open_at(retries=9, read_timeout_s=60, request_timeout_s=0.5).read("x", 0, 1000)


def test_waiting_for_a_free_slot_counts_against_the_deadline(server: WebServer, open_at: Callable[..., Store]) -> None:
    """A read that waits for another one's place all its time is not given its time once more."""
    server.faults["x"] = ["stall"] * 9
    store = open_at(concurrency=1, retries=0, read_timeout_s=60, request_timeout_s=2.0)
    took_s: dict[str, float] = {}

    def read(name: str) -> None:
        began_s = time.monotonic()
        _expect(store, StorageTimeoutError)
        took_s[name] = time.monotonic() - began_s

    holder, second = (threading.Thread(target=read, args=(name,)) for name in ("holder", "second"))
    holder.start()
    wait_until(lambda: bool(server.requests))
    second.start()
    for thread in (holder, second):
        thread.join(30)
    # Beside each other on the same host, so that its load makes no difference: twice as long is what must not be.
    assert took_s["second"] < 1.5 * took_s["holder"]


def test_who_gets_no_place_is_told_so_and_asks_the_store_nothing() -> None:
    transport = Transport("memory://x", StorageConfig(concurrency=1), discard)
    asked: list[str] = []
    assert transport.limit.acquire(1.0)
    try:
        with pytest.raises(StorageTimeoutError, match="cannot read memory://x/y: 1 other requests kept the store busy"):
            transport.run(lambda: asked.append("y"), "read memory://x/y", timeout_s=0.1)
    finally:
        transport.limit.release()
        transport.close()
    assert asked == []


def test_close_frees_a_reader_that_waits(server: WebServer, open_at: Callable[..., Store]) -> None:
    server.faults["x"] = ["stall"]
    store = open_at(retries=0, read_timeout_s=60)
    outcome: list[BaseException | None] = []
    reader = threading.Thread(target=lambda: outcome.append(_expect(store, ClosedError)))
    reader.start()
    wait_until(lambda: bool(server.requests))
    with within(2):
        store.close()
        reader.join(60)
    assert isinstance(outcome[0], ClosedError)
    with pytest.raises(ClosedError, match="open it again"):
        store.read("x")


def test_nobody_listens() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        store = open_store(url, StorageConfig(retries=1, request_timeout_s=10))
        with pytest.raises(StorageError, match=f"cannot look up {url}/x"):
            store.head("x")
        store.close()


def test_malformed_endpoint_of_the_environment_is_an_error_not_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://a b:x")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    with pytest.raises((StorageError, ConfigError), match="s3://bucket"):
        open_store("s3://bucket/set", StorageConfig(retries=0)).head("x")


def _expect(store: Store, kind: type[Exception]) -> BaseException | None:
    try:
        store.read("x", 0, 10)
    except kind as error:
        return error
    return None


def _has(answers: list[int], least: int) -> bool:
    return len(answers) >= least


def test_reads_that_meet_close_are_told_of_it_and_of_nothing_else() -> None:
    """Whether a read waits for its place, for its answer, or counts what came."""
    ended: list[BaseException] = []

    def read_on(store: Store, answers: list[int]) -> None:
        try:
            while True:
                answers.append(len(store.read("x", 0, 1000)))
        except DalipipeError as error:
            ended.append(error)

    for number in range(20):
        answers: list[int] = []
        store = open_store(f"memory://closing-{number}", StorageConfig(concurrency=4))
        store.put("x", bytes(1000))
        readers = [threading.Thread(target=read_on, args=(store, answers)) for _ in range(8)]
        for reader in readers:
            reader.start()
        wait_until(partial(_has, answers, 10 + number), "answers to some reads")
        store.close()
        for reader in readers:
            reader.join(10)
    assert [repr(error) for error in ended if not isinstance(error, ClosedError)] == []
    assert len(ended) == 20 * 8
