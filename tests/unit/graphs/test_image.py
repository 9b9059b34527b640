"""The graphs: operators and placement without a GPU, figures through the CPU twin of the GPU graph."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dalipipe.graphs.augment import JitterConfig, RandAugmentConfig
from dalipipe.graphs.config import GraphConfig, QuarantineConfig
from dalipipe.graphs.image import Backend, build_pipeline, operators
from dalipipe.graphs.intake import IntakeDesk
from dalipipe.graphs.lane import Lane
from dalipipe.graphs.quarantine import Quarantine
from dalipipe.telemetry import Recorder
from tests.support.images import jpeg_bytes
from tests.unit.graphs.steps import MemoryPrefetcher, open_memory

FEED = ("ExternalSource", "cpu")
FUSED_TAIL = [FEED, FEED, ("Resize", "gpu"), FEED, ("CropMirrorNormalize", "gpu")]
GOLDEN: dict[tuple[str, Backend], list[tuple[str, str]]] = {
    ("image_train", "cpu"): [FEED, FEED, FEED, ("decoders__ImageSlice", "cpu")],
    ("image_eval", "cpu"): [FEED, FEED, FEED, ("decoders__ImageSlice", "cpu")],
    ("image_raw", "cpu"): [FEED, ("decoders__Image", "cpu")],
    ("image_train", "mixed"): [FEED, ("decoders__Image", "mixed"), *FUSED_TAIL],
    ("image_eval", "mixed"): [FEED, ("decoders__Image", "mixed"), *FUSED_TAIL],
    ("multimodal", "cpu"): [FEED, FEED, FEED, ("decoders__ImageSlice", "cpu")],
    ("multimodal", "mixed"): [FEED, ("decoders__Image", "mixed"), *FUSED_TAIL],
    ("image_raw", "mixed"): [FEED, ("decoders__Image", "mixed")],
    ("image_train", "host"): [FEED, ("decoders__Image", "cpu"), *FUSED_TAIL],
    ("image_eval", "host"): [FEED, ("decoders__Image", "cpu"), *FUSED_TAIL],
}


@pytest.mark.parametrize(("name", "backend"), GOLDEN)
def test_graphs_have_their_operators_where_they_belong(name: str, backend: Backend) -> None:
    """Serialising checks argument names and placement, also of GPU operators on a host without one."""
    assert operators(GraphConfig(name=name), backend) == GOLDEN[name, backend]


def test_the_gpu_decoder_is_told_what_to_set_aside() -> None:
    """The size of the largest images and the share of the hardware decoder, in the serialised graph."""
    graph = GraphConfig(hw_decoder_load=0.375)
    pipeline, _ = build_pipeline(
        lambda: (), graph, "mixed", num_threads=1, queue_depth=2, device_id=None, hint=(1201, 1607)
    )
    pipeline._build_graph()
    serialized = pipeline.serialize()
    # Numbers are varints of the protocol buffer that DALI serialises to.
    assert b"preallocate_width_hint\x12\x05int64 \xc7\x0c" in serialized
    assert b"preallocate_height_hint\x12\x05int64 \xb1\x09" in serialized


@pytest.mark.parametrize(
    ("name", "dtype", "augment"),
    [
        ("image_train", "float32", False),
        ("image_train", "uint8", False),
        ("image_eval", "float32", False),
        ("image_eval", "uint8", False),
        ("image_train", "uint8", True),
        ("multimodal", "float32", True),
    ],
)
def test_the_gpu_graph_shows_the_same_pixels_as_the_cpu_path(name: str, dtype: str, augment: bool) -> None:
    """Run on the CPU: same windows, flips and colours; DALI's resize is within a few levels of PIL's."""
    jitter = JitterConfig(brightness=0.2, saturation=0.3, hue=0.1, grayscale=0.3) if augment else JitterConfig()
    rand = RandAugmentConfig(num_ops=2 if augment else 0, exclude=["solarize", "posterize", "contrast"])
    graph = GraphConfig(
        name=name, size=64, resize_shorter=72, dtype=dtype, num_threads=1, jitter=jitter, rand_augment=rand
    )
    images = [jpeg_bytes(i, height=150 + 10 * i, width=240 - 15 * i) for i in range(6)]
    fields = ["image", "label", "text"]
    source = open_memory(MemoryPrefetcher(images, 6, fields={"text": [b"x"] * 6}), graph=graph, fields=fields)
    try:
        wanted = next(source).tensors["image"].float()
    finally:
        source.close()
    recorder = Recorder()
    guard = Quarantine(QuarantineConfig(), num_samples=6, run_dir=None, recorder=recorder)
    desk = IntakeDesk(
        graph, fields=["image"], seed=3, max_pixels=2**28, quarantine=guard, num_threads=1, recorder=recorder
    )
    lane = Lane(graph, "twin", num_threads=1, queue_depth=1, device_id=None)
    intake = desk.accept(MemoryPrefetcher(images, 6).next())
    lane.push(intake.graph_inputs(graph.size, range(6)))
    got = torch.from_numpy(np.array(lane.run()["image"].as_tensor())).float()
    lane.close()
    level = 1.0 if dtype == "uint8" else 1 / 57.0
    assert got.shape == wanted.shape
    assert (got - wanted).abs().mean() < 1.0 * level
    assert (got - wanted).abs().max() < (40 if augment else 20) * level
