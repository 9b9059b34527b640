"""Ranges by sockets of our own: the same bytes as by the full client, and the same errors, for less."""

from __future__ import annotations

import os
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from dalipipe.errors import ClosedError, ObjectNotFoundError, StorageError, StorageTimeoutError
from dalipipe.storage import StorageConfig, Store, open_store
from dalipipe.storage.buffers import BufferPool
from dalipipe.storage.plain import Part, PlainReader
from dalipipe.world import has_http_proxy
from tests.support.faultproxy import Fault, FolderServer, fault_proxy
from tests.support.seaweed import S3Server
from tests.support.waiting import wait_until

DATA = os.urandom(3 << 20)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FolderServer]:
    (tmp_path / "a b").mkdir()
    (tmp_path / "a b" / "x%.tar").write_bytes(DATA)
    server = FolderServer(tmp_path)
    yield server
    server.stop()


@pytest.fixture
def open_at(server: FolderServer) -> Iterator[Callable[..., tuple[Store, Counter[str]]]]:
    opened: list[Store] = []

    def open_with(**config: object) -> tuple[Store, Counter[str]]:
        counts: Counter[str] = Counter()
        record = lambda name, amount: counts.update({name: amount})  # noqa: E731
        opened.append(open_store(server.url, StorageConfig(**config), record=record))  # type: ignore[arg-type]
        return opened[-1], counts

    yield open_with
    for store in opened:
        store.close()


Open = Callable[..., tuple[Store, Counter[str]]]
KEY = "a b/x%.tar"


def is_ours(server: FolderServer) -> list[bool]:
    return [request.headers.get("user-agent") == "dalipipe" for request in server.requests]


@pytest.mark.parametrize("plain", [True, False])
def test_ranges_of_all_sizes_are_the_objects_bytes(server: FolderServer, open_at: Open, plain: bool) -> None:
    store, _ = open_at(plain_http=plain)
    edge = 256 << 10  # where the socket begins to wake less often
    for start, stop in [
        (0, 1),
        (5, edge + 5),
        (5, edge + 6),
        (7, 2 * edge),
        (0, len(DATA)),
        (len(DATA) - 1, len(DATA)),
    ]:
        assert bytes(store.read(KEY, start, stop)) == DATA[start:stop]
    assert is_ours(server) == [plain] * 6


def test_many_threads_read_over_kept_connections_and_share_no_memory(server: FolderServer, open_at: Open) -> None:
    store, _ = open_at(hedge=False)
    spans = [(at, at + (300 << 10)) for at in range(0, 2 << 20, 50 << 10)]
    with ThreadPoolExecutor(6) as pool:
        held = list(pool.map(lambda span: store.read(KEY, *span), spans))
    assert [bytes(view) for view in held] == [DATA[start:stop] for start, stop in spans]


def test_ranges_above_8_mib_are_put_together(tmp_path: Path, server: FolderServer, open_at: Open) -> None:
    large = os.urandom(18 << 20)
    (tmp_path / "large").write_bytes(large)
    store, _ = open_at()
    into = memoryview(bytearray(17 << 20))
    assert store.read("large", 100, 100 + len(into), into=into) == large[100 : 100 + len(into)]
    assert is_ours(server) == [True] * 3


@pytest.mark.parametrize(
    ("fault", "config"),
    [
        (Fault(status=503), {}),
        (Fault(status=429, body=b"x" * 100_000), {}),
        (Fault(cut=0), {}),
        (Fault(cut=0.5), {}),
        (Fault(stall_s=60), {"read_timeout_s": 0.3}),
    ],
    ids=["503", "429 with a long body", "reset", "reset in the body", "stall"],
)
def test_what_passes_is_tried_again(
    server: FolderServer, open_at: Open, fault: Fault, config: dict[str, float]
) -> None:
    store, counts = open_at(hedge=False, **config)
    server.rule = lambda request: fault if request.number == 0 else None
    assert bytes(store.read(KEY, 10, 600_010)) == DATA[10:600_010]
    assert counts["retries"] == 1
    assert is_ours(server) == [True, True]


