"""A real Samba server on loopback, with one share.

Needs root and the Debian package samba.
"""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.waiting import listens, wait_until

PASSWORD = "pa/ss word"
SHARE = "lake"
_CONFIG = """
[global]
workgroup = TEST
server role = standalone server
interfaces = 127.0.0.1
bind interfaces only = yes
smb ports = {port}
disable netbios = yes
load printers = no
printcap name = /dev/null
disable spoolss = yes
map to guest = {strangers}
server signing = mandatory
passdb backend = tdbsam:{root}/private/passdb.tdb
private dir = {root}/private
lock directory = {root}/lock
state directory = {root}/state
cache directory = {root}/cache
pid directory = {root}/pid
ncalrpc dir = {root}/ncalrpc
log file = {root}/smbd.log
[lake]
path = {root}/share
read only = no
[sealed]
path = {root}/share
read only = no
smb encrypt = required
[readonly]
path = {root}/share
read only = yes
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Samba:
    """Where it listens, who gets in, and the folder that the share shows."""

    port: int
    user: str
    shared: Path
    process: subprocess.Popen[bytes]

    def url(self, folder: str, *, share: str = SHARE, user: str | None = None) -> str:
        """The URL of a folder in the share."""
        return f"smb://{self.user if user is None else user}@127.0.0.1:{self.port}/{share}/{folder}"

    def drop(self) -> None:
        """Ends the processes that serve the connections; the server listens on."""
        for pid in _children(self.process.pid):
            with suppress(OSError):
                if (Path("/proc") / str(pid) / "comm").read_text().startswith("smbd"):
                    os.kill(pid, signal.SIGKILL)

    def hang(self) -> None:
        """Stops every process of the server; `go_on` wakes them."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Wakes what `hang` stopped."""
        self._signal(signal.SIGCONT)

    def _signal(self, signum: signal.Signals) -> None:
        for pid in (self.process.pid, *_children(self.process.pid)):
            with suppress(ProcessLookupError):
                os.kill(pid, signum)


@contextmanager
def samba(root: Path, *, strangers: str = "never") -> Iterator[Samba]:
    """Serves `root/share`; skips the test where the server is missing or this is not root.

    strangers: who is let in as a guest (`map to guest`).
    """
    missing = [tool for tool in ("smbd", "smbpasswd") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"Samba is missing ({', '.join(missing)}): apt-get install samba")
    if os.geteuid() != 0:
        pytest.skip("smbd serves files as the user that logs in, for which it must be root")
    for name in ("private", "lock", "state", "cache", "pid", "ncalrpc", "share"):
        (root / name).mkdir()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = int(probe.getsockname()[1])
    config, user = root / "smb.conf", getpass.getuser()
    config.write_text(_CONFIG.format(root=root, port=port, strangers=strangers))
    words = ["smbpasswd", "-c", str(config), "-a", "-s", user]
    subprocess.run(words, input=f"{PASSWORD}\n{PASSWORD}\n".encode(), check=True, capture_output=True, timeout=60)
    with (root / "smbd.out").open("wb") as log:
        # At its end smbd sends a signal to its whole process group, which must be its own.
        words = ["smbd", "-s", str(config), "--foreground", "--no-process-group"]
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        server = Samba(port=port, user=user, shared=root / "share", process=process)
        try:
            wait_until(lambda: listens(port), (root / "smbd.out").read_text, process=process)
            yield server
        finally:
            server.go_on()
            children = _children(process.pid)
            process.terminate()
            try:
                process.wait(10)
            finally:
                process.kill()
                for pid in children:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)


def _children(pid: int) -> list[int]:
    """The processes that `pid` started and that have not ended."""
    try:
        found = (Path("/proc") / str(pid) / "task" / str(pid) / "children").read_text()
    except OSError:
        return []
    return [int(word) for word in found.split()]
