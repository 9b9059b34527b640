"""The whole pipeline through `dalipipe.load`: the right samples, once each, whoever loads them."""

from __future__ import annotations

import io
import json
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import dalipipe as dp
from dalipipe.errors import ConfigError, IntegrityError, ManifestError
from tests.conftest import NUM_CLASSES, NUM_IMAGES
from tests.support.host import within
from tests.support.images import jpeg_bytes


def load(packed: Path, cache: Path, *overrides: str, name: str = "train", world: dp.World | None = None) -> dp.Loader:
    base = [f"data.url={packed}", f"cache.dir={cache}", "graph.size=32", "prefetch.threads=2"]
    if not any("batch_size" in word for word in overrides):
        base.append("loader.batch_size=16")
    return dp.load(name, [*base, *overrides], world=world)


def ids_of(loader: Any) -> list[list[int]]:
    return [batch["id"].tolist() for batch in loader]


def test_two_epochs_every_sample_once_and_the_second_from_the_cache(packed: Path, tmp_path: Path) -> None:
    with load(packed, tmp_path, "loader.last_batch=partial") as loader:
        assert len(loader) == -(-NUM_IMAGES // 16)
        first = ids_of(loader)
        after_first = loader.stats()
        second = ids_of(loader)
        after_second = loader.stats()
    for epoch in (first, second):
        assert sorted(sum(epoch, [])) == list(range(NUM_IMAGES))
        assert [len(batch) for batch in epoch] == [16] * 9 + [6]
    assert first != second
    assert after_first["bytes_read"]["lake"] > 0
    # The window of the next epoch is prefetched while this one ends; all of it is near by then.
    assert after_second["bytes_read"]["lake"] == after_first["bytes_read"]["lake"]
    assert after_second["samples"] == 2 * NUM_IMAGES


def test_batches_hold_what_the_contract_says(packed: Path, tmp_path: Path) -> None:
    with load(packed, tmp_path) as loader:
        batch = next(iter(loader))
        assert batch["image"].shape == (16, 3, 32, 32)
        assert batch["image"].dtype == torch.float32
        assert batch["image"].device == loader.device
        assert batch["label"].dtype == batch["id"].dtype == torch.int64
        assert set(batch) == {"image", "label", "id"}
        keys = loader.manifest.keys(batch["id"].numpy())
        classes = [loader.manifest.classes[label] for label in batch["label"].tolist()]
        assert all(name in key for key, name in zip(keys, classes, strict=True))
        assert len(loader.manifest.classes) == NUM_CLASSES
        stats = loader.stats()
    names = {
        "samples",
        "batches",
        "wait_s",
        "quarantined",
        "retries",
        "hedges",
        "bytes_read",
        "bytes_written",
        "stage_s",
    }
    assert names <= set(stats)
    assert {"lake", "pool", "node", "memory", "device"} <= set(stats["bytes_read"])
    assert {"node", "pool"} <= set(stats["bytes_written"])
    json.dumps(stats)


def test_pixels_are_those_of_the_files(packed: Path, lake: Path, tmp_path: Path) -> None:
    options = ("graph.size=64", "graph.resize_shorter=80", "graph.dtype=uint8")
    with load(packed, tmp_path, *options, name="eval") as loader:
        batch = next(iter(loader))
        keys = loader.manifest.keys(batch["id"].numpy())
    assert batch["id"].tolist() == list(range(16))
    for image, key in zip(batch["image"], keys, strict=True):
        path = next(lake.rglob(f"{Path(key).name}.jpg"))
        expected = _eval_crop(Image.open(io.BytesIO(path.read_bytes())).convert("RGB"), 80, 64)
        assert np.abs(image.permute(1, 2, 0).numpy().astype(int) - expected.astype(int)).max() <= 1


def _eval_crop(image: Image.Image, shorter: int, size: int) -> np.ndarray[Any, Any]:
    width, height = (side * shorter // min(image.size) for side in image.size)
    left, top = (round((side - size) / 2) for side in (width, height))
    box = (left, top, left + size, top + size)
    return np.asarray(image.resize((width, height), Image.Resampling.BILINEAR).crop(box))


@pytest.mark.parametrize("world_size", [2, 4])
def test_any_world_size_trains_on_the_same_global_batches(packed: Path, tmp_path: Path, world_size: int) -> None:
    options = ("loader.global_batch_size=16", "loader.last_batch=drop")
    with load(packed, tmp_path, *options) as alone:
        expected = ids_of(alone)
        images = {}
        for batch in alone:  # the second epoch
            images |= dict(zip(batch["id"].tolist(), batch["image"], strict=True))
    merged: list[list[int]] = [[] for _ in expected]
    for rank in range(world_size):
        world = dp.World(rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size)
        with load(packed, tmp_path, *options, world=world) as loader:
            assert loader.batch_size == 16 // world_size
            for step, ids in enumerate(ids_of(loader)):
                merged[step] += ids
            if rank == 1:
                for batch in loader:  # the same sample gets the same crop wherever it is loaded
                    for sample, image in zip(batch["id"].tolist(), batch["image"], strict=True):
                        assert torch.equal(image, images[sample])
    assert merged == expected


def test_resume_at_another_world_size_and_depth(packed: Path, tmp_path: Path) -> None:
    options = ("loader.global_batch_size=12", "loader.last_batch=partial")
    with load(packed, tmp_path, *options) as whole:
        expected = ids_of(whole)
    with load(packed, tmp_path, *options) as loader:
        batches = iter(loader)
        seen = [next(batches)["id"].tolist() for _ in range(5)]
        state = json.loads(json.dumps(loader.state_dict()))
    rest: list[list[int]] = [[] for _ in expected[5:]]
    for rank in range(3):
        world = dp.World(rank=rank, world_size=3, local_rank=rank, local_world_size=3)
        with load(packed, tmp_path, *options, "prefetch.depth=1", "prefetch.queue_depth=1", world=world) as loader:
            loader.load_state_dict(state)
            for step, ids in enumerate(ids_of(loader)):
                rest[step] += ids
    assert seen + rest == expected


def test_padding_repeats_real_samples_and_says_so(packed: Path, tmp_path: Path) -> None:
    with load(packed, tmp_path, "loader.last_batch=pad") as loader:
        batches = list(loader)
    assert all(len(batch["id"]) == 16 for batch in batches)
    valid = torch.cat([batch["valid"] for batch in batches])
    ids = torch.cat([batch["id"] for batch in batches])
    assert sorted(ids[valid].tolist()) == list(range(NUM_IMAGES))
    assert set(ids[~valid].tolist()) <= set(range(NUM_IMAGES))
    assert loader.stats()["samples"] == NUM_IMAGES


def test_a_damaged_shard_is_named_and_never_trained_on(packed: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(packed, broken)
    shard = sorted(broken.glob("*.tar"))[0]
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 0xFF
    shard.write_bytes(data)
    with load(broken, tmp_path / "cache") as loader, pytest.raises(IntegrityError, match=shard.name):
        list(loader)
    with shard.open("r+b") as file:
        file.truncate(len(data) // 2)
    with load(broken, tmp_path / "cache2") as loader, pytest.raises(IntegrityError, match=shard.name):
        list(loader)


def test_one_bad_image_costs_one_substitute(tmp_path: Path) -> None:
    from dalipipe.packing.config import PackConfig
    from dalipipe.packing.run import pack
    from dalipipe.storage.store import StorageConfig

    lake = tmp_path / "lake"
    for i in range(48):
        path = lake / f"class_{i % 2}" / f"{i:03d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg_bytes(i) if i != 11 else jpeg_bytes(i)[:900])
    config = PackConfig(shard_bytes="1MiB", check="none", workers=1)
    pack(str(lake), str(tmp_path / "set"), config, StorageConfig())
    options = ("loader.batch_size=8", f"run_dir={tmp_path / 'run'}", "quarantine.max_fraction=0.1")
    with load(tmp_path / "set", tmp_path / "cache", *options) as loader:
        for _ in range(2):
            ids = sum(ids_of(loader), [])
            assert len(ids) == 48
            missing = set(range(48)) - set(ids)
            assert [Path(key).name for key in loader.manifest.keys(np.array(sorted(missing)))] == ["011"]
        assert loader.stats()["quarantined"] >= 1
    records = [json.loads(line) for line in (tmp_path / "run/quarantine.jsonl").read_text().splitlines()]
    assert {record["id"] for record in records} == missing
    with load(tmp_path / "set", tmp_path / "cache", "loader.batch_size=8", "quarantine.policy=raise") as strict:
        with pytest.raises(dp.errors.QuarantineError):
            list(strict)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("loader.batch_size=4", "loader.global_batch_size=4"), "exactly one"),
        (("loader.batch_size=0",), "at least 1"),
        (("loader.batch_size=1000",), "150 samples"),
        (("loader.last_batch=sometimes",), "drop, partial, pad"),
        (("shuffle.lanes=5",), "must divide"),
        (("cache.policy=fifo",), "auto, pin, lru, lfu, stream"),
        (("device=tpu",), "device='tpu'"),
        (("device=cuda:7",), "no GPU"),
        (("graph.dtype=int4",), "graph.dtype"),
        (("data.fields=[image,caption]",), "caption"),
        (("quarantine.policy=ignore",), "quarantine.policy"),
        (("assign=lease",), "assign=static"),
    ],
)
def test_what_cannot_work_is_refused_at_start(
    packed: Path, tmp_path: Path, overrides: tuple[str, ...], message: str
) -> None:
    if "cuda:7" in overrides[0] and torch.cuda.is_available():
        pytest.skip("this host has a GPU")
    with pytest.raises(ConfigError) as caught:
        next(iter(load(packed, tmp_path, *overrides)))
    assert message in str(caught.value)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("dalipipe")]


def test_no_data_set_there(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"manifest\.json"):
        load(tmp_path, tmp_path / "cache")


def test_close_in_the_middle_is_fast_and_leaves_nothing(packed: Path, tmp_path: Path) -> None:
    before = {thread.ident for thread in threading.enumerate()}
    loader = load(packed, tmp_path)
    next(iter(loader))
    with within(2):
        loader.close()
    assert {thread.ident for thread in threading.enumerate()} <= before


def test_streaming_keeps_nothing_on_disk(packed: Path, tmp_path: Path) -> None:
    with load(
        packed, tmp_path, "cache.policy=stream", "loader.last_batch=partial", "prefetch.memory_cap=256KiB"
    ) as loader:
        ids_of(loader)
        once = loader.stats()["bytes_read"]["lake"]
        for _ in range(2):
            assert sorted(sum(ids_of(loader), [])) == list(range(NUM_IMAGES))
        # What is held from an epoch to the next, or came early, need not be read again; little fits under the cap.
        set_bytes = sum(path.stat().st_size for path in packed.glob("*.tar"))
        assert loader.stats()["bytes_read"]["lake"] - once >= 1.2 * set_bytes
        assert loader.stats()["bytes_written"]["node"] == 0
