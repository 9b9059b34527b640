"""Training from a real S3 server that misbehaves: no sample is lost or repeated, nothing damaged is delivered."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import torch

import dalipipe as dp
from dalipipe.errors import AccessDeniedError, IntegrityError, PipelineTimeoutError, StorageError
from dalipipe.packing.config import PackConfig
from dalipipe.packing.run import pack
from dalipipe.shards.manifest import Manifest
from dalipipe.storage import StorageConfig, open_store
from tests.conftest import NUM_IMAGES
from tests.support.faultproxy import Fault, FaultProxy, Request, fault_proxy, s3_error
from tests.support.gcs import TOKEN, gcs_fake
from tests.support.host import within
from tests.support.protocols import alluxio_worker
from tests.support.seaweed import S3Server, s3_server
from tests.support.sftp import PASSWORD, USER, sftp_server

# The start of the server counts for the first test, and on a loaded host it takes minutes.
pytestmark = pytest.mark.timeout(300)

Ranges = frozenset[tuple[str, int, int]]


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("seaweed")) as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment().items():
            patch.setenv(name, value)
        yield server


@pytest.fixture(scope="module")
def bucket(s3: S3Server, packed: Path) -> str:
    """The packed set in a bucket."""
    url = f"s3://bucket/{uuid.uuid4().hex}"
    store = open_store(url, StorageConfig(endpoint_url=s3.endpoint_url))
    for file in packed.rglob("*"):
        if file.is_file() and ".pack" not in file.parts:
            store.put(str(file.relative_to(packed)), file)
    store.close()
    return url


@pytest.fixture
def proxy(s3: S3Server) -> Iterator[FaultProxy]:
    with fault_proxy(s3.endpoint_url) as proxy:
        yield proxy


def load(url: str, cache: Path, *overrides: str) -> dp.Loader:
    base = [f"data.url={url}", f"cache.dir={cache}", "graph.size=32", "loader.batch_size=16", "device=cpu"]
    return dp.load("train", [*base, "loader.last_batch=partial", *overrides])


def epoch_of(loader: Any) -> dict[int, torch.Tensor]:
    """Images by id; fails where an id comes twice."""
    found: dict[int, torch.Tensor] = {}
    for batch in loader:
        for sample, image in zip(batch["id"].tolist(), batch["image"], strict=True):
            assert sample not in found
            found[sample] = image.clone()
    return found


@pytest.fixture(scope="module")
def expected(packed: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, torch.Tensor]:
    with load(str(packed), tmp_path_factory.mktemp("direct")) as loader:
        return epoch_of(loader)


@pytest.fixture(scope="module")
def blocks(packed: Path) -> Ranges:
    """Shard, start and stop of what whole blocks lie in: only these have digests."""
    store = open_store(str(packed))
    manifest = Manifest.open(store.read)
    store.close()
    extents = [extent for block in range(manifest.num_blocks) for extent in manifest.extents(block)]
    return frozenset((extent.shard, extent.start, extent.stop) for extent in extents)


class OnTars:
    """A rule: every so many reads of a shard get the next fault; `served` holds those that were."""

    def __init__(self, blocks: Ranges, every: int, *faults: Fault) -> None:
        self.served: list[Fault] = []
        self._blocks = blocks
        self._every = every
        self._faults = list(faults)
        self._hit: set[tuple[Fault, tuple[str, int, int]]] = set()
        self._count = 0

    def __call__(self, request: Request) -> Fault | None:  # by the one thread of the proxy
        where = read_of_tar(request)
        if where is None:
            return None
        self._count += 1
        if self._count % self._every:
            return None
        for fault in self._faults:
            if self._may(fault, where):
                if len(self._faults) > 1:  # to the end of the queue
                    self._faults.remove(fault)
                    self._faults.append(fault)
                    self._hit.add((fault, where))
                self.served.append(fault)
                return fault
        return None

    def _may(self, fault: Fault, where: tuple[str, int, int]) -> bool:
        # Single samples have no digest of their own to be checked by; see the test below.
        if fault.flip and not is_of_blocks(where, self._blocks):
            return False
        # Damaged or short twice in a row is an error by contract, and whether the second hits the same read would
        # otherwise be up to the threads.
        return len(self._faults) == 1 or not (fault.flip or fault.short) or (fault, where) not in self._hit


def is_of_blocks(where: tuple[str, int, int], blocks: Ranges) -> bool:
    """Whether a read brings whole blocks: one, or some that lie one behind the other."""
    name, start, stop = where
    return any(one[:2] == (name, start) for one in blocks) and any((one[0], one[2]) == (name, stop) for one in blocks)


def read_of_tar(request: Request) -> tuple[str, int, int] | None:
    """Shard, start and stop of a read of a shard; None for any other request."""
    name = request.target.partition("?")[0].rpartition("/")[2]
    if request.method != "GET" or not name.endswith(".tar"):
        return None
    start, stop = request.headers["range"].removeprefix("bytes=").split("-")
    return name, int(start), int(stop) + 1


def patient_s(url: str, endpoint_url: str) -> float:
    """A read timeout that this host keeps as it is just now: above all healthy answers and far below a stall."""
    store = open_store(url, StorageConfig(endpoint_url=endpoint_url))
    longest_s = 0.0
    for _ in range(5):
        began_s = time.monotonic()
        store.read("manifest.json")
        longest_s = max(longest_s, time.monotonic() - began_s)
    store.close()
    return min(8.0, max(0.5, 20 * longest_s))


MIXED = (
    Fault(status=503, body=s3_error("SlowDown")),
    Fault(cut=0.5),
    Fault(flip=True),
    Fault(short=0.7),
    Fault(cut=0),
    Fault(delay_s=0.3),
    Fault(status=500),
    Fault(stall_s=30),
)


@pytest.mark.parametrize("policy", ["pin", "stream"])
def test_an_epoch_over_a_lake_with_all_faults_is_the_epoch_without(
    bucket: str, proxy: FaultProxy, blocks: Ranges, expected: dict[int, torch.Tensor], tmp_path: Path, *, policy: str
) -> None:
    read_timeout_s = patient_s(bucket, proxy.url)
    proxy.rule = rule = OnTars(blocks, 2, *MIXED)
    overrides = [f"storage.endpoint_url={proxy.url}", f"storage.read_timeout_s={read_timeout_s}"]
    overrides += [f"cache.policy={policy}"]
    with load(bucket, tmp_path, *overrides) as loader:
        found = epoch_of(loader)
        stats = loader.stats()
    assert sorted(found) == list(range(NUM_IMAGES))
    assert all(torch.equal(found[sample], image) for sample, image in expected.items())
    assert set(rule.served) == set(MIXED)
    # A read whose hedge answered first needs no retry.
    assert stats["retries"] + stats["hedges"] >= 5
    assert stats["quarantined"] == 0


def test_a_data_set_with_a_manifest_is_never_listed(bucket: str, proxy: FaultProxy, tmp_path: Path) -> None:
    with load(bucket, tmp_path, f"storage.endpoint_url={proxy.url}") as loader:
        epoch_of(loader)
    assert len(proxy.requests) > 5
    assert not [request.target for request in proxy.requests if re.search(r"list-type|[?&]prefix=", request.target)]


def test_a_shard_that_stays_damaged_ends_the_run_by_name(
    bucket: str, proxy: FaultProxy, blocks: Ranges, tmp_path: Path
) -> None:
    proxy.rule = OnTars(blocks, 1, Fault(flip=True))
    with load(bucket, tmp_path, f"storage.endpoint_url={proxy.url}") as loader:
        with pytest.raises(IntegrityError, match=rf"bytes \[\d+, \d+\).*{bucket}/\S+\.tar.*xxh3-64"):
            epoch_of(loader)


def test_a_single_sample_that_was_damaged_is_found_out_when_its_block_comes(
    bucket: str, proxy: FaultProxy, blocks: Ranges, tmp_path: Path
) -> None:
    flipped = threading.Event()

    def rule(request: Request) -> Fault | None:
        where = read_of_tar(request)
        if where is None:
            return None
        if is_of_blocks(where, blocks):  # not before samples were read alone, or nobody would read them alone
            return None if flipped.is_set() else Fault(delay_s=2)
        flipped.set()
        return Fault(flip=True)

    proxy.rule = rule
    with load(bucket, tmp_path, f"storage.endpoint_url={proxy.url}") as loader:
        with pytest.raises(IntegrityError, match=rf"bytes \[\d+, \d+\) of {bucket}/\S+\.tar were read wrong"):
            epoch_of(loader)


def test_a_lake_that_is_gone_ends_the_run_by_name_and_the_next_goes_on(
    bucket: str, proxy: FaultProxy, blocks: Ranges, tmp_path: Path
) -> None:
    narrow = ["prefetch.depth=1", "prefetch.threads=1", "prefetch.cold_steps=0", "storage.retries=1"]
    with load(bucket, tmp_path / "a", f"storage.endpoint_url={proxy.url}", *narrow) as loader:
        batches = iter(loader)
        got = next(batches)["id"].tolist()
        state = loader.state_dict()
        proxy.rule = OnTars(blocks, 1, Fault(status=503))
        delivered = list(got)
        with pytest.raises(StorageError, match=rf"cannot read {bucket}/\S+\.tar.*503"):
            for batch in batches:
                delivered += batch["id"].tolist()
                state = loader.state_dict()
        proxy.rule = lambda request: None
        loader.load_state_dict(state)
        rest = list(epoch_of(loader))
    assert sorted(delivered + rest) == list(range(NUM_IMAGES))


def test_an_expired_session_says_how_to_renew_it(
    bucket: str, proxy: FaultProxy, blocks: Ranges, tmp_path: Path
) -> None:
    proxy.rule = OnTars(blocks, 1, Fault(status=403, body=s3_error("ExpiredToken")))
    with load(bucket, tmp_path, f"storage.endpoint_url={proxy.url}") as loader:
        with pytest.raises(AccessDeniedError, match=r"ExpiredToken.*storage\.credential_process"):
            epoch_of(loader)


def test_a_mount_that_hangs_is_named_by_file_and_does_not_hold_up_close(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As a dead NFS or FUSE server does it: reads of the shards never come back. A real one: tests of mounts."""
    gate = threading.Event()

    def hanging(read: Callable[..., Any]) -> Callable[..., Any]:
        def call(descriptor: int, *rest: Any) -> Any:
            if Path(f"/proc/self/fd/{descriptor}").readlink().suffix == ".tar":
                gate.wait(60)
            return read(descriptor, *rest)

        return call

    for name in ("pread", "preadv"):
        monkeypatch.setattr(os, name, hanging(getattr(os, name)))
    try:
        loader = load(str(packed), tmp_path, "prefetch.timeout_s=0.5")
        with pytest.raises(
            PipelineTimeoutError, match=rf"from {packed}/\S+\.tar.*mount that hangs.*prefetch.timeout_s"
        ):
            next(iter(loader))
        with within(2):
            loader.close()
    finally:
        gate.set()
    assert re.search(rf"{packed}/\S+\.tar.*left behind", caplog.text)


