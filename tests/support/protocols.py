"""Small fakes of two protocols that no server in the registries speaks: WebHDFS, and Alluxio's page service.

They are fakes: they show that our side of the protocol works, not that a real cluster agrees.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit


class _Quiet(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        pass


class _Base(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        pass

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextmanager
def _running(handler: type[_Base]) -> Iterator[int]:
    server = _Quiet(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


@contextmanager
def web_hdfs() -> Iterator[int]:
    """A name node and data node in one, over a dict of files; gives the port."""
    files: dict[str, bytes] = {}
    lock = threading.Lock()

    def children(path: str) -> dict[str, dict[str, Any]]:
        prefix = path.rstrip("/") + "/"
        found: dict[str, dict[str, Any]] = {}
        for name, data in files.items():
            if name.startswith(prefix):
                first, _, rest = name[len(prefix) :].partition("/")
                found[first] = status(first, None if rest else data)
        return found

    def status(suffix: str, data: bytes | None) -> dict[str, Any]:
        kind = "DIRECTORY" if data is None else "FILE"
        return {"pathSuffix": suffix, "type": kind, "length": len(data or b""), "modificationTime": 1}

    class Handler(_Base):
        def handle_any(self) -> None:
            parts = urlsplit(self.path)
            query = {name.lower(): values[0] for name, values in parse_qs(parts.query).items()}
            path = unquote(parts.path).removeprefix("/webhdfs/v1").rstrip("/") or "/"
            size = int(self.headers.get("Content-Length") or 0)
            body = self.rfile.read(size)
            if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
                body = self.read_chunks()
            with lock:
                self.operate(query.get("op", "").upper(), path, query, body)

        do_GET = do_PUT = do_POST = do_DELETE = handle_any  # noqa: N815 - named by the base class

        def read_chunks(self) -> bytes:
            pieces = []
            while count := int(self.rfile.readline(), 16):
                pieces.append(self.rfile.read(count))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(pieces)

        def operate(self, op: str, path: str, query: dict[str, str], body: bytes) -> None:
            known = path in files or bool(children(path))
            if op in ("GETFILESTATUS", "LISTSTATUS", "OPEN") and not known:
                self.refuse(404, "FileNotFoundException", f"{path} does not exist")
            elif op == "GETFILESTATUS":
                self.say({"FileStatus": status("", files.get(path))})
            elif op == "LISTSTATUS":
                listed = [status("", files[path])] if path in files else list(children(path).values())
                self.say({"FileStatuses": {"FileStatus": listed}})
            elif op == "OPEN":
                start = int(query.get("offset", 0))
                stop = start + int(query["length"]) if "length" in query else None
                self.answer(200, files[path][start:stop])
            elif op == "MKDIRS":
                self.say({"boolean": True})
            elif op == "RENAME":
                target = query["destination"]
                done = path in files and target not in files
                if done:
                    files[target] = files.pop(path)
                self.say({"boolean": done})
            elif op == "DELETE":
                self.say({"boolean": files.pop(path, None) is not None})
            elif op in ("CREATE", "APPEND"):
                self.write(op, path, query, body)
            else:
                self.refuse(400, "UnsupportedOperationException", f"op={op}")

        def write(self, op: str, path: str, query: dict[str, str], body: bytes) -> None:
            if "step" not in query:
                # The name node sends the client on to a data node.
                host = self.headers["Host"]
                self.answer(307, Location=f"http://{host}{self.path}&step=2")
            elif op == "CREATE":
                files[path] = body
                self.answer(201)
            else:
                files[path] = files.get(path, b"") + body
                self.answer(200)

        def say(self, value: dict[str, Any]) -> None:
            self.answer(200, json.dumps(value).encode(), Content_Type="application/json")

        def refuse(self, code: int, kind: str, message: str) -> None:
            body = {"RemoteException": {"exception": kind, "message": message}}
            self.answer(code, json.dumps(body).encode(), Content_Type="application/json")

    with _running(Handler) as port:
        yield port
