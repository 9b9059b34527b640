"""The device tier on a card: the kernel against its twin over host memory, one pool of memory, giving way."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dalipipe.graphs.config import GraphConfig, QuarantineConfig
from dalipipe.graphs.crop import NUM_UNIFORMS, plan_windows
from dalipipe.graphs.device.kernel import finish_on_host, make_table
from dalipipe.graphs.device.memory import CudaDevice
from dalipipe.graphs.device.tier import DeviceTier, open_device_tier
from dalipipe.graphs.source import open_source
from dalipipe.telemetry import Recorder
from tests.support.images import jpeg_bytes
from tests.unit.graphs.steps import MemoryPrefetcher

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NUM, BATCH = 32, 8


def _batches(graph: GraphConfig, num: int, tier: DeviceTier | None, device: str = "cuda:0") -> list[dict[str, Any]]:
    images = [jpeg_bytes(i, height=300 + 5 * i, width=500 - 7 * i) for i in range(NUM)]
    source = open_source(
        MemoryPrefetcher(images, BATCH),
        graph=graph,
        quarantine=QuarantineConfig(max_fraction=1),
        fields=["image", "label"],
        seed=3,
        device=device,
        queue_depth=2,
        num_samples=NUM,
        run_dir=None,
        recorder=Recorder(),
        tier=tier,
    )
    try:
        return [next(source).tensors for _ in range(num)]
    finally:
        source.close()


@pytest.mark.parametrize("name", ["image_train", "image_eval"])
@pytest.mark.parametrize(("dtype", "layout"), [("float32", "NCHW"), ("float16", "NHWC"), ("uint8", "NHWC")])
def test_the_kernel_is_its_twin_within_a_level(name: str, dtype: str, layout: str) -> None:
    graph = GraphConfig(name=name, size=67, resize_shorter=80, dtype=dtype, layout=layout)
    random = np.random.default_rng(1)
    sizes = random.integers(60, 500, (16, 2)).astype(np.int32)
    images = [torch.from_numpy(random.integers(0, 256, 3 * h * w, np.uint8)) for h, w in sizes.tolist()]
    windows = plan_windows(graph, sizes, random.random((16, NUM_UNIFORMS), np.float32))
    table = make_table(windows, sizes[:, 1].tolist())
    wanted = finish_on_host(images, table, graph)
    on_card = [image.cuda() for image in images]
    found = CudaDevice(graph, 0).finish(on_card, table)
    torch.cuda.synchronize()
    assert found.stride() == wanted.stride()
    level = 1.0 if dtype == "uint8" else 1 / min(graph.std)
    assert (found.cpu().float() - wanted.float()).abs().max() <= 1.01 * level + 2e-3


def test_batches_are_those_of_the_cpu_path_kept_or_not() -> None:
    graph = GraphConfig(dtype="uint8", num_threads=2)
    tier = open_device_tier(graph, "cuda:0", "1G", Recorder())
    assert tier is not None
    found, plain = _batches(graph, 12, tier), _batches(graph, 12, None, "cpu")
    assert tier.usage.num_samples == NUM
    for one, other in zip(found, plain, strict=True):
        assert one["image"].device.type == "cuda"
        assert torch.equal(one["id"].cpu(), other["id"])
        assert (one["image"].cpu().float() - other["image"].float()).abs().mean() < 2
    tier.close()


def test_the_pieces_are_in_torchs_pool_and_go_back_to_it() -> None:
    graph = GraphConfig(dtype="uint8", num_threads=2)
    tier = open_device_tier(graph, "cuda:0", "1G", Recorder())
    assert tier is not None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(0)
    _batches(graph, 4, tier)
    torch.cuda.synchronize()
    taken = torch.cuda.memory_allocated(0) - before
    assert taken >= tier.usage.pieces_bytes > 0
    assert tier.release() > 0
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated(0) - before < taken
    tier.close()
