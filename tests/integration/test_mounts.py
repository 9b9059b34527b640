"""Buckets and mounts as lake and as pool: SeaweedFS by S3 and FUSE, Ceph by its gateway and as CephFS."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import dalipipe as dp
from dalipipe.errors import PipelineTimeoutError
from dalipipe.packing.config import PackConfig
from dalipipe.packing.run import pack
from dalipipe.storage.store import StorageConfig
from tests.conftest import NUM_IMAGES
from tests.support.ceph import Ceph, ceph, make_bucket
from tests.support.host import within
from tests.support.seaweed import S3Server, s3_server
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("store")) as running:
        yield running


@pytest.fixture
def storage(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> StorageConfig:
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    return StorageConfig(endpoint_url=server.endpoint_url, region="us-east-1")


@pytest.fixture
def mount(storage: StorageConfig, tmp_path: Path, server: S3Server) -> Iterator[Path]:
    """The bucket `ready`, which the server's start made, as a folder."""
    weed = shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")
    if weed is None or not Path("/dev/fuse").exists() or shutil.which("fusermount3") is None or os.geteuid() != 0:
        pytest.skip("a FUSE mount needs root, /dev/fuse and fusermount3: apt-get install fuse3")
    point = tmp_path / "mount"
    point.mkdir()
    filer = _filer_of(server)
    with (tmp_path / "mount.log").open("wb") as log:
        words = [weed, "mount", f"-filer=127.0.0.1:{filer}", f"-dir={point}", "-filer.path=/buckets/ready"]
        process = subprocess.Popen(words, stdout=log, stderr=log)
        try:
            wait_until(lambda: os.path.ismount(point), (tmp_path / "mount.log").read_text, process=process)
            yield point
        finally:
            subprocess.run(["fusermount3", "-u", "-z", str(point)], check=False, timeout=30)
            process.kill()
            process.wait(30)


def test_a_bucket_and_its_mount_hold_the_same_set(
    lake: Path, storage: StorageConfig, mount: Path, tmp_path: Path
) -> None:
    """Packed to the bucket, read through the mount; and the other way round."""
    config = PackConfig(shard_bytes="1MiB", block_bytes="64KiB", workers=1)
    pack(str(lake), "s3://ready/one", config, storage)
    wait_until((mount / "one/manifest.json").is_file, "the manifest, seen through the mount,")
    pack(str(lake), str(mount / "two"), config, StorageConfig())
    ids = {}
    for number, url in enumerate(("s3://ready/one", str(mount / "one"), str(mount / "two"), "s3://ready/two")):
        ids[url] = _ids(url, storage, tmp_path / f"cache{number}")
    assert len({tuple(found) for found in ids.values()}) == 1
    assert len(next(iter(ids.values()))) == NUM_IMAGES // 10 * 10


@pytest.mark.parametrize("kind", ["bucket", "mount"])
def test_the_second_node_reads_the_pool_alone(
    kind: str, packed: Path, storage: StorageConfig, mount: Path, tmp_path: Path
) -> None:
    """A byte leaves the lake once, whichever way the pool is reached."""
    pool = "s3://ready/pool" if kind == "bucket" else str(mount / "mounted-pool")
    lake_bytes, pool_bytes = [], []
    for node in range(2):
        with dp.load("train", _words(str(packed), storage, tmp_path / f"node{node}", pool)) as loader:
            for _batch in loader:
                pass
            read = loader.stats()["bytes_read"]
            lake_bytes.append(read["lake"])
            pool_bytes.append(read["pool"])
    assert lake_bytes[0] > 0
    assert lake_bytes[1] == 0
    assert pool_bytes[1] > 0


def test_a_mount_whose_server_stops_is_named_by_file_and_does_not_hold_up_close(
    packed: Path, storage: StorageConfig, mount: Path, tmp_path: Path
) -> None:
    """The process behind the mount is stopped in the middle of a run, so that reads truly hang in the kernel."""
    for file in packed.rglob("*"):
        if file.is_file() and ".pack" not in file.parts:
            target = mount / "hung" / file.relative_to(packed)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read_bytes())
    server = _process_of(f"-dir={mount}")
    words = [*_words(str(mount / "hung"), storage, tmp_path / "cache"), "prefetch.timeout_s=3", "prefetch.depth=1"]
    loader = dp.load("train", [*words, "cache.policy=stream", "prefetch.threads=2", "prefetch.cold_steps=0"])
    try:
        batches = iter(loader)
        next(batches)
        os.kill(server, signal.SIGSTOP)
        with pytest.raises(PipelineTimeoutError, match=rf"from {mount}/hung/\S+\.tar.*mount that hangs"):
            for _batch in batches:
                pass
        with within(2):
            loader.close()
    finally:
        os.kill(server, signal.SIGCONT)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ceph]:
    with ceph(tmp_path_factory.mktemp("ceph")) as running:
        yield running


def test_ceph_is_lake_and_pool_by_gateway_and_as_a_file_system(
    lake: Path, packed: Path, cluster: Ceph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed to both, both give the same batches; a second node reads the pool on either and not the lake."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", cluster.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", cluster.secret_key)
    make_bucket(cluster, "ready")
    storage = StorageConfig(endpoint_url=cluster.endpoint_url, region="us-east-1")
    config = PackConfig(shard_bytes="1MiB", block_bytes="64KiB", workers=1)
    urls = ("s3://ready/one", str(cluster.mount / "one"))
    for url in urls:
        pack(str(lake), url, config, storage)
    by_gateway, by_mount = (_ids(url, storage, tmp_path / f"cache{n}") for n, url in enumerate(urls))
    assert by_gateway == by_mount
    assert len(by_mount) == NUM_IMAGES // 10 * 10
    for number, pool in enumerate(("s3://ready/pool", str(cluster.mount / "pool"))):
        lake_bytes = [_lake_bytes(packed, storage, tmp_path / f"node{number}{node}", pool) for node in range(2)]
        assert lake_bytes[0] > 0
        assert lake_bytes[1] == 0


def _lake_bytes(packed: Path, storage: StorageConfig, cache: Path, pool: str) -> int:
    with dp.load("train", _words(str(packed), storage, cache, pool)) as loader:
        for _batch in loader:
            pass
        return int(loader.stats()["bytes_read"]["lake"])


def _words(url: str, storage: StorageConfig, cache: Path, pool: str = "") -> list[str]:
    words = [f"data.url={url}", f"cache.dir={cache}", "loader.batch_size=10", "graph.size=32"]
    words += [f"storage.endpoint_url={storage.endpoint_url}", f"storage.region={storage.region}"]
    return [*words, *([f"cache.tiers.pool.url={pool}"] if pool else [])]


def _ids(url: str, storage: StorageConfig, cache: Path) -> list[int]:
    with dp.load("train", _words(url, storage, cache)) as loader:
        return [int(number) for batch in loader for number in batch["id"]]


def _process_of(word: str) -> int:
    """The process that was started with this word."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if word in words:
            return int(folder.name)
    raise AssertionError(f"no process was started with {word}")


def _filer_of(server: S3Server) -> int:
    """The filer's port, from the command line of the server that listens on this S3 port."""
    port = server.endpoint_url.rsplit(":", 1)[1]
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if f"-s3.port={port}\0" in words:
            found = re.search(r"-filer\.port=(\d+)", words)
            assert found is not None
            return int(found[1])
    raise AssertionError(f"no server listens on {port}")
