"""Azure's own emulator of its blob service on loopback: Azurite, a package of npm (186 MB with what it needs)."""

from __future__ import annotations

import base64
import datetime
import hashlib
import hmac
import os
import shutil
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.support.waiting import wait_until

ACCOUNT = "devstoreaccount1"
# Made up for the emulator; see its --help for how accounts are given.
KEY = base64.b64encode(b"a key of 64 bytes that nobody but this test has".ljust(64, b".")).decode()
_VERSION = "2021-08-06"


@dataclass(frozen=True, slots=True, kw_only=True)
class Azurite:
    """The blob service of the emulator, with one container `bucket`."""

    endpoint_url: str

    def sas(self, *, valid_s: float = 3600, permissions: str = "rwdl") -> str:
        """A signed query for the container, as the service's documentation describes it."""
        expiry = _utc(valid_s)
        canonical = f"/blob/{ACCOUNT}/bucket"
        signed = "\n".join([permissions, "", expiry, canonical, "", "", "", _VERSION, "c", "", "", "", "", "", "", ""])
        digest = hmac.new(base64.b64decode(KEY), signed.encode(), hashlib.sha256).digest()
        signature = quote(base64.b64encode(digest).decode(), safe="")
        return f"sv={_VERSION}&se={quote(expiry)}&sr=c&sp={permissions}&sig={signature}"


@contextmanager
def azurite(folder: Path, *, timeout_s: float = 60.0) -> Iterator[Azurite]:
    """Runs the emulator in memory; installs it into `folder` when it is not on the path, and skips without npm."""
    binary = shutil.which("azurite-blob") or _install(folder)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [binary, "--blobHost", "127.0.0.1", "--blobPort", str(port), "--inMemoryPersistence"]
    command += ["--skipApiVersionCheck", "--disableTelemetry", "--silent"]
    environment = {**os.environ, "AZURITE_ACCOUNTS": f"{ACCOUNT}:{KEY}"}
    with (folder / "azurite.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=folder)
        try:
            server = Azurite(endpoint_url=f"http://127.0.0.1:{port}/{ACCOUNT}")
            log_text = (folder / "azurite.log").read_text
            wait_until(lambda: _make_container(server), log_text, timeout_s=timeout_s, process=process)
            yield server
        finally:
            process.kill()
            process.wait(10)


def _install(folder: Path) -> str:
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("Azurite is missing: npm install -g azurite")
    words = [npm, "install", "--no-fund", "--no-audit", "--prefix", str(folder), "azurite@3"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, check=False)
    if done.returncode != 0:
        pytest.skip(f"npm cannot install azurite: {done.stderr.strip()[-200:]}")
    return str(folder / "node_modules" / ".bin" / "azurite-blob")


def _make_container(server: Azurite) -> bool:
    """Puts the container; False while nobody listens. Signed with the account's key (Shared Key)."""
    date = datetime.datetime.now(datetime.timezone.utc).strftime("%a, %d %b %Y %H:%M:%S GMT")
    # The emulator's account is in the path, and so twice in what is signed.
    resource = f"/{ACCOUNT}/{ACCOUNT}/bucket\nrestype:container"
    signed = "PUT" + 12 * "\n" + f"x-ms-date:{date}\nx-ms-version:{_VERSION}\n{resource}"
    digest = hmac.new(base64.b64decode(KEY), signed.encode(), hashlib.sha256).digest()
    headers = {
        "x-ms-date": date,
        "x-ms-version": _VERSION,
        "Authorization": f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}",
    }
    url = f"{server.endpoint_url}/bucket?restype=container"
    request = urllib.request.Request(url, method="PUT", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=5):
            return True
    except urllib.error.HTTPError as error:
        raise AssertionError(f"the emulator refuses the container: {error} {error.read()[:500]!r}") from error
    except OSError:
        return False


def _utc(later_s: float) -> str:
    at = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds=later_s)
    return at.strftime("%Y-%m-%dT%H:%M:%SZ")
