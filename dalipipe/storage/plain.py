"""Ranges over plain HTTP/1.1: from the socket straight into memory that is used again.

A client with an event loop wakes up for every piece that the network brings, hands it to another thread and joins the
pieces at the end. Here the kernel does the waiting: one `recv` fills the buffer, and wakes nobody for less than 256 KiB
(SO_RCVLOWAT). That is all this client can do: whatever it does not know (an answer without a range, a redirect, a
refusal) it leaves to the full client, by returning None.
"""

from __future__ import annotations

import contextlib
import http.client
import re
import socket
import struct
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from dalipipe.storage.buffers import BufferPool

_WAKE_BYTES = 256 << 10
_HEAD_BYTES = 4 << 10
_MOST_HEAD_BYTES = 64 << 10
_IDLE_S = 15.0  # servers close connections that lie idle, most of them after 20 s or more
_MOST_REFUSALS = 3
# What these mean is plain without a look at the answer's body.
_PLAIN_STATES = frozenset({404, 408, 425, 429, 500, 502, 503, 504})
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(?:\d+|\*)")


class PlainHttpError(Exception):
    """The server has no such object, or could not answer just now. `status` is the number that it said."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status code: {status} {http.client.responses.get(status, '')}".rstrip())
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Bytes of a range, and the version of the object that they are of."""

    data: memoryview
    etag: str


