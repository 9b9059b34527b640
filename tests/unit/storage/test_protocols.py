"""Stores behind other servers: nginx, and fakes of WebHDFS and Alluxio (fakes: see tests/support/protocols.py)."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from dalipipe.errors import StorageError
from dalipipe.storage import StorageConfig, Store, open_store
from tests.contracts.store import OBJECTS, ReadContract, StoreContract
from tests.support.nginx import nginx
from tests.support.protocols import web_hdfs

CONFIG = StorageConfig(retries=1, request_timeout_s=30)


class TestNginxStore(ReadContract):
    @pytest.fixture(scope="class")
    @classmethod
    def server(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
        root = tmp_path_factory.mktemp("nginx")
        for key, data in OBJECTS.items():
            path = root / "files" / "the lake" / key
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        root.chmod(0o755)
        # A folder is no object; nginx calls it forbidden.
        with nginx(root / "files", root / "run", directives="error_page 403 =404 /none;") as url:
            yield url

    @pytest.fixture(scope="class")
    @classmethod
    def store(cls, server: str) -> Iterator[Store]:
        store = open_store(f"{server}/the%20lake/", CONFIG)
        yield store
        store.close()


def test_a_server_that_drips_ends_at_the_deadline(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "x").write_bytes(bytes(1 << 20))
    with nginx(tmp_path / "files", tmp_path / "run", directives="limit_rate 20k;") as url:
        store = open_store(url, StorageConfig(request_timeout_s=0.8))
        with pytest.raises(StorageError, match=f"cannot read {url}/x: no answer within"):
            store.read("x", 0, 1 << 20)
        store.close()


@pytest.fixture(scope="module")
def hdfs() -> Iterator[int]:
    with web_hdfs() as port:
        yield port


class TestWebHdfsStore(StoreContract):
    @pytest.fixture(scope="class")
    @classmethod
    def store(cls, hdfs: int) -> Iterator[Store]:
        store = open_store(f"webhdfs://127.0.0.1:{hdfs}/{uuid.uuid4().hex}/the lake", CONFIG)
        for key, data in OBJECTS.items():
            store.put(key, data)
        yield store
        store.close()

    @pytest.fixture
    def fresh(self, hdfs: int) -> Iterator[Store]:
        store = open_store(f"webhdfs://127.0.0.1:{hdfs}/{uuid.uuid4().hex}", CONFIG)
        yield store
        store.close()


def test_options_reach_the_file_system(hdfs: int) -> None:
    config = StorageConfig(options={"user": "somebody", "password": None})
    store = open_store(f"webhdfs://127.0.0.1:{hdfs}/x", config)
    assert store._fs.user == "somebody"  # type: ignore[attr-defined]
    store.close()