def test_objects_that_are_missing_cost_one_request_each_and_never_the_way(server: FolderServer, open_at: Open) -> None:
    store, _ = open_at()
    for _ in range(5):
        with pytest.raises(ObjectNotFoundError, match=r"/y: .*404.*check the URL"):
            store.read("y", 0, 10)
    assert bytes(store.read(KEY, 0, 5)) == DATA[:5]
    assert is_ours(server) == [True] * 6


def test_a_slow_drip_ends_with_the_deadline_of_the_request(server: FolderServer, open_at: Open) -> None:
    store, _ = open_at(request_timeout_s=1.0, hedge=False)
    server.rule = lambda request: Fault(rate=1000)
    with pytest.raises(StorageTimeoutError, match=r"x%25\.tar.*storage\.request_timeout_s"):
        store.read(KEY, 0, 1 << 20)


def test_nobody_listening_is_an_error_after_the_retries() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    store = open_store(f"http://127.0.0.1:{port}", StorageConfig(retries=1))
    try:
        with pytest.raises(StorageError, match=f"127.0.0.1:{port}/x: .*Connection refused"):
            store.read("x", 0, 10)
    finally:
        store.close()


def test_closing_ends_a_read_that_waits(server: FolderServer, open_at: Open) -> None:
    store, _ = open_at(hedge=False)
    server.rule = lambda request: Fault(stall_s=60)
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(store.read, KEY, 0, 1 << 20)
        wait_until(lambda: server.bytes_sent > 0, 30)
        store.close()
        with pytest.raises(ClosedError):
            read.result(30)
    wait_until(lambda: not [t for t in threading.enumerate() if t.name.startswith("dalipipe-storage")], 30)