def test_a_set_on_an_sftp_server_is_packed_and_trained_on(
    lake: Path, expected: dict[int, torch.Tensor], tmp_path: Path
) -> None:
    with sftp_server(tmp_path) as server:
        url = server.url("the set", user=f"{USER}:{quote(PASSWORD, safe='')}")
        options = {"known_hosts": str(server.known_hosts), "allow_agent": False, "look_for_keys": False}
        config = PackConfig(shard_bytes="1MiB", block_bytes="64KiB", workers=1)
        pack(str(lake), url, config, StorageConfig(options=options))
        words = [f"+storage.options.{name}={value}" for name, value in options.items()]
        with load(url, tmp_path / "cache", *words) as loader:
            found = epoch_of(loader)
    assert sorted(found) == sorted(expected)
    assert all(torch.equal(found[sample], image) for sample, image in expected.items())


@pytest.mark.parametrize("kind", ["gs", "alluxio"])
def test_a_set_behind_a_fake_of_its_store_is_trained_on(
    packed: Path, expected: dict[int, torch.Tensor], tmp_path: Path, kind: str
) -> None:
    """From keys on the command line to batches; the fakes: tests/support."""
    with ExitStack() as stack:
        if kind == "gs":
            url = "gs://bucket/the-set"
            endpoint = stack.enter_context(gcs_fake())
            words = [f"storage.gs_endpoint_url={endpoint}", f"+storage.options.google_bearer_token={TOKEN}"]
            config = StorageConfig(gs_endpoint_url=endpoint, options={"google_bearer_token": TOKEN})
        else:
            pytest.importorskip("alluxiofs")
            worker = stack.enter_context(alluxio_worker("s3://under"))
            url = f"alluxio://{worker.host}:{worker.port},{worker.host}:{worker.port}/the-set"
            words, config = ["+storage.options.ufs=s3://under"], StorageConfig(options={"ufs": "s3://under"})
        store = open_store(url, config)
        for file in packed.rglob("*"):
            if file.is_file() and ".pack" not in file.parts:
                store.put(str(file.relative_to(packed)), file)
        store.close()
        run = tmp_path / "run"
        with load(url, tmp_path / "cache", *words, f"run_dir={run}") as loader:
            found = epoch_of(loader)
    assert sorted(found) == sorted(expected)
    assert all(torch.equal(found[sample], image) for sample, image in expected.items())
    assert not [path for path in run.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()]


