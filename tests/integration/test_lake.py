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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dalipipe as dp
from dalipipe.errors import AccessDeniedError, IntegrityError, StorageError
from dalipipe.storage import StorageConfig, open_store
from tests.conftest import NUM_IMAGES
from tests.support.faultproxy import Fault, FaultProxy, Request, Rule, fault_proxy, s3_error
from tests.support.seaweed import S3Server, s3_server

# Blocks of the packed set have 64 KiB, its samples below 10 kB.
_BLOCK_BYTES = 30_000


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


def on_tars(every: int, *faults: Fault) -> Rule:
    """Every so many reads of a shard the next fault."""
    lock, count = threading.Lock(), [0]

    def rule(request: Request) -> Fault | None:
        if request.method != "GET" or ".tar" not in request.target or ".idx" in request.target:
            return None
        with lock:
            count[0] += 1
            turn, rest = divmod(count[0], every)
        fault = faults[turn % len(faults)] if rest == 0 else None
        # Single samples have no digest of their own to be checked by; see the test below.
        return None if fault and fault.flip and _range_bytes(request) < _BLOCK_BYTES else fault

    return rule


def _range_bytes(request: Request) -> int:
    start, stop = request.headers["range"].removeprefix("bytes=").split("-")
    return int(stop) + 1 - int(start)


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
    bucket: str, proxy: FaultProxy, expected: dict[int, torch.Tensor], tmp_path: Path, policy: str
) -> None:
    proxy.rule = on_tars(4, *MIXED)
    overrides = [f"storage.endpoint_url={proxy.url}", "storage.read_timeout_s=0.5", f"cache.policy={policy}"]
    with load(bucket, tmp_path, *overrides) as loader:
        found = epoch_of(loader)
        stats = loader.stats()
    assert sorted(found) == list(range(NUM_IMAGES))
    assert all(torch.equal(found[sample], image) for sample, image in expected.items())
    assert stats["retries"] >= 5
    assert stats["quarantined"] == 0


def test_a_data_set_with_a_manifest_is_never_listed(bucket: str, proxy: FaultProxy, tmp_path: Path) -> None:
    with load(bucket, tmp_path, f"storage.endpoint_url={proxy.url}") as loader:
        epoch_of(loader)
    assert len(proxy.requests) > 5
    assert not [request.target for request in proxy.requests if re.search(r"list-type|[?&]prefix=", request.target)]


def test_a_shard_that_stays_damaged_ends_the_run_by_name(bucket: str, proxy: FaultProxy, tmp_path: Path) -> None:
    proxy.rule = on_tars(1, Fault(flip=True))
    with load(bucket, tmp_path, f"storage.endpoint_url={proxy.url}") as loader:
        with pytest.raises(IntegrityError, match=rf"bytes \[\d+, \d+\).*{bucket}/\S+\.tar.*xxh3-64"):
            epoch_of(loader)


def test_a_single_sample_that_was_damaged_is_found_out_when_its_block_comes(
    bucket: str, proxy: FaultProxy, tmp_path: Path
) -> None:
    def rule(request: Request) -> Fault | None:
        small = "range" in request.headers and _range_bytes(request) < _BLOCK_BYTES
        return Fault(flip=True) if small and ".tar?" in request.target + "?" else None

    proxy.rule = rule
    with load(bucket, tmp_path, f"storage.endpoint_url={proxy.url}") as loader:
        with pytest.raises(IntegrityError, match=rf"bytes \[\d+, \d+\) of {bucket}/\S+\.tar were read wrong"):
            epoch_of(loader)


def test_a_lake_that_is_gone_ends_the_run_by_name_and_the_next_goes_on(
    bucket: str, proxy: FaultProxy, expected: dict[int, torch.Tensor], tmp_path: Path
) -> None:
    narrow = ["prefetch.depth=1", "prefetch.threads=1", "prefetch.cold_steps=0", "storage.retries=1"]
    with load(bucket, tmp_path / "a", f"storage.endpoint_url={proxy.url}", *narrow) as loader:
        batches = iter(loader)
        got = next(batches)["id"].tolist()
        state = loader.state_dict()
        proxy.rule = on_tars(1, Fault(status=503))
        delivered = list(got)
        with pytest.raises(StorageError, match=rf"cannot read {bucket}/\S+\.tar.*503"):
            for batch in batches:
                delivered += batch["id"].tolist()
                state = loader.state_dict()
        proxy.rule = lambda request: None
        loader.load_state_dict(state)
        rest = list(epoch_of(loader))
    assert sorted(delivered + rest) == list(range(NUM_IMAGES))


def test_an_expired_session_says_how_to_renew_it(bucket: str, proxy: FaultProxy, tmp_path: Path) -> None:
    proxy.rule = on_tars(1, Fault(status=403, body=s3_error("ExpiredToken")))
    with load(bucket, tmp_path, f"storage.endpoint_url={proxy.url}") as loader:
        with pytest.raises(AccessDeniedError, match=r"ExpiredToken.*storage\.credential_process"):
            epoch_of(loader)


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


def test_ctrl_c_in_a_stall_ends_the_process_within_two_seconds(bucket: str, proxy: FaultProxy, tmp_path: Path) -> None:
    words = [f"data.url={bucket}", f"cache.dir={tmp_path}", "graph.size=32", "loader.batch_size=16", "device=cpu"]
    words += [f"storage.endpoint_url={proxy.url}", "prefetch.depth=1"]
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", TRAIN, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=root
    ) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == "first\n"
        proxy.rule = on_tars(1, Fault(delay_s=60))
        time.sleep(0.5)
        os.kill(job.pid, signal.SIGINT)
        began_s = time.monotonic()
        out, err = job.communicate(timeout=30)
        took_s = time.monotonic() - began_s
    assert "KeyboardInterrupt" in err
    assert float(out.split("closed ")[1]) < 2.2
    # The interpreter with torch and DALI needs some time of its own to end.
    assert took_s < 8
