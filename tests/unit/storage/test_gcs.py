"""GCS: reads against an emulator, everything against a fake of the XML API (see tests/support/gcs.py)."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from dalipipe.errors import AccessDeniedError, ConfigError, StorageError
from dalipipe.storage import StorageConfig, Store, open_store
from tests.contracts.store import OBJECTS, ReadContract, StoreContract
from tests.support.gcs import TOKEN, gcs_emulator, gcs_fake


def config(endpoint_url: str, **options: object) -> StorageConfig:
    return StorageConfig(gs_endpoint_url=endpoint_url, retries=1, request_timeout_s=30, options=options)


@pytest.fixture(scope="module")
def fake() -> Iterator[str]:
    with gcs_fake() as url:
        yield url


class TestGcsFake(StoreContract):
    @pytest.fixture(scope="class")
    @classmethod
    def store(cls, fake: str) -> Iterator[Store]:
        store = open_store(f"gs://bucket/{uuid.uuid4().hex}/the %41 lake", config(fake, google_bearer_token=TOKEN))
        for key, data in OBJECTS.items():
            store.put(key, data)
        yield store
        store.close()

    @pytest.fixture
    def fresh(self, fake: str) -> Iterator[Store]:
        store = open_store(f"gs://bucket/{uuid.uuid4().hex}", config(fake, google_bearer_token=TOKEN))
        yield store
        store.close()


class TestGcsEmulator(ReadContract):
    @pytest.fixture(scope="class")
    @classmethod
    def store(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
        objects = {f"the lake/{key}": data for key, data in OBJECTS.items()}
        with gcs_emulator(tmp_path_factory.mktemp("gcs"), objects) as url:
            store = open_store("gs://bucket/the lake", config(url, google_skip_signature=True))
            yield store
            store.close()

    def test_list_is_complete(self, store: Store) -> None:
        assert {info.key: info.num_bytes for info in store.list()} == {key: len(OBJECTS[key]) for key in OBJECTS}


def test_a_wrong_token_and_a_bucket_that_is_not_there_are_told(fake: str) -> None:
    store = open_store("gs://bucket/x", config(fake, google_bearer_token="wr0ng-token"))
    for call in (lambda: store.read("y"), lambda: store.put("y", b""), lambda: list(store.list())):
        with pytest.raises(AccessDeniedError, match=r"gs://bucket/x.*check credentials") as caught:
            call()
        assert "wr0ng" not in str(caught.value)
    store.close()
    store = open_store("gs://other/x", config(fake, google_bearer_token=TOKEN))
    with pytest.raises(StorageError, match="gs://other/x/y"):
        store.put("y", b"")
    store.close()


@pytest.mark.parametrize("scheme", ["gs", "az"])
def test_endpoint_that_can_never_work_is_refused(scheme: str) -> None:
    with pytest.raises(ConfigError, match=rf"storage\.{scheme}_endpoint_url='nohost' cannot be used"):
        open_store(f"{scheme}://bucket/x", StorageConfig(gs_endpoint_url="nohost", az_endpoint_url="nohost"))


@pytest.mark.parametrize(
    ("scheme", "name"), [("gs", "google_nonsense"), ("s3", "aws_nonsense"), ("az", "azure_nonsense")]
)
def test_unknown_option_of_a_client_is_named(scheme: str, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"cannot open {scheme}://bucket/x: .*{name}"):
        open_store(f"{scheme}://bucket/x", StorageConfig(options={name: "1"}))


def test_options_of_other_clients_are_left_alone(fake: str) -> None:
    store = open_store("gs://bucket/x", config(fake, google_bearer_token=TOKEN, known_hosts="x", aws_region="y"))
    store.put("y", b"1")
    store.close()
    store = open_store("memory://x", config(fake, google_bearer_token=TOKEN))
    store.put("y", b"1")
    store.close()
