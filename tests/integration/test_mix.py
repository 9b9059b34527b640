"""Several data sets in one loader, hot samples, epochs of a chosen length: through `dalipipe.load`."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dalipipe as dp
from dalipipe.errors import ConfigError
from dalipipe.order.mix import mix_counts
from dalipipe.packing.config import PackConfig
from dalipipe.packing.run import pack
from dalipipe.storage.store import StorageConfig
from tests.conftest import NUM_IMAGES
from tests.support.images import write_image_tree

NUM_SMALL = 40
TOTAL = NUM_IMAGES + NUM_SMALL


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A second data set: 40 images in 2 classes, with blocks of another size."""
    root = tmp_path_factory.mktemp("small")
    write_image_tree(root / "lake", num_images=NUM_SMALL, num_classes=2)
    config = PackConfig(shard_bytes="1MiB", block_bytes="16KiB", workers=1)
    pack(str(root / "lake"), str(root / "set"), config, StorageConfig())
    return root / "set"


def load(cache: Path, *overrides: str, graph: str = "image_raw", world: dp.World | None = None) -> dp.Loader:
    options = [f"cache.dir={cache}", f"graph={graph}", "prefetch.threads=2", "loader.global_batch_size=10"]
    return dp.load("train", [*options, *overrides], world=world)


def mixed(packed: Path, small: Path, cache: Path, *overrides: str, **arguments: Any) -> dp.Loader:
    sources = f"data.sources={{big:{packed},small:{small}}}"
    return load(cache, sources, "data.mix={big:0.7,small:0.3}", "shuffle.lanes=1", *overrides, **arguments)


def alone(url: Path, cache: Path, *overrides: str) -> dp.Loader:
    return load(cache, f"data.url={url}", *overrides)


def ids_of(batches: Any) -> list[list[int]]:
    return [batch["id"].tolist() for batch in batches]


def labels_by_key(url: Path, cache: Path) -> dict[str, int]:
    found = {}
    with alone(url, cache, "loader.last_batch=partial") as loader:
        for batch in loader:
            found |= dict(zip(loader.manifest.keys(batch["id"].numpy()), batch["label"].tolist(), strict=True))
    return found


def test_a_mix_has_its_shares_and_each_sample_its_own_bytes(packed: Path, small: Path, tmp_path: Path) -> None:
    labels = [labels_by_key(url, tmp_path) for url in (packed, small)]
    # A lane window of 1,000 positions is the promise: ten epochs of ten steps of ten.
    with mixed(packed, small, tmp_path, "loader.epoch_samples=100") as loader:
        assert loader.manifest.num_samples == TOTAL
        assert len(loader) == 10
        seen: list[int] = []
        for _ in range(10):
            for batch in loader:
                ids = batch["id"].numpy()
                seen += ids.tolist()
                for sample, key, label in zip(ids, loader.manifest.keys(ids), batch["label"].tolist(), strict=True):
                    assert labels[int(sample >= NUM_IMAGES)][key] == label
    counts = Counter(seen)
    expected = mix_counts({"big": 0.7, "small": 0.3})
    big = [counts[i] for i in range(NUM_IMAGES)]
    tiny = [counts[i] for i in range(NUM_IMAGES, TOTAL)]
    assert (sum(big), sum(tiny)) == (expected["big"], expected["small"])
    # 700 of 150 and 300 of 40: each sample once before any comes again.
    assert set(big) == {4, 5}
    assert set(tiny) == {7, 8}


def test_a_mix_resumes_at_another_world_size_and_refuses_other_weights(
    packed: Path, small: Path, tmp_path: Path
) -> None:
    with mixed(packed, small, tmp_path, "loader.epoch_samples=80") as loader:
        plan = ids_of(loader) + ids_of(loader)
    with mixed(packed, small, tmp_path, "loader.epoch_samples=80") as loader:
        seen = ids_of(islice(loader, 3))
        state = json.loads(json.dumps(loader.state_dict()))
    assert len(json.dumps(state)) < 1024
    rest: list[list[int]] = [[] for _ in range(13)]
    for rank in range(2):
        world = dp.World(rank=rank, world_size=2, local_rank=rank, local_world_size=2)
        with mixed(packed, small, tmp_path, "loader.epoch_samples=80", world=world) as loader:
            loader.load_state_dict(state)
            for step, ids in enumerate(ids_of(loader) + ids_of(loader)):
                rest[step] += ids
    assert seen + rest == plan
    with mixed(packed, small, tmp_path, "loader.epoch_samples=80", "data.mix={big:0.6,small:0.4}") as other:
        with pytest.raises(dp.errors.StateError, match=r"recipe: state 'mix big=700.*this loader 'mix big=600"):
            other.load_state_dict(state)
    with alone(packed, tmp_path, "loader.epoch_samples=80") as other:
        with pytest.raises(dp.errors.StateError, match="identity"):
            other.load_state_dict(state)


