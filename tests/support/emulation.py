"""A lake in a process of its own, with the latency and the rate of a link, and a process that only reads from it."""

from __future__ import annotations

import multiprocessing
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.support.faultproxy import Fault, FolderServer, Request, heavy_tail

LATENCY_S, RATE = 0.030, 100e6


class Lake:
    """The server process; `mode` changes how it behaves."""

    def __init__(self, folder: Path, *, latency_s: float = LATENCY_S, rate: float = RATE) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(folder, latency_s, rate, theirs), daemon=True)
        self._process.start()
        self.url = str(self._answer())

    def mode(self, name: str, value: float = 0.0) -> int:
        """`even`, `tail` (heavy), or `slow` (every answer takes `value` seconds); returns the requests so far."""
        self._pipe.send((name, value))
        return int(self._answer())

    def _answer(self) -> Any:
        if not self._pipe.poll(60):
            raise TimeoutError("the server process did not answer within 60 s")
        return self._pipe.recv()

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.join(10)


def _serve(folder: Path, latency_s: float, rate: float, pipe: Connection) -> None:
    server = FolderServer(folder, latency_s=latency_s, rate=rate)
    pipe.send(server.url)
    while True:
        name, value = pipe.recv()
        if name == "tail":
            server.latency_s, server.rule = 0.0, heavy_tail(7, median_s=0.06)
        elif name == "slow":
            server.latency_s, server.rule = value, _nothing
        else:
            server.latency_s, server.rule = latency_s, _nothing
        pipe.send(len(server.requests))


def _nothing(_request: Request) -> Fault | None:
    return None


@contextmanager
def lake(folder: Path, **how: float) -> Iterator[Lake]:
    """Runs the server for the block."""
    server = Lake(folder, **how)
    try:
        yield server
    finally:
        server.close()


@contextmanager
def reader(url: str, folder: Path, rate: float) -> Iterator[None]:
    """Another process that reads the shards from the lake at `rate` bytes a second and keeps nothing of them."""
    context = multiprocessing.get_context("spawn")
    names = sorted(file.name for file in folder.glob("*.tar"))
    sizes = [(folder / name).stat().st_size for name in names]
    process = context.Process(target=_read_on, args=(url, names, sizes, rate), daemon=True)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join(10)


def _read_on(url: str, names: list[str], sizes: list[int], rate: float) -> None:
    port = int(url.rpartition(":")[2])
    buffer = memoryview(bytearray(1 << 20))
    connection = socket.create_connection(("127.0.0.1", port), 30)
    began_s, done = time.monotonic(), 0
    while True:
        for name, size in zip(names, sizes, strict=True):
            for start in range(0, size, len(buffer)):
                num_bytes = min(len(buffer), size - start)
                span = f"bytes={start}-{start + num_bytes - 1}"
                connection.sendall(f"GET /{name} HTTP/1.1\r\nHost: lake\r\nRange: {span}\r\n\r\n".encode())
                head = b""
                while not head.endswith(b"\r\n\r\n"):
                    head += connection.recv(1)
                # Not MSG_WAITALL: with a deadline Python's sockets do not block, and a part would be taken for the whole.
                came = 0
                while came < num_bytes:
                    came += connection.recv_into(buffer[came:num_bytes])
                done += num_bytes
                time.sleep(max(0.0, began_s + done / rate - time.monotonic()))
