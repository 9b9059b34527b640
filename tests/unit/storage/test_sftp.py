"""SFTP against a real server: the contract, ways in, and what is said where there is none."""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import pytest

from dalipipe.errors import AccessDeniedError, ConfigError, DependencyError, StorageError, StorageTimeoutError
from dalipipe.storage import StorageConfig, Store, open_store
from tests.contracts.store import OBJECTS, StoreContract
from tests.support.host import slowness, within
from tests.support.sftp import PASSWORD, USER, SftpServer, sftp_server
from tests.support.waiting import wait_until

pytest.importorskip("paramiko")
QUICK = {"allow_agent": False, "look_for_keys": False}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SftpServer]:
    with sftp_server(tmp_path_factory.mktemp("sftp")) as server:
        yield server


def config(server: SftpServer, **options: object) -> StorageConfig:
    mine = {**QUICK, "known_hosts": str(server.known_hosts), "key_filename": str(server.key_file), **options}
    given = {name: value for name, value in mine.items() if value is not None}
    return StorageConfig(retries=1, request_timeout_s=30, options=given)


class TestSftpStore(StoreContract):
    @pytest.fixture(scope="class")
    @classmethod
    def store(cls, server: SftpServer) -> Iterator[Store]:
        store = open_store(server.url(f"{uuid.uuid4().hex}/the %41 lake"), config(server))
        for key, data in OBJECTS.items():
            store.put(key, data)
        yield store
        store.close()

    @pytest.fixture
    def fresh(self, server: SftpServer) -> Iterator[Store]:
        store = open_store(server.url(uuid.uuid4().hex), config(server))
        yield store
        store.close()


def use(url: str, settings: StorageConfig) -> Store:
    """Writes and reads one object."""
    store = open_store(url, settings)
    try:
        store.put("x", b"0123")
        assert bytes(store.read("x", 1, 3)) == b"12"
    finally:
        store.close()
    return store


