"""nginx on this machine, serving one folder."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.waiting import listens, wait_until

_CONFIG = """
daemon off; worker_processes 1; pid {run}/pid; error_log {run}/error.log; user root;
events {{ worker_connections 256; }}
http {{
  access_log off; client_body_temp_path {run}/body; proxy_temp_path {run}/proxy; fastcgi_temp_path {run}/fastcgi;
  uwsgi_temp_path {run}/uwsgi; scgi_temp_path {run}/scgi;
  server {{ listen 127.0.0.1:{port}; location / {{ root {root}; {directives} }} }}
}}
"""


@contextmanager
def nginx(root: Path, run: Path, *, directives: str = "") -> Iterator[str]:
    """Serves `root`; gives the URL. Skips the test where nginx is missing (Debian: nginx-light)."""
    binary = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if binary is None:
        pytest.skip("the web server is missing: apt-get install nginx-light")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    run.mkdir(parents=True, exist_ok=True)
    config = run / "nginx.conf"
    config.write_text(_CONFIG.format(run=run, root=root, port=port, directives=directives))
    process = subprocess.Popen([binary, "-c", str(config), "-p", str(run), "-e", str(run / "error.log")])
    try:
        wait_until(lambda: listens(port), lambda: f"nginx: {(run / 'error.log').read_text()[-1000:]}", process=process)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(5)
