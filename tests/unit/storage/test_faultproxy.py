"""The proxy that other tests see a misbehaving lake through."""

from __future__ import annotations

import gc
import logging
import socket
import struct
import time
from pathlib import Path

import pytest

from tests.support.faultproxy import FolderServer, fault_proxy


def connected(url: str, request: str, *, buffer_bytes: int = 0) -> socket.socket:
    """A client that has sent a request."""
    host, port = url.removeprefix("http://").split(":")
    client = socket.socket()
    if buffer_bytes:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
    client.connect((host, int(port)))
    client.sendall(f"{request} HTTP/1.1\r\nHost: test\r\n\r\n".encode())
    client.settimeout(30)
    return client


def test_a_request_whose_client_is_gone_is_not_lost_to_the_garbage_collector(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR), socket.create_server(("127.0.0.1", 0)) as behind:
        behind.settimeout(30)
        with fault_proxy(f"http://127.0.0.1:{behind.getsockname()[1]}") as proxy:
            client = connected(proxy.url, "GET /object")
            silent, _ = behind.accept()
            with silent:
                assert silent.recv(1024)
                client.close()
                for _ in range(5):  # until the proxy has seen it go
                    time.sleep(0.05)
                    gc.collect()
        assert not caplog.text


def test_bytes_of_a_broken_connection_go_to_no_other_that_has_its_number(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(b"L" * 8_000_000)
    (tmp_path / "small").write_bytes(b"s" * 400_000)
    server = FolderServer(tmp_path, rate=4e6)
    try:
        broken = connected(server.url, "GET /large", buffer_bytes=4096)
        assert broken.recv(16).startswith(b"HTTP/1.1")
        broken.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        broken.close()  # by a reset
        time.sleep(0.005)
        with connected(server.url, "GET /small") as other:
            answer = b""
            while len(body := answer.partition(b"\r\n\r\n")[2]) < 400_000 and (piece := other.recv(1 << 16)):
                answer += piece
        assert body == b"s" * 400_000
    finally:
        server.stop()