@pytest.mark.parametrize("where", ["url", "option"])
def test_password(server: SftpServer, where: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    user = f"{USER}:{quote(PASSWORD, safe='')}" if where == "url" else USER
    settings = config(server, key_filename=None, password=PASSWORD if where == "option" else None)
    store = use(server.url("password", user=user), settings)
    assert store.url == server.url("password", user=f"{USER}:***" if where == "url" else USER)
    assert PASSWORD not in caplog.text + repr(settings)


def test_one_connection_serves_all_threads_and_is_made_at_the_first_call(server: SftpServer) -> None:
    before = server.logins
    store = open_store(server.url("one"), config(server))
    assert server.logins == before
    store.put("x", os.urandom(1 << 20))
    whole = bytes(store.read("x"))
    wrong: list[int] = []

    def read(number: int) -> None:
        starts = range(number, 1 << 20, 97_001)
        wrong.extend(at for at in starts if bytes(store.read("x", at, at + 1000)) != whole[at : at + 1000])

    threads = [threading.Thread(target=read, args=(number,)) for number in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    store.close()
    assert (wrong, server.logins) == ([], before + 1)


def test_broken_connection_is_made_again(server: SftpServer) -> None:
    store = open_store(server.url("again"), config(server))
    store.put("x", b"0123")
    before = server.logins
    server.drop()
    assert bytes(store.read("x", 0, 4)) == b"0123"
    store.close()
    assert server.logins == before + 1


def test_server_that_hangs_in_a_read_ends_at_the_read_timeout_and_can_be_read_afterwards(server: SftpServer) -> None:
    settings = replace(config(server), retries=0, read_timeout_s=0.5)
    store = open_store(server.url("hangs"), settings)
    store.put("x", bytes(100_000))
    server.hangs = True
    try:
        with pytest.raises(StorageTimeoutError, match=r"cannot read sftp://\S+/hangs/x: no answer within 0\.5 s"):
            store.read("x", 0, 70_000)
    finally:
        server.hangs = False
    # The late answer of the first read must not be taken for the second's.
    assert bytes(store.read("x", 99_990, 100_000)) == bytes(10)
    store.close()


def test_connection_that_breaks_in_a_read_is_made_again_though_paramiko_cannot_take_leave(
    server: SftpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    import paramiko

    farewell = paramiko.SFTPClient.close

    def close(session: paramiko.SFTPClient) -> None:
        farewell(session)
        raise EOFError  # as it does when the socket broke and its thread has not seen it yet

    def drop() -> None:
        server.drop()
        server.hangs = False

    data = bytes(range(256)) * 40_000  # more than one part
    store = open_store(server.url("breaks"), config(server))
    store.put("x", data)
    monkeypatch.setattr(paramiko.SFTPClient, "close", close)
    server.hangs = True
    breaking = threading.Timer(0.3, drop)
    breaking.start()
    try:
        assert bytes(store.read("x", 100, len(data) - 5)) == data[100:-5]
    finally:
        server.hangs = False
        breaking.join()
    store.close()


def test_reads_that_were_given_up_leave_no_thread_behind(server: SftpServer) -> None:
    before = set(threading.enumerate())
    store = open_store(server.url("leaves"), replace(config(server), retries=0, read_timeout_s=0.3))
    store.put("x", bytes(9 << 20))
    server.hangs = True
    try:
        with pytest.raises(StorageTimeoutError):
            store.read("x", 0, 9 << 20)
    finally:
        server.hangs = False
        store.close()
    wait_until(lambda: set(threading.enumerate()) <= before, "the end of all threads", timeout_s=10 * slowness())


@pytest.mark.parametrize(
    ("user", "options", "told"),
    [
        (f"{USER}:wr0ng-word", {"key_filename": None}, rf"does not let in user '{USER}' .*storage\.options\.password"),
        ("nobody", {}, r"does not let in user 'nobody'"),
        (USER, {"key_filename": None}, rf"does not let in user '{USER}'"),
        (USER, {"known_hosts": None}, r"host key of \[127.0.0.1\]:\d+ \(ssh-ed25519 SHA256:\S+\) is in no known_hosts"),
    ],
)
def test_who_is_not_let_in_is_told_what_to_give(
    server: SftpServer,
    user: str,
    options: dict[str, object],
    told: str,
    *,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    store = open_store(server.url("x", user=user), config(server, **options))
    with pytest.raises(AccessDeniedError, match=rf"cannot read sftp://\S+/x/y: .*{told}") as caught:
        store.read("y", 0, 1)
    assert "wr0ng" not in str(caught.value)
    store.close()


def test_host_with_another_key_is_refused(server: SftpServer, tmp_path: Path) -> None:
    import asyncssh

    other = asyncssh.generate_private_key("ssh-ed25519").convert_to_public().export_public_key().decode()
    (tmp_path / "known_hosts").write_text(f"[127.0.0.1]:{server.port} {other}")
    store = open_store(server.url("x"), config(server, known_hosts=str(tmp_path / "known_hosts")))
    with pytest.raises(AccessDeniedError, match=r"is not the one that known_hosts has.*somebody is in between"):
        store.read("y", 0, 1)
    store.close()


def test_unknown_host_key_can_be_trusted(server: SftpServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    use(server.url("trusted"), config(server, known_hosts=None, host_key_policy="auto_add"))
    assert list(tmp_path.rglob("*")) == []


def test_refused_connection_and_unknown_host() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        store = open_store(f"sftp://127.0.0.1:{taken.getsockname()[1]}/x", StorageConfig(retries=1, options=QUICK))
        with pytest.raises(StorageError, match=r"cannot look up sftp://127.0.0.1:\d+/x/y: Connection refused"):
            store.head("y")
        store.close()
    store = open_store("sftp://no-such-host.invalid/x", StorageConfig(retries=0, options=QUICK))
    with pytest.raises(StorageError, match=r"sftp://no-such-host.invalid/x/y: "):
        store.head("y")
    store.close()


def test_server_that_never_answers_ends_at_the_deadlines() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"sftp://127.0.0.1:{silent.getsockname()[1]}/x"
        store = open_store(url, StorageConfig(retries=0, connect_timeout_s=0.3, options=QUICK))
        with pytest.raises(StorageError, match=r"no SSH server answered within 0\.3 s .*storage\.connect_timeout_s"):
            store.head("y")
        store.close()
        store = open_store(url, StorageConfig(retries=0, request_timeout_s=0.3, options=QUICK))
        with pytest.raises(StorageTimeoutError, match=r"no answer within 0\.\d s; raise storage\.request_timeout_s"):
            store.head("y")
        with within(2):
            store.close()


@pytest.mark.parametrize(
    ("url", "options", "told"),
    [
        ("sftp:///x", {}, "names no host"),
        ("sftp://h/x", {"pasword": "secret"}, r"storage\.options\.pasword is no option of sftp; did you mean password"),
        ("sftp://h/x", {"host_key_policy": "never"}, "must be one of reject, auto_add"),
        ("sftp://h/x", {"known_hosts": "/none"}, r"known_hosts=/none is no file; make it with ssh-keyscan"),
        ("sftp://h/x", {"key_filename": "/none"}, r"key_filename=/none is no file"),
        ("sftp://me:pa/ss@h/x", {}, r"write / as %2F"),
    ],
)
def test_options_that_can_never_work(url: str, options: dict[str, str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        open_store(url, StorageConfig(options=options))


def test_missing_client_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "paramiko", None)
    monkeypatch.delitem(sys.modules, "dalipipe.storage.sftp", raising=False)
    with pytest.raises(DependencyError, match=r"paramiko.*dalipipe\[sftp\]"):
        open_store("sftp://host/x")
