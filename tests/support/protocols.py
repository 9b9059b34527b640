"""Small fakes of two protocols that no server in the registries speaks: WebHDFS, and an Alluxio worker's.

They are fakes: they show that our side of the protocol works, not that a real cluster agrees.
"""

from __future__ import annotations

import json
import os
import socket
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


class Base(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # head and body are two writes: 40 ms an answer else

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        pass

    def read_chunks(self) -> bytes:
        pieces = []
        while count := int(self.rfile.readline(), 16):
            pieces.append(self.rfile.read(count))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(pieces)

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextmanager
def running(handler: type[Base], host: str = "127.0.0.1", port: int = 0) -> Iterator[int]:
    server = _Quiet((host, port), handler)
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

    class Handler(Base):
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

    with running(Handler) as port:
        yield port


@contextmanager
def alluxio_worker(ufs: str) -> Iterator[AlluxioWorker]:
    """One worker over a dict of files below `ufs`, on an address of 127/8 of its own: its client reads from port 29998,
    whatever it is told."""
    worker = AlluxioWorker(ufs)
    number = os.getpid() % 65536
    worker.host = f"127.{100 + threading.get_native_id() % 100}.{number // 256}.{number % 255 + 1}"
    with running(worker.http_handler(), worker.host) as port, running(worker.data_handler(), worker.host, 29998):
        worker.port = port
        yield worker


class AlluxioWorker:
    """What alluxiofs 1.1 asks of a worker: `/v1/node`, `info`, `files`, `chunk`, `mkdir`, `mv`, `rm`, and on its data
    port byte ranges of files by their path in Alluxio (here: `/mnt` and the path below the under store)."""

    def __init__(self, ufs: str) -> None:
        self.ufs = ufs
        self.host, self.port = "", 0
        self.files: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.faults: list[int] = []
        """Statuses of the next reads of data; -1 resets the connection."""
        self._lock = threading.Lock()

    def http_handler(self) -> type[Base]:
        worker = self

        class Handler(Base):
            def do_GET(self) -> None:
                parts = urlsplit(self.path)
                worker.requests.append(parts.path)
                path = {name: values[0] for name, values in parse_qs(parts.query).items()}.get("path", "")
                if parts.path == "/v1/node":
                    self.say({"Host": worker.host, "HttpServerPort": worker.port})
                elif worker.status(path) is None:
                    self.answer(500, f"FileDoesNotExist: {path}".encode())
                elif parts.path == "/v1/info":
                    self.say([worker.status(path)])
                elif parts.path == "/v1/files":
                    self.say(worker.children(path))
                else:
                    self.answer(404, b"no such call")

            def do_POST(self) -> None:
                parts = urlsplit(self.path)
                worker.requests.append(parts.path)
                query = {name: values[0] for name, values in parse_qs(parts.query).items()}
                body = self.read_chunks() if self.headers.get("Transfer-Encoding") == "chunked" else b""
                verb = parts.path.split("/")[2]
                with worker._lock:
                    if verb == "chunk":
                        worker.files[query["ufsFullPath"]] = body
                    elif verb == "mv" and query["srcPath"] in worker.files and query["dstPath"] not in worker.files:
                        worker.files[query["dstPath"]] = worker.files.pop(query["srcPath"])
                    elif verb == "rm":
                        worker.files.pop(query["ufsFullPath"], None)
                    elif verb != "mkdir":
                        self.answer(500, f"{verb} failed".encode())
                        return
                self.answer(200, b"true")

            def say(self, value: object) -> None:
                self.answer(200, json.dumps(value).encode(), Content_Type="application/json")

        return Handler

    def data_handler(self) -> type[Base]:
        worker = self

        class Handler(Base):
            def do_GET(self) -> None:
                fault = worker.faults.pop(0) if worker.faults else 0
                path = unquote(urlsplit(self.path).path)
                data = worker.files.get(worker.ufs + path.removeprefix("/mnt"))
                start, stop = (int(end) for end in self.headers["Range"].removeprefix("bytes=").split("-"))
                if fault < 0:
                    self.connection.shutdown(socket.SHUT_RDWR)
                elif fault or data is None:
                    self.answer(fault or 404)
                elif start >= len(data):
                    self.answer(416)
                else:
                    self.answer(206, data[start : stop + 1])

        return Handler

    def status(self, path: str) -> dict[str, Any] | None:
        """A file's or folder's entry; None where there is neither."""
        path = path.rstrip("/")
        kind = "file" if path in self.files else "directory"
        if kind == "directory" and path != self.ufs and not any(name.startswith(f"{path}/") for name in self.files):
            return None
        name = f"/mnt{path.removeprefix(self.ufs)}"
        size = len(self.files.get(path, b""))
        return {"mType": kind, "mPath": name, "mUfsPath": path, "mLength": size, "mLastModificationTimeMs": 1}

    def children(self, path: str) -> list[dict[str, Any]]:
        """The entries directly in a folder."""
        prefix = path.rstrip("/") + "/"
        names = {prefix + name[len(prefix) :].partition("/")[0] for name in self.files if name.startswith(prefix)}
        return [status for name in sorted(names) if (status := self.status(name)) is not None]