TRAIN = """
import sys, time
import dalipipe as dp
loader = dp.load("train", sys.argv[1:])
try:
    for number, batch in enumerate(loader):
        if number == 0:
            print("first", flush=True)
        time.sleep(0.05)
    time.sleep(60)
finally:
    began = time.monotonic()
    loader.close()
    print(f"closed {time.monotonic() - began:.2f}", flush=True)
"""


def test_ctrl_c_in_a_stall_ends_the_process_within_two_seconds(
    bucket: str, proxy: FaultProxy, blocks: Ranges, tmp_path: Path
) -> None:
    stalled = threading.Event()
    last_shard = max(name for name, _, _ in blocks)

    def rule(request: Request) -> Fault | None:
        where = read_of_tar(request)
        if where is None or where[0] != last_shard:
            return None
        stalled.set()
        return Fault(delay_s=60)

    proxy.rule = rule

    words = [f"data.url={bucket}", f"cache.dir={tmp_path}", "graph.size=32", "loader.batch_size=16", "device=cpu"]
    words += [f"storage.endpoint_url={proxy.url}", "shuffle.mode=none"]
    root = Path(__file__).parents[2]
    started_s = time.monotonic()
    with subprocess.Popen(
        [sys.executable, "-c", TRAIN, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=root
    ) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == "first\n"
        # How slow this host is just now: a start takes about 5 s when nothing else runs.
        slowness = max(1.0, (time.monotonic() - started_s) / 10)
        assert stalled.wait(30)
        os.kill(job.pid, signal.SIGINT)
        began_s = time.monotonic()
        out, err = job.communicate(timeout=30)
        took_s = time.monotonic() - began_s
    assert "KeyboardInterrupt" in err
    assert float(out.split("closed ")[1]) < 2 * slowness
    # The interpreter with torch and DALI needs some time of its own to end.
    assert took_s < 8 * slowness
