"""Batches from images that were decoded before: by this job, by another, or not at all when there is no room."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from PIL import Image

from dalipipe.cache.config import CacheConfig, MemoryConfig, TiersConfig
from dalipipe.cache.decoded import DecodedSamples
from dalipipe.cache.inspect import stat
from dalipipe.errors import ConfigError
from dalipipe.graphs.augment import RandAugmentConfig
from dalipipe.graphs.config import GraphConfig
from dalipipe.graphs.limits import check_kept
from dalipipe.telemetry import Recorder
from tests.support.images import jpeg_bytes, textured_image
from tests.unit.graphs.steps import MemoryPrefetcher, open_memory, png_bytes

NUM, BATCH = 16, 8


def jpegs() -> list[bytes]:
    """JPEGs of all samplings of chroma, plain and progressive, turned ones among them."""
    found = []
    for i in range(NUM - 1):
        sink = io.BytesIO()
        picture = textured_image(i, height=150 + 13 * i, width=310 - 11 * i)
        orientation = Image.Exif()
        orientation[0x0112] = 1 + i % 8
        picture.save(sink, "JPEG", subsampling=i % 3, progressive=i % 2 == 1, exif=orientation)
        found.append(sink.getvalue())
    return [*found, png_bytes(99)]


def config(root: Path, decoded: int | float | str = "64MiB", *, keep: bool = True) -> CacheConfig:
    memory = MemoryConfig(dir=str(root / "memory"), decoded=decoded, keep=keep)
    return CacheConfig(dir=str(root / "node"), tiers=TiersConfig(memory=memory))


def run(
    images: list[bytes], graph: GraphConfig, num: int, settings: CacheConfig | None = None
) -> tuple[list[dict[str, torch.Tensor]], dict[str, float]]:
    """The first `num` batches and the counters."""
    recorder = Recorder()
    kept = None if settings is None else DecodedSamples(settings, "a" * 32, recorder=recorder)
    source = open_memory(MemoryPrefetcher(images, BATCH), graph=graph, recorder=recorder, kept=kept)
    try:
        return [next(source).tensors for _ in range(num)], dict(recorder.snapshot())
    finally:
        source.close()
        if kept is not None:
            kept.close()


def same(one: list[dict[str, torch.Tensor]], other: list[dict[str, torch.Tensor]]) -> bool:
    return all(
        torch.equal(a["id"], b["id"]) and torch.equal(a["image"], b["image"]) for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize(
    "graph",
    [
        GraphConfig(size=32, num_threads=2, dtype="uint8"),
        GraphConfig(size=32, num_threads=2, layout="NHWC", rand_augment=RandAugmentConfig(num_ops=2)),
        GraphConfig(name="image_eval", size=32, resize_shorter=40, num_threads=2, dtype="uint8"),
    ],
)
def test_pixels_are_the_same_bit_for_bit_in_every_epoch_and_in_a_second_job(tmp_path: Path, graph: GraphConfig) -> None:
    images, epochs = jpegs(), 3 * NUM // BATCH
    plain, counts = run(images, graph, epochs)
    assert "samples_hit.decoded" not in counts
    first, counts = run(images, graph, epochs, config(tmp_path))
    assert same(first, plain)
    assert counts["samples_kept.decoded"] == NUM
    assert counts["samples_hit.decoded"] > 0  # later epochs of the same job
    second, counts = run(images, graph, epochs, config(tmp_path))
    assert same(second, plain)
    assert "samples_kept.decoded" not in counts
    assert "stage_s.decode" not in counts  # DALI had nothing to do
    assert counts["samples_hit.decoded"] >= 3 * NUM
    assert counts["bytes_read.memory"] > 0


def test_the_budget_holds_and_pixels_do_not_tell_when_it_is_used_up(tmp_path: Path) -> None:
    images, graph = jpegs(), GraphConfig(size=32, num_threads=2, dtype="uint8")
    budget = 600_000
    found, counts = run(images, graph, 6, config(tmp_path, budget))
    assert same(found, run(images, graph, 6)[0])
    report = stat(config(tmp_path))
    assert 0 < report.blocks < NUM
    assert report.bytes <= budget
    assert counts["decoded_not_kept"] > 0


def test_bad_images_never_enter_and_are_replaced_as_without(tmp_path: Path) -> None:
    images, graph = jpegs(), GraphConfig(size=32, num_threads=2, dtype="uint8")
    images[3] = images[3][: len(images[3]) // 2]
    images[9] = png_bytes(9, damaged=True)
    plain, _ = run(images, graph, 6)
    for _ in range(2):
        assert same(run(images, graph, 6, config(tmp_path))[0], plain)
    kept = DecodedSamples(config(tmp_path), "a" * 32, recorder=Recorder())
    assert [i for i in range(NUM) if kept.find(i) is None] == [3, 9]
    kept.close()


@pytest.mark.parametrize("kernel", ["auto", "torch"])
@pytest.mark.parametrize("name", ["image_train", "image_eval"])
def test_a_wrong_size_in_the_index_costs_no_sample_in_any_epoch(tmp_path: Path, name: str, kernel: str) -> None:
    """Neither when it is decoded nor when it is found, by this job or by another one whose index was right."""
    images, keys = jpegs(), {"size": 32, "resize_shorter": 40, "num_threads": 2, "scale": (0.8, 1.0)}
    graph = GraphConfig(name=name, resize_kernel=kernel, **keys)
    run(images[:BATCH], graph, 1, config(tmp_path))
    kept = DecodedSamples(config(tmp_path), "a" * 32, recorder=Recorder())
    lying = MemoryPrefetcher(images, BATCH, false_sizes={3: (900, 1200), 9: (900, 1200)})
    source = open_memory(lying, graph=graph, kept=kept)
    batches = [next(source).tensors for _ in range(3 * NUM // BATCH)]
    source.close()
    kept.close()
    assert same(batches, run(images, graph, 3 * NUM // BATCH)[0])


def test_memory_is_free_again_when_the_last_job_ends_unless_it_is_to_be_kept(tmp_path: Path) -> None:
    graph = GraphConfig(size=32, num_threads=2)
    other = DecodedSamples(config(tmp_path, keep=False), "a" * 32, recorder=Recorder())
    run([jpeg_bytes(i) for i in range(NUM)], graph, 2, config(tmp_path, keep=False))
    assert stat(config(tmp_path)).blocks == NUM
    image = other.find(0)
    other.close()
    assert stat(config(tmp_path)).blocks == 0
    assert image is not None
    assert image.shape == (120, 160, 3)


@pytest.mark.parametrize(
    ("graph", "device", "words"),
    [
        (GraphConfig(), "cuda:0", "device=cpu, not cuda:0"),
        (GraphConfig(name="image_raw"), "cpu", "not image_raw"),
        (GraphConfig(jpeg_scale="auto"), "cpu", "jpeg_scale=off, not auto"),
    ],
)
def test_what_no_graph_would_take_is_refused(graph: GraphConfig, device: str, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"cache\.tiers\.memory\.decoded .*{words}"):
        check_kept(graph, device)
