"""Colour and random operators: what they do to pixels, and that they follow the sample and nothing else."""

from __future__ import annotations

import colorsys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from dalipipe.errors import ConfigError
from dalipipe.graphs.augment import (
    NUM_DRAWS,
    OPERATORS,
    JitterConfig,
    RandAugmentConfig,
    plan_strengths,
    strength_inputs,
)
from dalipipe.graphs.config import GraphConfig
from dalipipe.graphs.contract import Batch
from dalipipe.graphs.image import build_normalize, operators
from tests.support.images import textured_image
from tests.unit.graphs.steps import MemoryPrefetcher, open_memory, sized_jpegs

ALL_JITTER = JitterConfig(brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1, probability=0.8, grayscale=0.2)
NOTHING: dict[str, Any] = {
    "matrix": np.array([[1, 0, 0], [0, 1, 0]], np.float32),
    "brightness": np.float32(1),
    "contrast": np.float32(1),
    "saturation": np.float32(1),
    "hue": np.float32(0),
    "solarize": np.int32(256),
    "posterize": np.int32(255),
}


def _draws(num: int, seed: int = 0) -> np.ndarray:
    return np.random.Generator(np.random.Philox(seed)).random((num, NUM_DRAWS), dtype=np.float32)


def _apply(image: np.ndarray, **strengths: Any) -> np.ndarray:
    """The operators on one image, through the pipeline that ends every batch."""
    graph = GraphConfig(dtype="uint8", layout="NHWC", rand_augment=RandAugmentConfig(num_ops=1))
    values = {name: np.asarray(strengths.get(name, NOTHING[name]))[None] for name in strength_inputs(graph)}
    feed = (image[None], np.zeros(1, np.int32), *values.values())
    pipeline = build_normalize(lambda: feed, graph, num_threads=1)
    pipeline.build()
    return np.array(pipeline.run()[0].as_tensor())[0]


@pytest.fixture(scope="module")
def image() -> np.ndarray:
    return np.array(textured_image(4, height=64, width=64))


def test_what_is_not_chosen_changes_nothing(image: np.ndarray) -> None:
    assert np.array_equal(_apply(image), image)


def test_solarize_and_posterize_are_exact(image: np.ndarray) -> None:
    assert np.array_equal(_apply(image, solarize=np.int32(100)), np.where(image >= 100, 255 - image, image))
    assert np.array_equal(_apply(image, posterize=np.int32(0xF0)), image & 0xF0)


def test_brightness_scales_and_gray_has_no_colour(image: np.ndarray) -> None:
    wanted = np.clip(image.astype(np.float32) * 1.3, 0, 255)
    assert np.abs(_apply(image, brightness=np.float32(1.3)) - wanted).max() <= 1
    gray = _apply(image, saturation=np.float32(0)).astype(int)
    # DALI turns colours through a YIQ matrix of three digits: the channels agree within two levels.
    assert (gray.max(axis=2) - gray.min(axis=2)).max() <= 2
    luma = image @ np.array([0.299, 0.587, 0.114])
    assert np.abs(gray.mean(axis=2) - luma).max() <= 2


def test_hue_turns_the_colour_circle() -> None:
    """In degrees: a third of the circle turns red towards green."""
    red = np.full((8, 8, 3), (200, 60, 60), np.uint8)
    turned = _apply(red, hue=np.float32(120))[0, 0] / 255
    hue, _, _ = colorsys.rgb_to_hsv(*turned)
    assert abs(hue - 1 / 3) < 0.08


def test_geometry_moves_about_the_centre(image: np.ndarray) -> None:
    """The matrices of plan_strengths, against PIL's affine transform with the same matrix."""
    graph = GraphConfig(size=64, rand_augment=RandAugmentConfig(num_ops=len(OPERATORS), magnitude=10))
    for matrix in plan_strengths(graph, _draws(3))["matrix"]:
        centre = matrix[:, :2] @ [32, 32] + matrix[:, 2] - [32, 32]
        assert np.abs(centre).max() <= 10 / 30 * 150 / 331 * 64 + 1e-3  # only the translation moves it
        got = _apply(image, matrix=matrix).astype(int)
        picture = Image.fromarray(image).transform(
            (64, 64), Image.Transform.AFFINE, matrix.ravel().tolist(), Image.Resampling.BILINEAR, fillcolor=(128,) * 3
        )
        inside = np.asarray(
            Image.new("L", (64, 64), 255).transform((64, 64), Image.Transform.AFFINE, matrix.ravel().tolist())
        )
        both = np.abs(got - np.asarray(picture, int)).max(axis=2)[inside > 0]
        assert np.quantile(both, 0.9) <= 2  # the rim is interpolated with the fill


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**32), num_ops=st.integers(0, len(OPERATORS)), magnitude=st.floats(0, 30))
def test_strengths_stay_in_their_ranges(seed: int, num_ops: int, magnitude: float) -> None:
    graph = GraphConfig(jitter=ALL_JITTER, rand_augment=RandAugmentConfig(num_ops=num_ops, magnitude=magnitude))
    planned = plan_strengths(graph, _draws(50, seed))
    assert planned.keys() == strength_inputs(graph).keys()
    for name in ("brightness", "contrast", "saturation"):
        assert planned[name].min() >= 0
        assert planned[name].max() <= 1.4 * 1.9 + 1e-5
    assert np.abs(planned["hue"]).max() <= 36
    if num_ops:
        assert (planned["solarize"] >= 0).all()
        assert set(planned["posterize"].tolist()) <= {0xFF, 0xFE, 0xFC, 0xF8, 0xF0}


