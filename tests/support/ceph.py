"""A real Ceph cluster on this machine: one monitor, one OSD in memory, a RADOS gateway and CephFS by ceph-fuse.

Needs root and the Debian packages ceph-mon ceph-osd ceph-mgr ceph-mds ceph-fuse radosgw.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import shutil
import socket
import subprocess
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.waiting import listens, wait_until

_TOOLS = ("ceph-mon", "ceph-osd", "ceph-mgr", "ceph-mds", "ceph-fuse", "radosgw", "radosgw-admin", "ceph")
_CONFIG = """
[global]
fsid = {fsid}
mon host = [v2:127.0.0.1:{v2},v1:127.0.0.1:{v1}]
public addr = 127.0.0.1
cluster addr = 127.0.0.1
auth cluster required = cephx
auth service required = cephx
auth client required = cephx
keyring = {root}/keyring
osd pool default size = 1
osd pool default min size = 1
osd crush chooseleaf type = 0
osd pool default pg num = 8
mon allow pool size one = true
mon_data_avail_warn = 1
mon_data_avail_crit = 1
osd objectstore = memstore
memstore device bytes = 2147483648
run dir = {root}
admin socket = {root}/$cluster-$name.asok
log file = {root}/$name.log
mon data = {root}/mon
osd data = {root}/osd
mds data = {root}/mds
mgr data = {root}/mgr
[client.rgw]
rgw frontends = beast endpoint=127.0.0.1:{gateway}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceph:
    """The gateway's endpoint with its keys, and where CephFS is mounted."""

    endpoint_url: str
    access_key: str
    secret_key: str
    mount: Path


@contextmanager
def ceph(root: Path) -> Iterator[Ceph]:
    """Runs the cluster in `root`; skips the test where a tool is missing."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"Ceph is missing ({', '.join(missing)}): apt-get install ceph-mon ceph-osd ceph-mgr ceph-mds "
                    "ceph-fuse radosgw")  # fmt: skip
    v2, v1, gateway = _free_ports(3)
    fsid = str(uuid.uuid4())
    for name in ("mon", "osd", "mds", "mgr", "mnt"):
        (root / name).mkdir()
    config = root / "ceph.conf"
    config.write_text(_CONFIG.format(fsid=fsid, root=root, v1=v1, v2=v2, gateway=gateway))

    def run(*words: str, timeout_s: float = 60) -> str:
        done = subprocess.run(words, capture_output=True, text=True, timeout=timeout_s, check=False)
        assert done.returncode == 0, f"{words}: {done.stderr[-800:]}"
        return done.stdout

    with ExitStack() as stack:

        def start(*words: str) -> None:
            log = stack.enter_context((root / f"{words[0]}.out").open("wb"))
            process = subprocess.Popen([*words, "-c", str(config), "-f"], stdout=log, stderr=log)
            stack.callback(process.wait, 10)
            stack.callback(process.kill)

        _start_cluster(root, config, fsid, f"[v2:127.0.0.1:{v2},v1:127.0.0.1:{v1}]", run, start)
        run("radosgw-admin", "-c", str(config), "user", "create", "--uid=t", "--display-name=t",
            "--access-key=test-access", "--secret=test-secret")  # fmt: skip
        start("radosgw", "-n", "client.rgw")
        wait_until(lambda: listens(gateway), "the RADOS gateway", timeout_s=90)
        for pool in ("cephfs.meta", "cephfs.data"):
            run("ceph", "-c", str(config), "osd", "pool", "create", pool, "8")
        run("ceph", "-c", str(config), "fs", "new", "cfs", "cephfs.meta", "cephfs.data")
        start("ceph-mds", "-i", "a")
        wait_until(
            lambda: "up:active" in run("ceph", "-c", str(config), "mds", "stat"), "the metadata server", timeout_s=90
        )
        run("ceph-fuse", "-c", str(config), "-n", "client.admin", str(root / "mnt"))
        stack.callback(subprocess.run, ["fusermount3", "-u", "-z", str(root / "mnt")], check=False)
        yield Ceph(
            endpoint_url=f"http://127.0.0.1:{gateway}",
            access_key="test-access",
            secret_key="test-secret",
            mount=root / "mnt",
        )


def make_bucket(cluster: Ceph, name: str) -> None:
    """The gateway wants a bucket to be made before it is written to; a signed PUT does."""
    host = cluster.endpoint_url.removeprefix("http://")
    now = datetime.datetime.now(datetime.timezone.utc)
    stamp, day, empty = now.strftime("%Y%m%dT%H%M%SZ"), now.strftime("%Y%m%d"), hashlib.sha256(b"").hexdigest()
    headers = {"host": host, "x-amz-content-sha256": empty, "x-amz-date": stamp}
    names = ";".join(sorted(headers))
    listed = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers))
    request = f"PUT\n/{name}\n\n{listed}\n{names}\n{empty}"
    scope = f"{day}/us-east-1/s3/aws4_request"
    digest = hashlib.sha256(request.encode()).hexdigest()
    key = f"AWS4{cluster.secret_key}".encode()
    for part in (*scope.split("/"), f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{digest}"):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    credential = f"Credential={cluster.access_key}/{scope}, SignedHeaders={names}, Signature={key.hex()}"
    sent = {**headers, "Authorization": f"AWS4-HMAC-SHA256 {credential}"}
    with urllib.request.urlopen(
        urllib.request.Request(f"{cluster.endpoint_url}/{name}", method="PUT", headers=sent), timeout=30
    ) as answer:
        assert answer.status == 200


def _start_cluster(  # noqa: PLR0917
    root: Path, config: Path, fsid: str, address: str, run: Callable[..., str], start: Callable[..., None]
) -> None:
    keyring, monmap = str(root / "keyring"), str(root / "monmap")
    run("ceph-authtool", "-C", keyring, "--gen-key", "-n", "mon.", "--cap", "mon", "allow *")
    for name in ("client.admin", "client.rgw", "mgr.x", "mds.a", "osd.0"):
        caps = [word for service in ("mon", "osd", "mds", "mgr") for word in ("--cap", service, "allow *")]
        if name == "osd.0":
            caps = ["--cap", "mon", "allow *", "--cap", "osd", "allow *", "--cap", "mgr", "allow *"]
        run("ceph-authtool", keyring, "--gen-key", "-n", name, *caps)
    run("monmaptool", "--create", "--fsid", fsid, "--addv", "a", address, monmap)
    run("ceph-mon", "-c", str(config), "--mkfs", "-i", "a", "--monmap", monmap, "--keyring", keyring)
    start("ceph-mon", "-i", "a")
    wait_until(
        lambda: "mon: 1 daemons" in _try(run, "ceph", "-c", str(config), "--connect-timeout", "5", "-s"),
        "mon",
        timeout_s=90,
    )
    run("ceph", "-c", str(config), "auth", "import", "-i", keyring)
    run("ceph", "-c", str(config), "osd", "create")
    run("ceph-osd", "-c", str(config), "-i", "0", "--mkfs")
    start("ceph-osd", "-i", "0")
    start("ceph-mgr", "-i", "x")
    run("ceph", "-c", str(config), "osd", "crush", "add", "osd.0", "1.0", "root=default", "host=h")
    wait_until(lambda: "1 up" in _try(run, "ceph", "-c", str(config), "osd", "stat"), "the OSD", timeout_s=90)


def _try(run: Callable[..., str], *words: str) -> str:
    with suppress(AssertionError, subprocess.TimeoutExpired):
        return run(*words)
    return ""


def _free_ports(num_ports: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(num_ports)]
    ports = [int(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return ports