class PlainReader:
    """Reads ranges of `http://` URLs over connections that are kept. Thread-safe; belongs to the process that made it.

    After three answers in a row that it does not know it stays out of the way for good.

    Args:
        connect_timeout_s: for a new connection.
        read_timeout_s: how long nothing may come.
        request_timeout_s: how long one answer may take in all.
    """

    def __init__(
        self, *, connect_timeout_s: float, read_timeout_s: float, request_timeout_s: float, buffers: BufferPool
    ) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._read_timeout_s = read_timeout_s
        self._request_timeout_s = request_timeout_s
        self._buffers = buffers
        self._lock = threading.Lock()
        self._idle: list[_Connection] = []
        self._busy: set[_Connection] = set()
        self._refusals = 0
        self._closed = False

    @property
    def is_of_use(self) -> bool:
        """Whether `get` would ask the server at all."""
        return self._refusals < _MOST_REFUSALS and not self._closed

    def get(self, url: str, start: int, stop: int) -> Part | int | None:
        """The bytes of [start, stop), start < stop; their number where the server has fewer; None where the answer is
        for a full client to get and to understand.

        Raises:
            PlainHttpError: 404, 408, 425, 429, 500, 502, 503 or 504.
            ConnectionError: there is no connection, or it broke.
            TimeoutError: a deadline passed.
        """
        if not self.is_of_use:
            return None
        parts = urlsplit(url)
        address = (parts.hostname or "", parts.port or 80)
        target = f"{parts.path or '/'}{'?' + parts.query if parts.query else ''}"
        request = (
            f"GET {target} HTTP/1.1\r\nHost: {parts.netloc}\r\nRange: bytes={start}-{stop - 1}\r\n"
            "Accept: */*\r\nAccept-Encoding: identity\r\nUser-Agent: dalipipe\r\n\r\n"
        ).encode("ascii")
        deadline_s = time.monotonic() + self._request_timeout_s
        connection, head = self._ask(address, request, deadline_s)
        keep = False
        try:
            if head.status in _PLAIN_STATES:
                keep = connection.skip(head, deadline_s)
                raise PlainHttpError(head.status)
            answer = self._body(connection, head, start, stop, deadline_s)
            keep = answer is not None and head.keeps
        finally:
            self._put(connection, keep=keep)
        self._refusals = self._refusals + 1 if answer is None else 0
        return answer

    def give_up(self) -> None:
        """Stays out of the way from now on."""
        self._refusals = _MOST_REFUSALS

    def close(self) -> None:
        """Ends all connections; answers under way break off. Idempotent."""
        with self._lock:
            self._closed = True
            for connection in self._busy:
                connection.interrupt()
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.end()

    def _ask(self, address: tuple[str, int], request: bytes, deadline_s: float) -> tuple[_Connection, _Head]:
        """Sends the request and waits for the head of its answer."""
        while True:
            connection = self._take(address)
            try:
                connection.send(request)
                return connection, connection.head(deadline_s)
            except BaseException as error:
                self._put(connection, keep=False)
                # A server may close a connection that it thinks idle while the next request is on its way.
                if not isinstance(error, ConnectionError) or not connection.was_used or connection.has_answered:
                    raise

    def _body(
        self, connection: _Connection, head: _Head, start: int, stop: int, deadline_s: float
    ) -> Part | int | None:
        found = _RANGE.fullmatch(head.fields.get("content-range", ""))
        if head.status != 206 or found is None or head.num_bytes is None or head.is_encoded:
            return None
        num_bytes = int(found[2]) + 1 - int(found[1])
        if int(found[1]) != start or head.num_bytes != num_bytes or num_bytes > stop - start:
            return None
        data = self._buffers.take(num_bytes)
        connection.fill(data, deadline_s)
        return Part(data=data, etag=head.fields.get("etag", "")) if num_bytes == stop - start else num_bytes

    def _take(self, address: tuple[str, int]) -> _Connection:
        """The connection that was used last, as the likeliest to be open still, else a new one."""
        oldest_s = time.monotonic() - _IDLE_S
        with self._lock:
            stale = [other for other in self._idle if other.idle_since_s < oldest_s]
            self._idle = [other for other in self._idle if other.idle_since_s >= oldest_s]
            near = [other for other in self._idle if other.address == address]
            if near:
                self._idle.remove(near[-1])
                self._busy.add(near[-1])
        for other in stale:
            other.end()
        if near:
            return near[-1]
        connection = _Connection(address, self._connect_timeout_s, self._read_timeout_s)
        with self._lock:
            self._busy.add(connection)
            closed = self._closed
        if closed:  # meanwhile, by somebody who did not see this one
            connection.interrupt()
        return connection

    def _put(self, connection: _Connection, *, keep: bool) -> None:
        with self._lock:
            self._busy.discard(connection)
            if keep and not self._closed:
                connection.was_used, connection.has_answered = True, False
                connection.idle_since_s = time.monotonic()
                self._idle.append(connection)
                return
        connection.end()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Head:
    """The head of an answer: its state and fields (names in lower case)."""

    status: int
    fields: Mapping[str, str]
    is_http_11: bool

    @property
    def num_bytes(self) -> int | None:
        """Bytes of the body, where the head says so."""
        text = self.fields.get("content-length", "")
        return int(text) if text.isdecimal() and "transfer-encoding" not in self.fields else None

    @property
    def is_encoded(self) -> bool:
        """Whether the body is not the bytes themselves."""
        return self.fields.get("content-encoding", "identity").lower() != "identity"

    @property
    def keeps(self) -> bool:
        """Whether the connection may be used again."""
        return self.is_http_11 and "close" not in self.fields.get("connection", "").lower()


