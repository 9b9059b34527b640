"""A web server with ranges that misbehaves on request."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


class WebServer:
    """Serves `objects` (by path without the leading slash) on a loopback port.

    faults: by path, what the next answers to it do, first in first out: an int is an HTTP status, `"cut"` sends half
    of the promised body and hangs up, `"short"` answers half of the range as if it were all, `"stall"` sends half
    and waits until `stop`. delay_s: how long each answer takes.
    """

    def __init__(self, objects: Mapping[str, bytes]) -> None:
        self.objects = dict(objects)
        self.faults: dict[str, list[int | str]] = {}
        self.requests: list[tuple[str, str]] = []
        self.delay_s = 0.0
        self.delays_s: list[float] = []  # what each delay came to
        self.stopping = threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                server._answer(self, with_body=True)

            def do_HEAD(self) -> None:
                server._answer(self, with_body=False)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
                pass

        class Quiet(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: object, client_address: object) -> None:
                pass  # clients that hang up early are part of the tests

        self._http = Quiet(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the server and every stalled answer."""
        self.stopping.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join(5)

    def _answer(self, handler: BaseHTTPRequestHandler, *, with_body: bool) -> None:
        path = unquote(urlsplit(handler.path).path).lstrip("/")
        self.requests.append((handler.command, path))
        if self.delay_s:
            began_s = time.perf_counter()
            self.stopping.wait(self.delay_s)
            self.delays_s.append(time.perf_counter() - began_s)
        faults = self.faults.get(path, [])
        fault = faults.pop(0) if faults else None
        if isinstance(fault, int):
            self._send(handler, fault, {}, b"", "")
        elif path not in self.objects:
            self._send(handler, 404, {}, b"", "")
        else:
            self._send_object(handler, self.objects[path], with_body, fault or "")

    def _send_object(self, handler: BaseHTTPRequestHandler, data: bytes, with_body: bool, fault: str) -> None:
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", handler.headers.get("Range", ""))
        status, headers, body = 200, {"ETag": f'"{len(data)}"', "Accept-Ranges": "bytes"}, data
        if wanted:
            start, stop = int(wanted[1]), min(int(wanted[2] or len(data)) + 1, len(data))
            if start >= len(data):
                self._send(handler, 416, {"Content-Range": f"bytes */{len(data)}"}, b"", "")
                return
            stop = start + (stop - start) // 2 if fault == "short" else stop
            status, body = 206, data[start:stop]
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
        headers["Content-Length"] = str(len(body))
        headers["Last-Modified"] = "Thu, 01 Jan 2026 00:00:00 GMT"
        self._send(handler, status, headers, body if with_body else b"", fault)

    def _send(
        self, handler: BaseHTTPRequestHandler, status: int, headers: dict[str, str], body: bytes, fault: str
    ) -> None:
        handler.send_response(status)
        for name, value in {"Content-Length": "0", **headers}.items():
            handler.send_header(name, value)
        handler.end_headers()
        broken = fault in ("cut", "stall")
        handler.wfile.write(body[: len(body) // 2] if broken else body)
        if broken:
            handler.wfile.flush()
            handler.close_connection = True
        if fault == "stall":
            self.stopping.wait(60)


@contextmanager
def web_server(objects: Mapping[str, bytes]) -> Iterator[WebServer]:
    """Runs a `WebServer` for the block."""
    server = WebServer(objects)
    try:
        yield server
    finally:
        server.stop()
