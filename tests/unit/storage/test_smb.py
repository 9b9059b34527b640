"""SMB against a real server: the contract, ways in, and what is said where there is none. Slow: wants Samba."""

from __future__ import annotations

import socket
import sys
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import pytest

from dalipipe.errors import (
    AccessDeniedError,
    ConfigError,
    DependencyError,
    ObjectNotFoundError,
    StorageError,
    StorageTimeoutError,
)
from dalipipe.storage import StorageConfig, Store, open_store
from tests.contracts.store import OBJECTS, StoreContract
from tests.support.host import within
from tests.support.samba import PASSWORD, Samba, samba
from tests.support.waiting import wait_until

pytest.importorskip("smbprotocol")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Samba]:
    with samba(tmp_path_factory.mktemp("samba")) as server:
        yield server


def config(**options: object) -> StorageConfig:
    given = {name: value for name, value in {"password": PASSWORD, **options}.items() if value is not None}
    return StorageConfig(retries=3, request_timeout_s=60, options=given)


@pytest.mark.slow
class TestSmbStore(StoreContract):
    @pytest.fixture(scope="class")
    @classmethod
    def store(cls, server: Samba) -> Iterator[Store]:
        store = open_store(server.url(f"{uuid.uuid4().hex}/the %41 lake"), config())
        for key, data in OBJECTS.items():
            store.put(key, data)
        yield store
        store.close()

    @pytest.fixture
    def fresh(self, server: Samba) -> Iterator[Store]:
        store = open_store(server.url(uuid.uuid4().hex), config())
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


@pytest.mark.slow
@pytest.mark.parametrize("where", ["url", "option", "domain"])
def test_password(server: Samba, where: str) -> None:
    user = f"{server.user}:{quote(PASSWORD, safe='')}" if where == "url" else server.user
    user = f"TEST;{user}" if where == "domain" else user
    settings = config(password=None if where == "url" else PASSWORD)
    store = use(server.url("password", user=user), settings)
    assert PASSWORD not in store.url + repr(settings)
    assert quote(PASSWORD, safe="") not in store.url


@pytest.mark.slow
def test_a_share_that_wants_encryption_gets_it(server: Samba) -> None:
    use(server.url("x", share="sealed"), config())
    use(server.url("y", share="sealed"), config(encrypt=True))


@pytest.mark.slow
def test_names_that_smb_does_not_allow_lie_on_the_server_as_mounts_write_them(server: Samba) -> None:
    keys = ['a"*:<>?|b\\c', "ends in a dot.", "folder ./and a space ", "tab\tand more"]
    store = open_store(server.url("names"), config())
    for number, key in enumerate(keys):
        store.put(key, bytes([number]))
    assert [bytes(store.read(key)) for key in keys] == [bytes([number]) for number in range(len(keys))]
    assert sorted(info.key for info in store.list()) == sorted(keys)
    store.close()
    assert "a\uf020\uf021\uf022\uf023\uf024\uf025\uf027b\uf026c" in {
        path.name for path in (server.shared / "names").iterdir()
    }


@pytest.mark.slow
def test_a_file_that_another_program_holds_for_itself_is_waited_for(server: Samba) -> None:
    import smbclient

    store = open_store(server.url("held"), replace(config(), retries=10))
    store.put("x", b"0123")
    cache: dict[str, object] = {}
    mine = {"username": server.user, "password": PASSWORD, "port": server.port, "connection_cache": cache}
    held = smbclient.open_file(r"\\127.0.0.1\lake\held\x", "r+b", buffering=0, share_access=None, **mine)
    releasing = threading.Timer(0.3, held.close)
    releasing.start()
    try:
        assert bytes(store.read("x")) == b"0123"
    finally:
        releasing.join()
        store.close()
        smbclient.reset_connection_cache(connection_cache=cache)


