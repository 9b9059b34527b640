"""A proxy before a real HTTP or S3 server that adds latency, caps the rate and misbehaves on request.

One asyncio loop on a thread of its own. Each request is passed on whole and its answer is read whole, then sent as the
fault says, so that what the client sees does not depend on the server behind. The Host header is passed on unchanged,
which keeps S3 signatures valid.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tests.support.link import Link

_CHUNK_BYTES = 128 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What happens to one answer; the fields combine.

    delay_s: before the first byte. status: an error instead of the answer, with `body`. cut: the connection is reset
    after this share of the body (0 resets before any byte of the answer). short: the body ends cleanly after this
    share, with headers to match (`Content-Length`, `Content-Range`). stall_s: silence in the middle of the body. rate:
    bytes a second of this answer (slow drip).
    """

    delay_s: float = 0.0
    status: int = 0
    body: bytes = b""
    cut: float | None = None
    short: float | None = None
    stall_s: float = 0.0
    rate: float = 0.0
    flip: bool = False
    """One bit of the body is flipped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a fault rule sees: `number` counts from 0, `at_s` is the time since the proxy's start."""

    number: int
    at_s: float
    method: str
    target: str
    headers: dict[str, str]


Rule = Callable[[Request], Fault | None]


def s3_error(code: str) -> bytes:
    """The body of an S3 error answer."""
    return f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()