class _Connection:
    """One connection and what came of an answer that was not taken yet. Used by one thread at a time; `end` by any."""

    __slots__ = (
        "_left",
        "_read_timeout_s",
        "_socket",
        "_wakes_at",
        "address",
        "has_answered",
        "idle_since_s",
        "was_used",
    )

    def __init__(self, address: tuple[str, int], connect_timeout_s: float, read_timeout_s: float) -> None:
        self.address = address
        self.was_used = self.has_answered = False
        self.idle_since_s = 0.0
        self._read_timeout_s = read_timeout_s
        self._left = b""
        self._wakes_at = 1
        try:
            self._socket = socket.create_connection(address, connect_timeout_s)
        except socket.gaierror as error:
            raise ConnectionError(f"the host {address[0]} is not known: {error.strerror}") from error
        except TimeoutError:
            raise TimeoutError(f"no connection to {address[0]}:{address[1]} within {connect_timeout_s:g} s") from None
        except OSError as error:
            raise ConnectionError(f"no connection to {address[0]}:{address[1]}: {error.strerror or error}") from error
        # The kernel's own deadlines: with Python's a socket does not block, and `recv` may not wait for all.
        self._socket.settimeout(None)
        seconds = max(read_timeout_s, 0.001)
        deadline = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, deadline)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, deadline)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, request: bytes) -> None:
        """Sends a request; raises TimeoutError and ConnectionError."""
        try:
            self._socket.sendall(request)
        except BlockingIOError:
            raise TimeoutError(f"a request was not taken within {self._read_timeout_s:g} s") from None

    def head(self, deadline_s: float) -> _Head:
        """Waits for the head of the answer; raises as `fill`."""
        buffer = memoryview(bytearray(_HEAD_BYTES))
        came = b""
        while b"\r\n\r\n" not in came:
            if len(came) > _MOST_HEAD_BYTES:
                raise ConnectionError(f"the head of an answer is longer than {_MOST_HEAD_BYTES} bytes")
            came += buffer[: self._receive(buffer, 0, deadline_s)].tobytes()
            self.has_answered = True
        text, _, self._left = came.partition(b"\r\n\r\n")
        first, *lines = text.decode("latin-1").split("\r\n")
        version, _, rest = first.partition(" ")
        if not version.startswith("HTTP/1.") or not rest[:3].isdecimal():
            raise ConnectionError(f"an answer begins with {first[:40]!r}, which is not HTTP/1.1")
        fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        return _Head(status=int(rest[:3]), fields=fields, is_http_11=version == "HTTP/1.1")

    def fill(self, target: memoryview, deadline_s: float) -> None:
        """Fills `target` with the next bytes of the body.

        Raises:
            TimeoutError: nothing came for the read timeout, or the deadline passed.
            ConnectionError: the connection broke, or was closed before the end.
        """
        at = min(len(self._left), len(target))
        target[:at] = self._left[:at]
        self._left = self._left[at:]
        while at < len(target):
            # When less than the mark is to come that would wake nobody, so the last piece is waited for as usual.
            bulk = len(target) - at - _WAKE_BYTES
            self._wake_at(_WAKE_BYTES if bulk > 0 else 1)
            piece = target[at : at + bulk] if bulk > 0 else target[at:]
            at += self._receive(piece, socket.MSG_WAITALL, deadline_s)

    def skip(self, head: _Head, deadline_s: float) -> bool:
        """Reads a short body away; whether the connection may be used again."""
        if head.num_bytes is None or head.num_bytes > _MOST_HEAD_BYTES or not head.keeps:
            return False
        try:
            self.fill(memoryview(bytearray(head.num_bytes)), deadline_s)
        except OSError:
            return False
        return True

    def interrupt(self) -> None:
        """Breaks the connection off; the thread that waits for it is told, and ends it."""
        with contextlib.suppress(OSError):  # it is down already
            self._socket.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        """Closes the connection."""
        self._socket.close()

    def _receive(self, target: memoryview, flags: int, deadline_s: float) -> int:
        try:
            num_bytes = self._socket.recv_into(target, 0, flags)
        except BlockingIOError:
            raise TimeoutError(f"nothing came for {self._read_timeout_s:g} s") from None
        except OSError as error:
            if isinstance(error, ConnectionError):
                raise
            raise ConnectionError(f"the connection broke: {error.strerror or error}") from error
        if not num_bytes:
            raise ConnectionResetError("the connection was closed before the end of the answer")
        if time.monotonic() > deadline_s:
            raise TimeoutError("the answer took longer than storage.request_timeout_s")
        return num_bytes

    def _wake_at(self, num_bytes: int) -> None:
        if num_bytes != self._wakes_at:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)
            self._wakes_at = num_bytes
