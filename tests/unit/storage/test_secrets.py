"""A password or a signature in a URL shows nowhere: not in messages, tracebacks, logs, `Store.url` or reprs."""

from __future__ import annotations

import logging
import pickle
import socket
import traceback
from collections.abc import Callable, Iterator

import pytest

from dalipipe.errors import ConfigError, DalipipeError
from dalipipe.shards.config import DataConfig
from dalipipe.storage import StorageConfig, Store, open_store
from dalipipe.storage.failures import presentable, translate
from dalipipe.storage.linked import LinkedStore
from dalipipe.storage.url import link_from
from dalipipe.wiring.config import LoadConfig
from tests.support.protocols import web_hdfs
from tests.support.webserver import WebServer, web_server

SECRET = "hunter2"
CONFIG = StorageConfig(retries=0, request_timeout_s=10, options={})


@pytest.fixture
def refused() -> Iterator[str]:
    """A host and port where nobody listens: the port is taken, without a listener, as long as the test runs."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


@pytest.fixture(scope="module")
def web() -> Iterator[WebServer]:
    with web_server({"set/x": b"0123"}) as server:
        server.faults = {"set/denied": [403] * 20, "set/broken": [500] * 20}
        yield server


@pytest.fixture(scope="module")
def hdfs() -> Iterator[int]:
    with web_hdfs() as port:
        yield port


def calls(store: Store) -> list[Callable[[], object]]:
    return [
        lambda: store.head("missing"),
        lambda: store.read("missing"),
        lambda: store.read("x", 3, 1),
        lambda: store.read("/bad"),
        lambda: store.read("denied"),
        lambda: store.read("broken", 0, 3),
        lambda: list(store.list("x")),
        lambda: list(store.list("../up")),
        lambda: store.put("x", b"", if_absent=True),
        lambda: store.delete("x"),
    ]


def told(action: Callable[[], object]) -> str:
    """All that Python prints of the error that `action` ends with, as reprs show it too; empty without one."""
    try:
        action()
    except DalipipeError as error:
        return "".join(traceback.format_exception(error)) + repr(error) + repr(error.args)
    return ""


def check(store: Store, caplog: pytest.LogCaptureFixture, *, least: int) -> None:
    caplog.set_level(logging.DEBUG, logger="dalipipe")
    found = [text for action in calls(store) if (text := told(action))]
    assert len(found) >= least
    linked = [told(lambda: LinkedStore(store.url).read("../../../../../x")), store.url, repr(store), repr(CONFIG)]
    for text in [*found, *linked, caplog.text]:
        assert SECRET not in text
    store.close()
    assert SECRET not in told(lambda: store.read("x", 0, 1))


def test_web_server(web: WebServer, caplog: pytest.LogCaptureFixture) -> None:
    store = open_store(web.url.replace("://", f"://me:{SECRET}@") + "/set", CONFIG)
    assert bytes(store.read("x", 1, 3)) == b"12"
    assert store.url == web.url.replace("://", "://***@") + "/set"
    again = pickle.loads(pickle.dumps(store))
    assert again.url == store.url
    again.close()
    check(store, caplog, least=8)


@pytest.mark.parametrize("scheme", ["http", "webhdfs", "ftp"])
def test_refused_connection(scheme: str, refused: str, caplog: pytest.LogCaptureFixture) -> None:
    try:
        store = open_store(f"{scheme}://me:{SECRET}@{refused}/set", CONFIG)
    except DalipipeError as error:  # ftp connects at once
        assert refused in str(error)
        assert SECRET not in "".join(traceback.format_exception(error))
        return
    check(store, caplog, least=8)


def test_name_node(hdfs: int, refused: str, caplog: pytest.LogCaptureFixture) -> None:
    check(open_store(f"webhdfs://me:{SECRET}@127.0.0.1:{hdfs}/set", CONFIG), caplog, least=5)
    # The client puts this option into the query of each request, and requests repeats that in its errors.
    config = StorageConfig(retries=0, request_timeout_s=10, options={"token": SECRET})
    check(open_store(f"webhdfs://{refused}/set", config), caplog, least=8)


def test_configuration_shows_no_secret_and_the_rest() -> None:
    config = StorageConfig(endpoint_url=f"http://me:{SECRET}@h:9000", options={"password": SECRET, "user": "me"})
    assert "endpoint_url='http://***@h:9000'" in repr(config)
    assert "options={'password': '***', 'user': 'me'}" in repr(config)
    assert SECRET not in repr(config)


def test_configuration_of_a_loader_shows_no_secret() -> None:
    cfg = LoadConfig(
        data=DataConfig(url=f"https://me:{SECRET}@h/set", sources={"a": f"sftp://me:{SECRET}@h/a"}),
        storage=CONFIG,
        resume=f"sftp://me:{SECRET}@h/state",
    )
    assert SECRET not in repr(cfg)
    assert "url='https://***@h/set'" in repr(cfg)
    assert "resume='sftp://me:***@h/state', metrics=" in repr(cfg)


@pytest.mark.parametrize(
    "url",
    [
        f"s4://me:{SECRET}@host/x",
        f"s3://me:{SECRET}@bucket/x",
        f"az://me:{SECRET}@container/x",
        f"a::sftp://me:{SECRET}@host/x",
        f"sftp://me:/{SECRET}@host/x",
        f"https://host/x?sv=1&sig={SECRET}",
        f"https://host/x?X-Amz-Signature={SECRET}",
        f"https://me:{SECRET}@ho st/x",
        f"file://me:{SECRET}@host/x",
        f"memory://me:{SECRET}@x",
        f"webhdfs://me:{SECRET}@host:port/x",
    ],
)
def test_url_that_is_refused(url: str) -> None:
    if url.startswith("memory"):
        assert SECRET not in open_store(url).url
        return
    text = told(lambda: open_store(url))
    assert "ConfigError" in text
    assert SECRET not in text


def test_client_that_repeats_the_path_alone(caplog: pytest.LogCaptureFixture) -> None:
    store = open_store(f"memory://me:{SECRET}@x", CONFIG)
    assert SECRET in str(store._fs._strip_protocol(f"memory://me:{SECRET}@x"))  # type: ignore[attr-defined]
    check(store, caplog, least=4)


def test_endpoint_that_is_refused() -> None:
    text = told(lambda: open_store("s3://b/x", StorageConfig(endpoint_url=f"http://me:{SECRET}@h?token={SECRET}")))
    assert "storage.endpoint_url" in text
    assert SECRET not in text


def test_credential_command_is_not_repeated() -> None:
    for command in (f"tool --secret '{SECRET}", f"no-such-tool-here --secret {SECRET}"):
        config = StorageConfig(credential_process=command, retries=0, endpoint_url="http://127.0.0.1:9", region="x")
        text = told(lambda config=config: open_store("s3://b/x", config).read("k"))  # type: ignore[misc]
        assert "storage.credential_process" in text
        assert SECRET not in text


def test_causes_keep_their_words_and_lose_their_secrets() -> None:
    def fail() -> None:
        try:
            raise KeyError(f"inner http://me:{SECRET}@h")
        except KeyError:
            raise OSError(f"outer /x?sig={SECRET}&a=1") from ValueError("between")

    try:
        fail()
    except OSError as error:
        shown = presentable(error)
        text = "".join(traceback.format_exception(translate(error, "read sftp://h/x")))
        assert SECRET not in text + "".join(traceback.format_exception(shown))
        assert str(shown) == "OSError: outer /x?sig=***&a=1"
        assert str(shown.__cause__) == "between"
        assert "fail" in "".join(traceback.format_exception(shown))
    clean = OSError("nothing to hide")
    assert presentable(clean) is clean


@pytest.mark.parametrize(
    ("base", "url", "name"),
    [
        (f"sftp://me:{SECRET}@h/d/m", "sftp://me:***@h/d/a/x.tar", "../a/x.tar"),
        (f"sftp://me:{SECRET}@h/d/m", f"sftp://me:{SECRET}@other/d/x.tar", "sftp://me@other/d/x.tar"),
        (f"http://{SECRET}@h/d/m", f"http://{SECRET}@other/d/x.tar", "http://other/d/x.tar"),
        ("/d/m", f"sftp://me:{SECRET}@h/x.tar", "sftp://me@h/x.tar"),
    ],
)
def test_names_in_a_manifest_hold_no_secret(base: str, url: str, name: str) -> None:
    assert link_from(base, url) == name


def test_what_lies_beside_is_reached_with_the_same_password(web: WebServer) -> None:
    seen: list[str] = []

    def open_at(url: str) -> Store:
        seen.append(url)
        return open_store(url, CONFIG)

    base = web.url.replace("://", f"://me:{SECRET}@")
    store = LinkedStore(f"{base}/other/", open_at)
    assert bytes(store.read("../set/x")) == b"0123"
    assert seen == [f"{base}/other/", f"{base}/set"]
    assert SECRET not in told(lambda: store.read("../set/none"))
    assert SECRET not in told(lambda: store.read("../../../none"))
    with pytest.raises(ConfigError, match=r"leads out of http://\*\*\*@"):
        store.read("../../../none")
    store.close()
