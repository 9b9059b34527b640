"""The loader's state in an object store: published, torn, picked up."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

import dalipipe as dp
from dalipipe.loader.publish import STATE_NAMES, read_published
from dalipipe.storage import StorageConfig, open_store
from tests.support.seaweed import S3Server

STATE_URL = "s3://states/runs/7/state"


@pytest.fixture
def s3(shared_s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    for name, value in shared_s3.environment().items():
        monkeypatch.setenv(name, value)
    return shared_s3


def load(packed: Path, cache: Path, s3: S3Server, *overrides: str) -> dp.Loader:
    options = [
        f"data.url={packed}",
        f"cache.dir={cache}",
        "graph=image_raw",
        "loader.batch_size=10",
        f"storage.endpoint_url={s3.endpoint_url}",
        f"state.url={STATE_URL}",
        "state.every_s=0",
    ]
    return dp.load("train", [*options, *overrides])


def test_a_state_in_a_bucket_is_picked_up_and_a_torn_one_passed_over(
    packed: Path, tmp_path: Path, s3: S3Server
) -> None:
    with load(packed, tmp_path / "cache", s3, "resume=auto") as loader:
        assert sum(len(batch["id"]) for batch in loader) == 150
        list(islice(loader, 3))
        assert loader.stats()["state"]["failed"] == 0
    store = open_store(STATE_URL, StorageConfig(endpoint_url=s3.endpoint_url))
    newest = read_published(store)
    assert newest is not None
    assert (newest.state["epoch"], newest.state["step"]) == (1, 2)
    name = STATE_NAMES[newest.number % 2]
    store.put(name, bytes(store.read(name))[:40])
    before = read_published(store)
    assert before is not None
    assert before.number == newest.number - 1
    with load(packed, tmp_path / "cache", s3, "resume=auto") as loader:
        state = loader.state_dict()
        assert (state["epoch"], state["step"]) == (before.state["epoch"], before.state["step"])
    store.close()
