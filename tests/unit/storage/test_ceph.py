"""A real Ceph: its S3 gateway and a CephFS mount pass the contract. Slow: the cluster takes a while to come up."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from dalipipe.storage import StorageConfig, Store, open_store
from tests.contracts.store import OBJECTS, StoreContract
from tests.support.ceph import Ceph, ceph, make_bucket

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ceph]:
    with ceph(tmp_path_factory.mktemp("ceph")) as cluster, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", cluster.access_key)
        patch.setenv("AWS_SECRET_ACCESS_KEY", cluster.secret_key)
        make_bucket(cluster, "bucket")
        yield cluster


def _filled(store: Store) -> Iterator[Store]:
    for key, data in OBJECTS.items():
        store.put(key, data)
    yield store
    store.close()


class TestRadosGateway(StoreContract):
    @pytest.fixture(scope="class")
    @classmethod
    def config(cls, cluster: Ceph) -> StorageConfig:
        return StorageConfig(endpoint_url=cluster.endpoint_url, retries=1, request_timeout_s=60)

    @pytest.fixture(scope="class")
    @classmethod
    def store(cls, config: StorageConfig) -> Iterator[Store]:
        yield from _filled(open_store(f"s3://bucket/{uuid.uuid4().hex}/the %41 lake", config))

    @pytest.fixture
    def fresh(self, config: StorageConfig) -> Iterator[Store]:
        store = open_store(f"s3://bucket/{uuid.uuid4().hex}/", config)
        yield store
        store.close()


class TestCephFsMount(StoreContract):
    @pytest.fixture(scope="class")
    @classmethod
    def store(cls, cluster: Ceph) -> Iterator[Store]:
        yield from _filled(open_store(str(cluster.mount / uuid.uuid4().hex / "the lake")))

    @pytest.fixture
    def fresh(self, cluster: Ceph) -> Iterator[Store]:
        store = open_store(str(cluster.mount / uuid.uuid4().hex))
        yield store
        store.close()