@pytest.mark.slow
def test_broken_connection_is_made_again(server: Samba) -> None:
    store = open_store(server.url("again"), config())
    store.put("x", b"0123")
    for _ in range(3):
        server.drop()
        assert bytes(store.read("x", 0, 4)) == b"0123"
    store.close()


@pytest.mark.slow
def test_a_connection_that_breaks_under_many_calls_fails_none_of_them(server: Samba) -> None:
    store = open_store(server.url("many"), replace(config(), retries=10))
    data = bytes(range(256)) * 1000
    store.put("x", data)
    dropping = threading.Event()

    def read() -> None:
        while not dropping.is_set():
            assert bytes(store.read("x", 7, 250_000)) == data[7:250_000]

    with ThreadPoolExecutor(12) as threads:
        calls = [threads.submit(read) for _ in range(12)]
        for _ in range(12):
            dropping.wait(0.2)
            server.drop()
        dropping.set()
        for call in calls:
            call.result(60)
    store.close()


@pytest.mark.slow
def test_links_are_followed_in_listings(server: Samba) -> None:
    store = open_store(server.url("links"), config())
    store.put("a/x", b"0123")
    store.close()
    (server.shared / "links" / "b").symlink_to("a")
    (server.shared / "links" / "nowhere").symlink_to("none")
    store = open_store(server.url("links"), config())
    assert sorted(info.key for info in store.list()) == ["a/x", "b/x"]
    assert {info.key: info for info in store.list()}["a/x"] == store.head("a/x")
    assert bytes(store.read("b/x")) == b"0123"
    store.close()


@pytest.mark.slow
def test_server_that_stops_answering_ends_at_the_deadlines_and_close_does_not_wait(server: Samba) -> None:
    before = set(threading.enumerate())
    store = open_store(server.url("hangs"), replace(config(), retries=0, request_timeout_s=1))
    store.put("x", bytes(100_000))
    server.hang()
    try:
        with pytest.raises(StorageTimeoutError, match=r"cannot read smb://\S+/hangs/x: no answer within"):
            store.read("x", 0, 70_000)
        with within(2):
            store.close()
        wait_until(lambda: set(threading.enumerate()) <= before, "the end of all threads")
    finally:
        server.go_on()
    use(server.url("hangs"), config())


@pytest.mark.slow
def test_server_that_is_gone_without_a_word_is_noticed_by_the_read_timeout(server: Samba) -> None:
    store = open_store(server.url("gone"), replace(config(), retries=0, read_timeout_s=1))
    store.put("x", bytes(100_000))
    server.hang()
    try:
        with pytest.raises(StorageError, match=r"cannot read smb://\S+/gone/x: the SMB connection broke"):
            store.read("x", 0, 70_000)
    finally:
        server.go_on()
    assert bytes(store.read("x", 99_990, 100_000)) == bytes(10)
    store.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("user", "options", "told"),
    [
        (None, {"password": "wr0ng-word"}, r"does not let in user '\w+' .*storage\.options\.password"),
        ("nobody-here", {}, r"does not let in user 'nobody-here'"),
    ],
)
def test_who_is_not_let_in_is_told_what_to_give(
    server: Samba, user: str | None, options: dict[str, object], told: str
) -> None:
    store = open_store(server.url("x", user=user), config(**options))
    with pytest.raises(AccessDeniedError, match=rf"cannot read smb://\S+/x/y: .*{told}") as caught:
        store.read("y", 0, 1)
    assert "wr0ng" not in str(caught.value)
    store.close()


@pytest.mark.slow
def test_a_server_that_takes_strangers_for_guests_is_no_way_in(tmp_path: Path) -> None:
    with samba(tmp_path, strangers="bad user") as server:
        store = open_store(server.url("x", user="stranger"), config())
        with pytest.raises(AccessDeniedError, match=r"does not let in user 'stranger' \(.*as a guest"):
            store.read("y", 0, 1)
        store.close()
        use(server.url("x"), config())


