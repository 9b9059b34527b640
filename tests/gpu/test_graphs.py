"""The mixed graphs on a card: the same samples, windows and errors as on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from dalipipe.graphs.augment import JitterConfig, RandAugmentConfig
from dalipipe.graphs.config import GraphConfig, QuarantineConfig
from dalipipe.graphs.source import open_source
from dalipipe.loader.ahead import BatchesAhead
from dalipipe.telemetry import Recorder
from tests.support.images import jpeg_bytes
from tests.unit.graphs.steps import MemoryPrefetcher, png_bytes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def _batches(
    images: list[bytes],
    graph: GraphConfig,
    device: str,
    num: int,
    *,
    fields: Sequence[str] = ("image", "label"),
    columns: dict[str, Sequence[bytes]] | None = None,
) -> list[dict[str, torch.Tensor]]:
    source = open_source(
        MemoryPrefetcher(images, 8, fields=columns),
        graph=graph,
        quarantine=QuarantineConfig(max_fraction=1),
        fields=fields,
        seed=3,
        device=device,
        queue_depth=2,
        num_samples=len(images),
        run_dir=None,
        recorder=Recorder(),
    )
    try:
        return [next(source).tensors for _ in range(num)]
    finally:
        source.close()


@pytest.mark.parametrize("name", ["image_train", "image_eval"])
def test_gpu_pixels_are_the_cpus_within_a_few_levels(name: str) -> None:
    """nvJPEG's IDCT and DALI's resize differ from the CPU's by little, windows and flips not at all."""
    images = [jpeg_bytes(i, height=300 + 5 * i, width=500 - 7 * i) for i in range(16)]
    graph = GraphConfig(name=name, num_threads=2)
    for one, other in zip(_batches(images, graph, "cuda:0", 4), _batches(images, graph, "cpu", 4), strict=True):
        assert one["image"].device.type == "cuda"
        assert torch.equal(one["id"].cpu(), other["id"])
        assert torch.equal(one["label"].cpu(), other["label"])
        assert (one["image"].cpu() - other["image"]).abs().mean() < 2 / 57


def test_a_bad_image_costs_no_good_one_on_a_gpu() -> None:
    """Error recovery of the executor holds in mixed mode."""
    images = [jpeg_bytes(i, height=300, width=400) for i in range(32)]
    clean = _batches(images, GraphConfig(num_threads=2), "cuda:0", 8)
    images[10] = png_bytes(1, damaged=True)
    images[31] = images[31][:-40]
    for one, reference in zip(_batches(images, GraphConfig(num_threads=2), "cuda:0", 8), clean, strict=True):
        for row, sample_id in enumerate(reference["id"].tolist()):
            if sample_id not in (10, 31):
                assert int(one["id"][row]) == sample_id
                assert torch.equal(one["image"][row], reference["image"][row])


@pytest.mark.parametrize(
    "graph",
    [
        GraphConfig(num_threads=2, jitter=JitterConfig(brightness=0.4, saturation=0.4, hue=0.1, grayscale=0.2)),
        GraphConfig(num_threads=2, rand_augment=RandAugmentConfig(num_ops=2, exclude=["solarize", "posterize"])),
        GraphConfig(name="multimodal", num_threads=2, layout="NHWC", dtype="float16"),
    ],
    ids=["jitter", "rand_augment", "multimodal"],
)
def test_augmentation_on_a_gpu_is_the_cpus(graph: GraphConfig) -> None:
    """The same draws, operators and order."""
    images = [jpeg_bytes(i, height=300 + 5 * i, width=500 - 7 * i) for i in range(16)]
    fields = ["image", "text"]
    texts = {"text": [b"caption %d" % i for i in range(16)]}
    for one, other in zip(
        _batches(images, graph, "cuda:0", 4, fields=fields, columns=texts),
        _batches(images, graph, "cpu", 4, fields=fields, columns=texts),
        strict=True,
    ):
        assert one["text"].device.type == "cpu"
        assert torch.equal(one["text"], other["text"])
        assert (one["image"].cpu().float() - other["image"].float()).abs().mean() < 3 / 57


def test_a_graph_of_ones_own_on_a_gpu() -> None:
    """Its decode and its operators are there; its draws are the CPU's."""
    images = [jpeg_bytes(i, height=300, width=400) for i in range(16)]
    graph = GraphConfig(name="tests.unit.graphs.user_graphs.zoomed", size=64, num_draws=4, num_threads=2)
    for one, other in zip(_batches(images, graph, "cuda:0", 2), _batches(images, graph, "cpu", 2), strict=True):
        assert one["image"].device.type == "cuda"
        assert torch.allclose(one["window"].cpu(), other["window"])
        assert (one["image"].cpu() - other["image"]).abs().mean() < 2 / 57


def test_batches_ahead_are_never_overwritten_while_the_device_is_slow() -> None:
    """The trainer queues work on each batch behind a long kernel and lets the batch go at once."""
    images = [jpeg_bytes(i, height=300, width=400) for i in range(32)]
    wanted = [
        float(batch["image"].double().sum()) for batch in _batches(images, GraphConfig(num_threads=4), "cuda:0", 24)
    ]
    recorder = Recorder()
    source = open_source(
        MemoryPrefetcher(images, 8),
        graph=GraphConfig(num_threads=4),
        quarantine=QuarantineConfig(),
        fields=["image", "label"],
        seed=3,
        device="cuda:0",
        queue_depth=2,
        num_samples=32,
        run_dir=None,
        recorder=recorder,
    )
    ahead = BatchesAhead(source, depth=3, device=torch.device("cuda", 0), timeout_s=60, recorder=recorder)
    ahead.start()
    sums = []
    for _ in range(24):
        batch, _ = ahead.next()
        torch.cuda._sleep(20_000_000)  # about 10 ms of a busy device before the batch is read
        sums.append(batch.tensors["image"].double().sum())
        del batch
    torch.cuda.synchronize()
    ahead.close()
    assert [float(one) for one in sums] == wanted


def test_held_batches_stay_as_they_were() -> None:
    """DLPack buffers on the device belong to the caller."""
    images = [jpeg_bytes(i, height=300, width=400) for i in range(16)]
    held = [(batch["image"], batch["image"].clone()) for batch in _batches(images, GraphConfig(), "cuda:0", 20)]
    torch.cuda.synchronize()
    assert all(torch.equal(image, copy) for image, copy in held)
