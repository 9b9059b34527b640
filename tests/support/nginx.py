"""nginx on this machine, serving one folder."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

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
        deadline_s = time.monotonic() + 10
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > deadline_s:
                    pytest.fail(f"nginx did not come up: {(run / 'error.log').read_text()[-1000:]}")
                time.sleep(0.02)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(5)
