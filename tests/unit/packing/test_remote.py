"""Source and target in a real object store: the same bytes as on a local disk."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dalipipe.errors import SourceError
from dalipipe.packing.config import IndexConfig, PackConfig
from dalipipe.packing.index import index
from dalipipe.packing.merge import merge
from dalipipe.packing.run import pack
from dalipipe.packing.verify import open_linked, verify
from dalipipe.shards import Manifest
from dalipipe.storage.open import open_store
from dalipipe.storage.store import StorageConfig
from tests.support.archives import write_tar
from tests.support.images import write_image_tree
from tests.support.seaweed import S3Server
from tests.unit.packing.reading import contents, read_back, run_pack
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


NUM_IMAGES = 300

CHILD = """
import os, signal, sys
from dalipipe.packing.config import PackConfig
from dalipipe.packing.run import pack
from dalipipe.storage.store import StorageConfig

def die_after_one(done, total):
    if done:
        os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    config = PackConfig(shard_bytes="1MiB", workers=2, check="header")
    pack(sys.argv[1], sys.argv[2], config, StorageConfig(endpoint_url=sys.argv[3], region="us-east-1"),
         progress=die_after_one)
"""


@pytest.fixture(scope="module")
def lake(s3: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images in class folders, here and in a bucket."""
    root = tmp_path_factory.mktemp("lake")
    files = write_image_tree(root, num_images=NUM_IMAGES)
    store = open_store("s3://lake/images", StorageConfig(endpoint_url=s3.endpoint_url, region="us-east-1"))
    for path in files:
        store.put(str(path.relative_to(root)), path)
    return root


def test_images_from_bucket_to_bucket_by_two_workers_killed_and_resumed(tmp_path, storage, lake):
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    where = ("s3://lake/images", "s3://packed/images")
    child = subprocess.run(
        [sys.executable, str(script), *where, str(storage.endpoint_url)], env=environment, timeout=100, check=False
    )
    assert child.returncode == -signal.SIGKILL
    left = set(objects(where[1], storage))
    assert "manifest.json" not in left
    finished = sum(name.endswith(".done") for name in left)
    assert finished >= 1
    done: list[int] = []
    config = PackConfig(shard_bytes="1MiB", workers=2, check="header")
    pack(*where, config, storage, progress=lambda count, _total: done.append(count))
    assert done[0] > 0, "finished shards are not packed again"
    run_pack(lake, tmp_path / "out")
    here, there = contents(tmp_path / "out"), objects(where[1], storage)
    assert set(there) == set(here)
    shards = [name for name in here if name.endswith((".tar", ".idx"))]
    assert len(shards) >= 4
    assert {name: there[name] for name in shards} == {name: here[name] for name in shards}


def test_an_object_that_is_deleted_after_it_was_listed_is_named(storage, lake):
    bucket = open_store("s3://lake/images", storage)
    victim = next(info.key for info in bucket.list("class_1"))

    def meanwhile(_done: int, _total: int) -> None:
        bucket.delete(victim)

    config = PackConfig(shard_bytes="1MiB", workers=1, check="none")
    try:
        with pytest.raises(SourceError, match=rf"s3://lake/images/{victim} was listed but is gone"):
            pack("s3://lake/images", "s3://packed/gone", config, storage, progress=meanwhile)
    finally:
        bucket.put(victim, lake / victim)
    assert "manifest.json" not in objects("s3://packed/gone", storage)


def test_images_in_a_bucket_are_read_where_they_lie(tmp_path, storage, lake):
    config = IndexConfig(shard_bytes="1MiB")
    for target in (str(tmp_path / "set"), "s3://lake/images"):
        report = index("s3://lake/images", target, config, storage)
        assert (report.samples, report.bytes_read) == (NUM_IMAGES, 0)
        found = verify(target, storage, decode="sample", add_checksums=True)
        assert (found.errors, found.samples, found.without_checksum) == ([], NUM_IMAGES, 0)
    run_pack(lake, tmp_path / "out", check="none")
    assert read_back(tmp_path / "set", storage) == read_back(tmp_path / "out")