def test_as_many_operators_as_asked_all_equally_often() -> None:
    """By the inputs that differ from doing nothing; each operator alone, the others excluded."""
    only = [name for name in OPERATORS if name not in ("solarize", "posterize")]
    graph = GraphConfig(rand_augment=RandAugmentConfig(num_ops=1, magnitude=30, exclude=only))
    planned = plan_strengths(graph, _draws(4000))
    solarized, posterized = planned["solarize"] < 256, planned["posterize"] < 255
    assert (solarized ^ posterized).all()
    assert abs(solarized.mean() - 0.5) < 0.03


def test_jitter_is_spread_as_asked() -> None:
    graph = GraphConfig(jitter=ALL_JITTER)
    planned = plan_strengths(graph, _draws(20_000))
    untouched = planned["brightness"] == 1
    assert abs(untouched.mean() - 0.2) < 0.01
    assert abs(planned["brightness"][~untouched].std() - 0.8 / np.sqrt(12)) < 0.01
    assert abs((planned["saturation"] == 0).mean() - 0.2) < 0.01
    assert np.abs(planned["hue"]).max() == pytest.approx(36, rel=1e-2)


def _by_id(graph: GraphConfig, batch_size: int, depth: int) -> dict[tuple[int, int], torch.Tensor]:
    images, found = sized_jpegs(12), {}
    source = open_memory(MemoryPrefetcher(images, batch_size, tail="partial"), graph=graph, queue_depth=depth)
    try:
        for _ in range(2 * -(-12 // batch_size)):
            batch: Batch = next(source)
            for sample, image in zip(batch.tensors["id"].tolist(), batch.tensors["image"], strict=True):
                found[batch.epoch, sample] = image
    finally:
        source.close()
    return found


@pytest.mark.parametrize(
    "graph",
    [
        GraphConfig(size=32, num_threads=2, jitter=ALL_JITTER),
        GraphConfig(size=32, num_threads=1, rand_augment=RandAugmentConfig(num_ops=2)),
    ],
    ids=["jitter", "rand_augment"],
)
def test_augmentation_follows_the_sample_bit_for_bit(graph: GraphConfig) -> None:
    """At any batch size, place and depth; differently in each epoch."""
    reference, other = _by_id(graph, 12, 1), _by_id(graph, 5, 3)
    assert reference.keys() == other.keys()
    assert all(torch.equal(image, other[key]) for key, image in reference.items())
    assert not any(torch.equal(reference[0, i], reference[1, i]) for i in range(12))
    plain = _by_id(GraphConfig(size=32, num_threads=2), 12, 1)
    changed = [not torch.equal(image, plain[key]) for key, image in reference.items()]
    assert sum(changed) >= 12


def test_the_gpu_graph_has_the_same_operators_on_the_gpu() -> None:
    """Serialised without a card: arguments and placement."""
    graph = GraphConfig(jitter=ALL_JITTER, rand_augment=RandAugmentConfig(num_ops=2))
    on_gpu = [kind for kind, device in operators(graph, "mixed") if device == "gpu"]
    assert [kind for kind in on_gpu if not kind.startswith(("_Arithmetic", "Cast"))] == [
        "Resize",
        "WarpAffine",
        "ColorTwist",
        "CropMirrorNormalize",
    ]
    jitter = [kind for kind, device in operators(GraphConfig(jitter=ALL_JITTER), "mixed") if device == "gpu"]
    assert jitter == ["Resize", "ColorTwist", "CropMirrorNormalize"]


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        (GraphConfig(jitter=JitterConfig(hue=0.7)), r"graph.jitter.hue=0.7 must be in \[0, 0.5\]"),
        (GraphConfig(jitter=JitterConfig(brightness=-1)), "graph.jitter.brightness"),
        (GraphConfig(jitter=JitterConfig(grayscale=2)), "graph.jitter.grayscale"),
        (GraphConfig(rand_augment=RandAugmentConfig(num_ops=12)), r"num_ops=12 must be in \[0, 11\]"),
        (GraphConfig(rand_augment=RandAugmentConfig(num_ops=1, magnitude=31)), "magnitude"),
        (GraphConfig(rand_augment=RandAugmentConfig(exclude=["blur"])), r"exclude=\['blur'\] must be of identity"),
        (GraphConfig(name="image_eval", jitter=ALL_JITTER), "must be off for image_eval"),
    ],
)
def test_augmentation_that_cannot_be_is_refused(graph: GraphConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_memory(MemoryPrefetcher(sized_jpegs(2), 2), graph=graph)