def answers_of(*answers: bytes) -> tuple[str, threading.Thread]:
    """A server that gives these answers, one a connection, and closes each behind it."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with listener:
            for answer in answers:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(4096)
                    connection.sendall(answer)
                    connection.shutdown(socket.SHUT_WR)
                    with suppress(ConnectionResetError):  # the reader may hang up before it has read all
                        while connection.recv(4096):
                            pass

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return f"http://127.0.0.1:{listener.getsockname()[1]}/x", thread


@pytest.fixture
def reader() -> Iterator[PlainReader]:
    reader = PlainReader(connect_timeout_s=30, read_timeout_s=30, request_timeout_s=60, buffers=BufferPool())
    yield reader
    reader.close()


OK = b'HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 0-2/9\r\nContent-Length: 3\r\nETag: "e"\r\n\r\nabc'
NOT_OURS = [
    b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabcdefghi",
    b"HTTP/1.1 302 Found\r\nLocation: /y\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 1-3/9\r\nContent-Length: 3\r\n\r\nbcd",
    b"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 0-3/9\r\nContent-Length: 4\r\n\r\nabcd",
    b"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 0-2/9\r\nContent-Length: 2\r\n\r\nab",
    b"HTTP/1.1 206 Partial Content\r\nContent-Length: 3\r\n\r\nabc",
    b"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 0-2/9\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"3\r\nabc\r\n0\r\n\r\n",
    b"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 0-2/9\r\nContent-Length: 3\r\n"
    b"Content-Encoding: gzip\r\n\r\nabc",
]  # fmt: skip


@pytest.mark.parametrize("answer", NOT_OURS)
def test_an_answer_that_is_not_plainly_the_range_is_left_to_the_full_client(reader: PlainReader, answer: bytes) -> None:
    url, thread = answers_of(answer, OK)
    assert reader.get(url, 0, 3) is None
    assert reader.get(url, 0, 3) == Part(data=memoryview(b"abc"), etag='"e"')
    reader.close()
    thread.join(30)


def test_after_three_such_answers_the_server_is_asked_no_more(reader: PlainReader) -> None:
    url, thread = answers_of(*NOT_OURS[:3])
    assert [reader.get(url, 0, 3) for _ in range(3)] == [None] * 3
    thread.join(30)
    assert not reader.is_of_use
    assert reader.get(url, 0, 3) is None


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"", "closed before the end"),
        (b"SSH-2.0-x\r\n\r\n", "not HTTP/1.1"),
        (b"HTTP/1.1 206 " + b"x" * 100_000, "longer than"),
        (OK[:-1], "closed before the end"),
    ],
)
def test_a_broken_answer_is_a_broken_connection(reader: PlainReader, answer: bytes, words: str) -> None:
    url, _ = answers_of(answer)
    with pytest.raises(ConnectionError, match=words):
        reader.get(url, 0, 3)


def test_a_connection_that_the_server_closed_meanwhile_is_no_failure(reader: PlainReader) -> None:
    url, thread = answers_of(OK, OK)
    assert isinstance(reader.get(url, 0, 3), Part)
    assert isinstance(reader.get(url, 0, 3), Part)
    reader.close()
    thread.join(30)


def test_fewer_bytes_than_asked_for_are_counted(reader: PlainReader) -> None:
    url, _ = answers_of(OK)
    assert reader.get(url, 0, 5) == 3


def test_s3_without_tls_is_read_by_urls_that_its_client_signed(s3: S3Server) -> None:
    with fault_proxy(s3.endpoint_url) as proxy:
        store = open_store("s3://bucket/plain way", StorageConfig(endpoint_url=proxy.url))
        store.put("x +%.tar", DATA)
        before = len(proxy.requests)
        assert bytes(store.read("x +%.tar", 1000, 2_000_000)) == DATA[1000:2_000_000]
        assert bytes(store.read("x +%.tar", 5, 10)) == DATA[5:10]
        store.close()
    targets = [request.target for request in proxy.requests[before:]]
    assert len(targets) == 2
    assert all("X-Amz-Signature" in target for target in targets)


def test_a_store_that_refuses_signed_urls_is_read_by_the_full_client(s3: S3Server) -> None:
    with fault_proxy(s3.endpoint_url) as proxy:
        store = open_store("s3://bucket/refused", StorageConfig(endpoint_url=proxy.url))
        store.put("x", DATA)
        proxy.rule = lambda request: Fault(status=403) if "X-Amz-Signature" in request.target else None
        before = len(proxy.requests)
        for at in range(5):
            assert bytes(store.read("x", at, 1000)) == DATA[at:1000]
        store.close()
    refused = ["X-Amz-Signature" in request.target for request in proxy.requests[before:]]
    assert refused == [True, False] * 3 + [False, False]


def test_signed_urls_stand_in_no_error(s3: S3Server) -> None:
    with fault_proxy(s3.endpoint_url) as proxy:
        store = open_store("s3://bucket/secret", StorageConfig(endpoint_url=proxy.url, retries=1))
        proxy.rule = lambda request: Fault(status=503)
        with pytest.raises(StorageError, match="503") as failed:
            store.read("x", 0, 10)
        store.close()
    link: BaseException | None = failed.value
    while link is not None:
        assert "Amz" not in str(link)
        link = link.__cause__ or link.__context__


@pytest.mark.parametrize("name", ["http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"])
def test_where_there_is_a_proxy_the_full_client_goes_through_it(
    server: FolderServer, open_at: Open, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    assert has_http_proxy({name: "http://proxy:3128"})
    assert not has_http_proxy({"https_proxy": "http://proxy:3128", name: ""})
    monkeypatch.setenv(name, server.url)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    store, _ = open_at()
    assert bytes(store.read(KEY, 0, 5)) == DATA[:5]
    assert is_ours(server) == [False]


def test_memory_is_lent_again_when_the_last_view_of_it_is_dead() -> None:
    pool = BufferPool(idle_bytes=2 << 20)
    one = pool.take(1 << 20)
    one[:] = b"1" * (1 << 20)
    part = one[:4]
    del one
    other = pool.take(1 << 20)
    other[:] = b"2" * (1 << 20)
    assert bytes(part) == b"1111"
    assert pool.idle_bytes == 0
    del part, other
    assert pool.idle_bytes == 2 << 20
    again = pool.take((1 << 20) - 5)
    assert len(again) == (1 << 20) - 5
    assert again[0] in b"12"
    assert pool.idle_bytes == 1 << 20


def test_no_more_memory_lies_idle_than_it_may() -> None:
    pool = BufferPool(idle_bytes=3 << 20)
    held = [pool.take(1 << 20) for _ in range(8)]
    del held
    assert pool.idle_bytes == 3 << 20
