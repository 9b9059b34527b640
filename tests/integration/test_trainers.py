"""The loader inside what others wrap around it: torch's DataLoader and its distributed checkpoints."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils.data import DataLoader, IterableDataset

import dalipipe as dp
from dalipipe.errors import ConfigError


@pytest.fixture
def loader(packed: Path, tmp_path: Path) -> Iterator[dp.Loader]:
    with open_loader(packed, tmp_path / "cache") as made:
        yield made


def open_loader(packed: Path, cache: Path) -> dp.Loader:
    options = [
        f"data.url={packed}",
        f"cache.dir={cache}",
        "graph=image_raw",
        "loader.batch_size=10",
        "prefetch.threads=2",
    ]
    return dp.load("train", options)


class Wrapped(IterableDataset):  # type: ignore[type-arg]
    """What people write when they wrap a loader after all."""

    def __init__(self, loader: dp.Loader) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        return (batch["id"] for batch in self.loader)


def test_a_data_loader_without_workers_passes_batches_on(loader: dp.Loader) -> None:
    seen = torch.cat(list(DataLoader(Wrapped(loader), batch_size=None)))
    assert len(seen) == len(set(seen.tolist())) == 150


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_workers_of_a_data_loader_are_refused(loader: dp.Loader) -> None:
    doubled = DataLoader(Wrapped(loader), batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=60)
    with pytest.raises(
        ConfigError, match=r"worker \d of 2 of a DataLoader: each worker would deliver every batch again"
    ):
        list(doubled)


def _iterate(loader: dp.Loader, answers: Any) -> None:
    try:
        iter(loader)
    except ConfigError as error:
        answers.put(str(error))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_copy_is_refused(loader: dp.Loader) -> None:
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    child = context.Process(target=_iterate, args=(loader, answers))
    child.start()
    message = answers.get(timeout=60)
    child.join(60)
    assert "is iterated by its fork" in message
    assert len(next(iter(loader))["id"]) == 10


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_distributed_checkpoint_keeps_the_position(loader: dp.Loader, packed: Path, tmp_path: Path) -> None:
    assert isinstance(loader, Stateful)
    plan = [batch["id"].tolist() for batch in loader]
    loader.set_epoch(0)
    list(islice(loader, 4))
    dcp.save({"loader": loader}, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    with open_loader(packed, tmp_path / "cache") as other:
        dcp.load({"loader": other}, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
        assert [batch["id"].tolist() for batch in other] == plan[4:]
