"""Azure blobs against Azurite, Microsoft's emulator. Slow: npm installs it where it is not there."""

from __future__ import annotations

import base64
import traceback
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from dalipipe.errors import AccessDeniedError
from dalipipe.storage import StorageConfig, Store, open_store
from tests.contracts.store import OBJECTS, StoreContract
from tests.support.azurite import ACCOUNT, KEY, Azurite, azurite

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Azurite]:
    with azurite(tmp_path_factory.mktemp("azurite")) as server:
        yield server


def config(server: Azurite, **options: Any) -> StorageConfig:
    given = {"azure_storage_account_name": ACCOUNT, **(options or {"azure_storage_account_key": KEY})}
    return StorageConfig(az_endpoint_url=server.endpoint_url, retries=1, request_timeout_s=30, options=given)


class TestAzureStore(StoreContract):
    @pytest.fixture(scope="class")
    @classmethod
    def store(cls, server: Azurite) -> Iterator[Store]:
        store = open_store(f"az://bucket/{uuid.uuid4().hex}/the %41 lake", config(server))
        for key, data in OBJECTS.items():
            store.put(key, data)
        yield store
        store.close()

    @pytest.fixture
    def fresh(self, server: Azurite) -> Iterator[Store]:
        store = open_store(f"az://bucket/{uuid.uuid4().hex}", config(server))
        yield store
        store.close()


def test_a_signed_query_lets_in_and_shows_nowhere(server: Azurite) -> None:
    sas = server.sas()
    store = open_store("az://bucket/signed", config(server, azure_storage_sas_key=sas))
    store.put("x", b"0123")
    assert bytes(store.read("x", 1, 3)) == b"12"
    with pytest.raises(FileNotFoundError) as caught:
        store.read("none")
    store.close()
    signature = sas.partition("sig=")[2]
    assert signature not in "".join(traceback.format_exception(caught.value)) + repr(store) + store.url


@pytest.mark.parametrize("which", ["key", "expired", "read-only"])
def test_who_is_not_let_in_is_told(server: Azurite, which: str) -> None:
    options = {
        "key": {"azure_storage_account_key": base64.b64encode(bytes(64)).decode()},
        "expired": {"azure_storage_sas_key": server.sas(valid_s=-60)},
        "read-only": {"azure_storage_sas_key": server.sas(permissions="r")},
    }[which]
    store = open_store("az://bucket/denied", config(server, **options))
    with pytest.raises(AccessDeniedError, match=r"cannot write az://bucket/denied/x: .*check credentials") as caught:
        store.put("x", b"0")
    store.close()
    shown = "".join(traceback.format_exception(caught.value))
    assert options.get("azure_storage_sas_key", "sig=none").partition("sig=")[2] not in shown