@pytest.mark.slow
def test_kerberos_without_its_package_is_told_so(server: Samba, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gssapi", None)
    store = open_store(server.url("x"), config(auth_protocol="kerberos"))
    with pytest.raises(DependencyError, match="gssapi"):
        store.read("y", 0, 1)
    store.close()


@pytest.mark.slow
def test_a_share_that_is_not_there_and_one_that_may_not_be_written(server: Samba) -> None:
    store = open_store(server.url("x", share="none"), config())
    with pytest.raises(ObjectNotFoundError, match=r"smb://\S+/none/x/y: the server has no share 'none'"):
        store.read("y", 0, 1)
    store.close()
    store = open_store(server.url("x", share="readonly"), config())
    with pytest.raises(AccessDeniedError, match=r"cannot write smb://\S+/readonly/x/y: Permission denied"):
        store.put("y", b"")
    store.close()


@pytest.mark.slow
def test_a_data_set_is_packed_to_a_share_and_trained_from(server: Samba, lake: Path, tmp_path: Path) -> None:
    import dalipipe as dp
    from dalipipe.packing.config import PackConfig
    from dalipipe.packing.run import pack

    url = server.url("set")
    pack(str(lake), url, PackConfig(shard_bytes="1MiB", block_bytes="64KiB", workers=1), config())
    mine = [f"data.url={url}", f"+storage.options.password='{PASSWORD}'", f"cache.dir={tmp_path}", "device=cpu"]
    loader = dp.load("train", [*mine, "graph.size=32", "loader.batch_size=30", "loader.last_batch=partial"])
    try:
        assert sorted(int(number) for batch in loader for number in batch["id"]) == list(range(150))
    finally:
        loader.close()


def test_refused_connection_and_unknown_host() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        store = open_store(f"smb://u@127.0.0.1:{taken.getsockname()[1]}/s/x", StorageConfig(retries=1))
        with pytest.raises(StorageError, match=r"cannot look up smb://u@127.0.0.1:\d+/s/x/y: Connection refused"):
            store.head("y")
        store.close()
    store = open_store("smb://no-such-host.invalid/s/x", StorageConfig(retries=0))
    with pytest.raises(StorageError, match=r"smb://no-such-host.invalid/s/x/y: "):
        store.head("y")
    store.close()


def test_server_that_never_answers_ends_at_the_deadlines() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"smb://u@127.0.0.1:{silent.getsockname()[1]}/s/x"
        store = open_store(url, StorageConfig(retries=0, connect_timeout_s=0.3))
        with pytest.raises(StorageTimeoutError, match=r"no SMB server answered within 1 s .*storage\.connect_timeout"):
            store.head("y")
        store.close()
        store = open_store(url, StorageConfig(retries=0, connect_timeout_s=60, request_timeout_s=0.3))
        with pytest.raises(StorageTimeoutError, match=r"no answer within 0\.\d s; raise storage\.request_timeout_s"):
            store.head("y")
        with within(2):
            store.close()


@pytest.mark.parametrize(
    ("url", "options", "told"),
    [
        ("smb:///s/x", {}, "names no host or no share"),
        ("smb://h", {}, "names no host or no share"),
        ("smb://h/s/x", {"pasword": "secret"}, r"storage\.options\.pasword is no option of smb; did you mean password"),
        ("smb://h/s/x", {"auth_protocol": "ntlm2"}, "must be one of negotiate, ntlm, kerberos"),
        ("smb://h/s/x", {"encrypt": "maybe"}, r"storage\.options\.encrypt='maybe' must be true or false"),
        ("smb://me:pa/ss@h/s/x", {}, r"write / as %2F"),
    ],
)
def test_options_that_can_never_work(url: str, options: dict[str, str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        open_store(url, StorageConfig(options=options))


def test_missing_client_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "smbclient", None)
    monkeypatch.delitem(sys.modules, "dalipipe.storage.smb", raising=False)
    with pytest.raises(DependencyError, match=r"smbclient.*dalipipe\[smb\]"):
        open_store("smb://host/share/x")
