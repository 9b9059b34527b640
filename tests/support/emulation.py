"""A lake in a process of its own, with the latency and the rate of a link, and a process that only reads from it."""

from __future__ import annotations

import http.client
import itertools
import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.support.faultproxy import Fault, FolderServer, Request, heavy_tail

LATENCY_S, RATE = 0.030, 100e6
_NUM_CONNECTIONS = 8
_PIECE_BYTES = 4 << 20


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
    sizes = {file.name: file.stat().st_size for file in sorted(folder.glob("*.tar"))}
    process = context.Process(target=_read_on, args=(url, sizes, rate), daemon=True)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join(10)


def _read_on(url: str, sizes: dict[str, int], rate: float) -> None:
    """Ends only with its process. One connection alone would mostly wait for first bytes, and never reach the rate."""
    spans = [(name, start) for name, size in sizes.items() for start in range(0, size, _PIECE_BYTES)]
    host = url.removeprefix("http://")
    with ThreadPoolExecutor(_NUM_CONNECTIONS) as threads:
        parts = [
            threads.submit(_read_part, host, spans[number::_NUM_CONNECTIONS], rate / _NUM_CONNECTIONS)
            for number in range(min(_NUM_CONNECTIONS, len(spans)))
        ]
        for part in parts:
            part.result()


def _read_part(host: str, spans: list[tuple[str, int]], rate: float) -> None:
    connection = http.client.HTTPConnection(host, timeout=30)
    buffer = memoryview(bytearray(_PIECE_BYTES))
    began_s, done = time.monotonic(), 0
    for name, start in itertools.cycle(spans):
        connection.request("GET", f"/{name}", headers={"Range": f"bytes={start}-{start + _PIECE_BYTES - 1}"})
        answer = connection.getresponse()
        while num_bytes := answer.readinto(buffer):
            done += num_bytes
        time.sleep(max(0.0, began_s + done / rate - time.monotonic()))