def test_names_may_be_folders_or_urls(packed: Path, small: Path, tmp_path: Path) -> None:
    (tmp_path / "sets").mkdir()
    (tmp_path / "sets" / "big").symlink_to(packed)
    (tmp_path / "sets" / "small").symlink_to(small)
    by_folder = load(tmp_path / "cache", f"data.url={tmp_path / 'sets'}", "data.mix={big:0.7,small:0.3}")
    by_url = load(tmp_path / "cache", f"data.mix={{{packed}:0.7,{small}:0.3}}")
    for loader in (by_folder, by_url):
        with loader:
            assert loader.manifest.num_samples == TOTAL
            assert len(next(iter(loader))["id"]) == 10


def test_epoch_samples_cuts_an_endless_stream(packed: Path, tmp_path: Path) -> None:
    with alone(packed, tmp_path, "loader.epoch_samples=64") as loader:
        assert len(loader) == 6
        ids = [sample for _ in range(5) for batch in ids_of(loader) for sample in batch]
    assert len(ids) == 300
    assert sorted(ids[:NUM_IMAGES]) == sorted(ids[NUM_IMAGES:]) == list(range(NUM_IMAGES))


def test_hot_shards_and_classes(packed: Path, tmp_path: Path) -> None:
    with alone(packed, tmp_path, "data.repeat={*:2}", "loader.last_batch=partial") as loader:
        assert Counter(sum(ids_of(loader), [])) == dict.fromkeys(range(NUM_IMAGES), 2)
        name = loader.manifest.classes[1]
    hot = ("loader.last_batch=partial", f"data.repeat={{{name}:2.5}}")
    with alone(packed, tmp_path, *hot) as loader:
        counts = Counter(sum(ids_of(loader), []))
        keys = loader.manifest.keys(np.arange(NUM_IMAGES))
        again = Counter(sum(ids_of(loader), []))
    assert counts == again, "the share of a fraction is the same in every epoch"
    of_class = [counts[i] for i, key in enumerate(keys) if key.startswith(f"{name}/")]
    assert set(of_class) == {2, 3}
    assert sum(of_class) == round(2.5 * len(of_class))
    assert {counts[i] for i, key in enumerate(keys) if not key.startswith(f"{name}/")} == {1}


def test_replicas_see_the_same_batches(packed: Path, tmp_path: Path) -> None:
    seen = []
    for rank in range(4):
        world = dp.World(rank=rank, world_size=4, local_rank=rank, local_world_size=4)
        options = (f"data.url={packed}", "loader.replicas=2", "graph.size=16")
        with load(tmp_path, *options, graph="image_train", world=world) as loader:
            assert loader.batch_size == 5
            seen.append([(batch["id"], batch["image"]) for batch in islice(loader, 2)])
    for one, other in ((0, 1), (2, 3)):
        for (ids, images), (same_ids, same_images) in zip(seen[one], seen[other], strict=True):
            assert torch.equal(ids, same_ids)
            assert torch.equal(images, same_images)
    assert not set(seen[0][0][0].tolist()) & set(seen[2][0][0].tolist())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("data.mix={big:1}",), "data.sources.big=URL"),
        (("data.sources={big:/nowhere}",), "data.mix is empty"),
        (("data.mix={a:1}", "data.sources={a:PACKED,b:PACKED}"), "data.sources names b, which data.mix does not weigh"),
        (("data.mix={PACKED:-1}",), "data.mix"),
        (("data.mix={PACKED:1}", "loader.last_batch=pad"), "set loader.last_batch=drop"),
        (("data.mix={PACKED:1}", "shuffle.mode=none"), "use block or full"),
        (("data.mix={PACKED:1}", "data.repeat={PACKED:2}"), "is its weight"),
        (("data.mix={PACKED:1}", "data.repeat={dog:2}"), "begins with that of the set"),
        (("data.url=PACKED", "data.repeat={clas_1:2}"), "nearest: class_1"),
        (("data.url=PACKED", "data.repeat={class_1:0.5}"), "more often, not less"),
        (("data.url=PACKED", "data.repeat={*:-1}"), "at least 0"),
        (("data.url=PACKED", "data.repeat={*:0}"), "leaves no sample"),
        (("data.url=PACKED", "loader.epoch_samples=5"), "holds no step"),
        (("data.url=PACKED", "loader.replicas=2"), "replicas=2 must divide the world of 1 ranks"),
        (("data.mix={PACKED:1}", "data.fields=[image,label,caption]"), "caption not in the data set"),
    ],
)
def test_what_cannot_work_is_refused_at_start(
    packed: Path, tmp_path: Path, overrides: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, *(word.replace("PACKED", str(packed)) for word in overrides))
    assert message in str(caught.value)