class FaultProxy:
    """Listens on a loopback port; `url` is its own, `rule` may be replaced at any time.

    Args:
        upstream: the server behind, `http://host:port`.
        latency_s: delay of every answer (a lognormal factor around it with `jitter`).
        rate: bytes a second over all connections together, shared evenly; 0 is unlimited.
    """

    def __init__(self, upstream: str, *, latency_s: float = 0.0, rate: float = 0.0) -> None:
        parts = urlsplit(upstream)
        self._upstream = (parts.hostname or "", parts.port or 80)
        self.latency_s = latency_s
        self.rate = rate
        self.rule: Rule = lambda request: None
        self.requests: list[Request] = []
        self.bytes_sent = 0
        self._link = Link()
        self._began_s = time.monotonic()
        self._loop = asyncio.new_event_loop()
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self._ending = False
        # The loop holds its tasks weakly: one that waits for the server behind, for a client that is gone, is nobody's.
        self._tasks: set[asyncio.Task[None] | None] = set()
        self._thread = threading.Thread(target=self._run, name="fault-proxy", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the proxy and every answer that is under way."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, sock=self._socket, limit=1 << 20))
        try:
            self._loop.run_forever()
        finally:
            server.close()
            self._loop.run_until_complete(self._end())
            self._loop.close()

    async def _end(self) -> None:
        self._ending = True
        # Connections that were just accepted get their task first: cancelled before its first line it closes nothing.
        for _ in range(5):
            await asyncio.sleep(0)
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for _, writer in self._idle:
            writer.transport.abort()
        await asyncio.sleep(0.01)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        self._tasks.add(task)
        with suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while (head := await _read_head(reader)) is not None:
                if not await self._exchange(head, reader, writer):
                    break
        writer.transport.abort() if self._ending else writer.close()
        self._tasks.discard(task)

    async def _exchange(self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        method, target, headers = _parse_head(head)
        body = await _read_body(reader, headers, method)
        request = Request(
            number=len(self.requests),
            at_s=time.monotonic() - self._began_s,
            method=method,
            target=target,
            headers=headers,
        )
        self.requests.append(request)
        fault = self.rule(request) or Fault()
        if body and self.rate:
            await self._pay(len(body))
        await asyncio.sleep(self.latency_s + fault.delay_s)
        if fault.cut == 0:
            writer.transport.abort()
            return False
        if fault.status:
            writer.write(
                f"HTTP/1.1 {fault.status} Fault\r\nContent-Length: {len(fault.body)}\r\n"
                "Content-Type: application/xml\r\n\r\n".encode()
                + (fault.body if method != "HEAD" else b"")
            )
            await writer.drain()
            return True
        answer_head, answer = await self._forward(head, body, method)
        return await self._send(writer, answer_head, answer, fault)

    async def _forward(self, head: bytes, body: bytes, method: str) -> tuple[bytes, bytes | _FileRange]:
        for attempt in range(2):
            reader, writer = self._idle.pop() if self._idle and attempt == 0 else await self._connect()
            try:
                writer.write(head + body)
                await writer.drain()
                answer_head = await _read_head(reader)
                while answer_head is not None and answer_head.startswith(b"HTTP/1.1 100"):
                    answer_head = await _read_head(reader)
                if answer_head is None:
                    raise ConnectionResetError
                status, headers = int(answer_head.split(b" ", 2)[1]), _parse_head(answer_head)[2]
                no_body = method == "HEAD" or status in (204, 304)
                answer = b"" if no_body else await _read_body(reader, headers, "ANSWER")
            except asyncio.CancelledError:
                writer.transport.abort()
                raise
            except (OSError, asyncio.IncompleteReadError):
                writer.close()
                if attempt:
                    raise
                continue
            if headers.get("connection", "").lower() == "close":
                writer.close()
            else:
                self._idle.append((reader, writer))
            return answer_head, answer
        raise AssertionError("unreachable")

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(*self._upstream, limit=16 << 20)

    async def _send(self, writer: asyncio.StreamWriter, head: bytes, body: bytes | _FileRange, fault: Fault) -> bool:
        if isinstance(body, _FileRange):
            if replace(fault, delay_s=0.0) == Fault():
                await self._send_file(writer, head, body)
                return True
            body = body.read()
        if b"chunked" in head.lower():
            head = _with_length(head, len(body))
        if fault.short is not None:
            body = body[: int(len(body) * fault.short)]
            head = _with_length(head, len(body))
        if fault.flip and body:
            middle = len(body) // 2
            body = body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :]
        writer.write(head)
        stop = len(body) if fault.cut is None else int(len(body) * fault.cut)
        sent, stalled = 0, False
        view = memoryview(body)
        chunk_bytes = _CHUNK_BYTES if not fault.rate else max(1, int(fault.rate / 10))
        while sent < stop:
            if fault.stall_s and not stalled and sent >= len(body) // 2:
                stalled = True
                await asyncio.sleep(fault.stall_s)
            chunk = view[sent : min(stop, sent + chunk_bytes)]
            if self.rate:
                await self._pay(len(chunk))
            if fault.rate:
                await asyncio.sleep(len(chunk) / fault.rate)
            writer.write(chunk)
            await writer.drain()
            sent += len(chunk)
            self.bytes_sent += len(chunk)
        if fault.cut is not None:
            writer.transport.abort()
            return False
        await writer.drain()
        return True

    async def _send_file(self, writer: asyncio.StreamWriter, head: bytes, body: _FileRange) -> None:
        """From the page cache to the socket: a server that costs the machine as little as can be."""
        writer.write(head)
        await writer.drain()
        to = writer.get_extra_info("socket").fileno()
        with body.path.open("rb") as file:
            if self.rate:
                at = body.start

                def send(num_bytes: int) -> int:
                    nonlocal at
                    if writer.transport.is_closing():  # its number may be another connection's by now
                        raise ConnectionResetError
                    try:
                        sent = os.sendfile(to, file.fileno(), at, num_bytes)
                    except BlockingIOError:
                        return 0
                    at += sent
                    return sent

                await self._link.carry(body.stop - body.start, self.rate, send)
            else:
                await self._loop.sendfile(writer.transport, file, body.start, body.stop - body.start)
        self.bytes_sent += body.stop - body.start

    async def _pay(self, num_bytes: int) -> None:
        await self._link.carry(num_bytes, self.rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class _FileRange:
    """Bytes [start, stop) of a file, not read yet."""

    path: Path
    start: int
    stop: int

    def read(self) -> bytes:
        with self.path.open("rb") as file:
            return os.pread(file.fileno(), self.stop - self.start, self.start)


class FolderServer(FaultProxy):
    """The same faults without a server behind: files of a folder, by range, as an object store would answer."""

    def __init__(self, folder: Path, *, latency_s: float = 0.0, rate: float = 0.0) -> None:
        self._folder = folder
        super().__init__("http://folder", latency_s=latency_s, rate=rate)

    async def _forward(self, head: bytes, body: bytes, method: str) -> tuple[bytes, bytes | _FileRange]:
        _, target, headers = _parse_head(head)
        path = self._folder / unquote(urlsplit(target).path).lstrip("/")
        if not path.is_file():
            return b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", b""
        size = path.stat().st_size
        status, start, stop, extra = "200 OK", 0, size, ""
        if wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", headers.get("range", "")):
            start, stop = int(wanted[1]), min(int(wanted[2] or size) + 1, size)
            status, extra = "206 Partial Content", f"Content-Range: bytes {start}-{stop - 1}/{size}\r\n"
        answer = (
            f'HTTP/1.1 {status}\r\nContent-Length: {stop - start}\r\n{extra}ETag: "{size:x}"\r\n'
            "Accept-Ranges: bytes\r\nLast-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\n\r\n"
        )
        if method == "HEAD":
            return answer.encode(), b""
        return answer.encode(), _FileRange(path=path, start=start, stop=stop)


@contextmanager
def fault_proxy(upstream: str, *, latency_s: float = 0.0, rate: float = 0.0) -> Iterator[FaultProxy]:
    """Runs a `FaultProxy` for the block."""
    proxy = FaultProxy(upstream, latency_s=latency_s, rate=rate)
    try:
        yield proxy
    finally:
        proxy.stop()


def heavy_tail(seed: int, *, median_s: float, sigma: float = 0.6, pareto_share: float = 0.002) -> Rule:
    """Lognormal latency around `median_s`, and for a small share Pareto(1 s, alpha 1.5), at most 30 s."""
    source = random.Random(seed)

    def rule(request: Request) -> Fault | None:
        if request.method != "GET":
            return None
        if source.random() < pareto_share:
            return Fault(delay_s=min(30.0, source.paretovariate(1.5)))
        return Fault(delay_s=source.lognormvariate(0.0, sigma) * median_s)

    return rule


async def _read_head(reader: asyncio.StreamReader) -> bytes | None:
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None


def _parse_head(head: bytes) -> tuple[str, str, dict[str, str]]:
    first, *lines = head.decode("latin-1").rstrip().split("\r\n")
    words = first.split(" ")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return words[0], words[1], headers


async def _read_body(reader: asyncio.StreamReader, headers: dict[str, str], method: str) -> bytes:
    if "chunked" in headers.get("transfer-encoding", "").lower():
        pieces = []
        while size := int((await reader.readline()).split(b";")[0], 16):
            pieces.append(await reader.readexactly(size))
            await reader.readline()
        await reader.readline()
        return b"".join(pieces)
    length = headers.get("content-length")
    if length is not None:
        return await reader.readexactly(int(length)) if int(length) else b""
    return await reader.read() if method == "ANSWER" else b""


def _with_length(head: bytes, num_bytes: int) -> bytes:
    lines = head.rstrip().split(b"\r\n")
    kept = []
    for line in lines:
        name, _, value = line.partition(b":")
        if name.lower() in (b"content-length", b"transfer-encoding"):
            continue
        if name.lower() == b"content-range":
            span, _, total = value.strip().partition(b"/")
            start = int(span.split(b" ")[1].split(b"-")[0])
            line = b"Content-Range: bytes %d-%d/%s" % (start, start + num_bytes - 1, total)  # noqa: PLW2901
        kept.append(line)
    return b"\r\n".join([*kept, b"Content-Length: %d" % num_bytes]) + b"\r\n\r\n"
