"""Source and target in a real object store: the same bytes as on a local disk."""

from __future__ import annotations

import pytest

from dalipipe.packing.config import IndexConfig, PackConfig
from dalipipe.packing.index import index
from dalipipe.packing.merge import merge
from dalipipe.packing.run import pack
from dalipipe.packing.verify import open_linked, verify
from dalipipe.shards import Manifest
from dalipipe.storage.open import open_store
from dalipipe.storage.store import StorageConfig
from tests.support.archives import write_tar
from tests.support.seaweed import S3Server
from tests.unit.packing.reading import contents, run_pack
from tests.unit.packing.test_sources import samples


@pytest.fixture
def storage(s3: S3Server) -> StorageConfig:
    return StorageConfig(endpoint_url=s3.endpoint_url, region="us-east-1")


def objects(url: str, storage: StorageConfig) -> dict[str, bytes]:
    store = open_store(url, storage)
    return {info.key: bytes(store.read(info.key)) for info in store.list()}


def test_tars_in_a_bucket_are_packed_into_a_bucket(tmp_path, storage):
    lake = open_store("s3://lake/tars", storage)
    for i in range(2):
        lake.put(f"{i}.tar", write_tar(tmp_path / f"src/{i}.tar", samples(200, first=200 * i)))
    config = PackConfig(kind="tars", shard_bytes="1MiB", workers=1, check="header")
    report = pack("s3://lake/tars", "s3://packed/set", config, storage)
    assert report.samples == 400
    run_pack(tmp_path / "src", tmp_path / "out", kind="tars")
    here = contents(tmp_path / "out")
    there = objects("s3://packed/set", storage)
    assert set(there) == set(here), "runs and records are gone"
    shards = [name for name in here if name.endswith(".tar")]
    assert len(shards) >= 2
    assert {name: there[name] for name in shards} == {name: here[name] for name in shards}
    assert verify("s3://packed/set", storage, decode="sample").errors == []


def test_tars_in_a_bucket_are_indexed_and_merged_with_a_local_set(tmp_path, storage):
    lake = open_store("s3://lake/more", storage)
    path = write_tar(tmp_path / "src/a.tar", samples(40))
    lake.put("a.tar", path)
    report = index("s3://lake/more", str(tmp_path / "set"), IndexConfig(window_bytes="2KiB"), storage)
    assert (report.samples, report.shards) == (40, 1)
    manifest = Manifest.open(open_linked(str(tmp_path / "set"), storage).read)
    assert manifest.shard(0).name == "s3://lake/more/a.tar"
    run_pack(tmp_path / "src", tmp_path / "local", kind="tars")
    done = merge([str(tmp_path / "set"), str(tmp_path / "local")], "s3://packed/merged", storage, checksums=True)
    assert (done.samples, done.blocks_without_checksum) == (80, 0)
    found = verify("s3://packed/merged", storage, decode="all")
    assert (found.samples, found.errors) == (80, [])
