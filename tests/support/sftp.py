"""A real SSH server with SFTP on loopback (asyncssh), over a folder that it cannot leave."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

USER, PASSWORD = "someone", "pa/ss word"


@dataclass
class SftpServer:
    """Where it listens, how to get in, and what it has seen."""

    port: int
    known_hosts: Path
    key_file: Path
    """The private key that `USER` gets in with, beside the password."""
    logins: int = 0
    hangs: bool = False
    """Reads of files are not answered while this is set."""
    drop: Any = None
    """Breaks all connections when called."""

    def url(self, folder: str, *, user: str = USER) -> str:
        return f"sftp://{user}@127.0.0.1:{self.port}/{folder}"


@contextmanager
def sftp_server(folder: Path, *, root: Path | None = None) -> Iterator[SftpServer]:
    """Serves `root` (a new folder by default); keys and the list of known hosts are made in `folder`."""
    asyncssh = pytest.importorskip("asyncssh", reason="the SFTP server is missing: pip install asyncssh")
    root = folder / "root" if root is None else root
    root.mkdir(parents=True, exist_ok=True)
    host_key, user_key = (asyncssh.generate_private_key("ssh-ed25519") for _ in range(2))
    user_key.write_private_key(folder / "id")
    (folder / "id").chmod(0o600)
    server = SftpServer(port=0, known_hosts=folder / "known_hosts", key_file=folder / "id")
    connections: list[Any] = []

    class Login(asyncssh.SSHServer):  # type: ignore[misc,name-defined]
        def connection_made(self, conn: Any) -> None:
            connections.append(conn)

        def begin_auth(self, username: str) -> bool:
            return True

        def password_auth_supported(self) -> bool:
            return True

        def validate_password(self, username: str, password: str) -> bool:
            return (username, password) == (USER, PASSWORD)

        def public_key_auth_supported(self) -> bool:
            return True

        def validate_public_key(self, username: str, key: Any) -> bool:
            return username == USER and key == user_key.convert_to_public()

        def auth_completed(self) -> None:
            server.logins += 1

    class Files(asyncssh.SFTPServer):  # type: ignore[misc,name-defined]
        async def read(self, file_obj: Any, offset: int, size: int) -> bytes:
            while server.hangs:
                await asyncio.sleep(0.02)
            return bytes(super().read(file_obj, offset, size))

    loop = asyncio.new_event_loop()

    async def listen() -> Any:
        return await asyncssh.listen(
            "127.0.0.1",
            0,
            server_factory=Login,
            server_host_keys=[host_key],
            sftp_factory=lambda channel: Files(channel, chroot=str(root).encode()),
        )

    async def end(listener: Any) -> None:
        listener.close()
        for connection in connections:
            connection.abort()
        await listener.wait_closed()
        await asyncio.gather(*(one.wait_closed() for one in connections), return_exceptions=True)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def drop() -> None:
        for connection in connections:
            connection.abort()

    thread = threading.Thread(target=loop.run_forever, name="sftp-server", daemon=True)
    thread.start()
    listener = asyncio.run_coroutine_threadsafe(listen(), loop).result(30)
    server.port = listener.get_port()
    public = host_key.convert_to_public().export_public_key().decode()
    server.known_hosts.write_text(f"[127.0.0.1]:{server.port} {public}")
    server.drop = lambda: asyncio.run_coroutine_threadsafe(drop(), loop).result(10)
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(end(listener), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
