"""A graph of the user's own: stateless, salvaged and refused like the shipped ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dalipipe.errors import ConfigError
from dalipipe.graphs.config import GraphConfig
from dalipipe.graphs.contract import Batch
from dalipipe.graphs.image import operators
from dalipipe.order.hashing import uniforms
from dalipipe.telemetry import Recorder
from tests.support.images import jpeg_bytes
from tests.unit.graphs.steps import MemoryPrefetcher, open_memory, png_bytes, sized_jpegs

HERE = "tests.unit.graphs.user_graphs"
ZOOMED = GraphConfig(name=f"{HERE}.zoomed", size=32, num_threads=2, num_draws=4, args={"sigma": 0.5})


def _run(graph: GraphConfig, images: list[bytes], batch_size: int, num: int, depth: int = 2) -> list[Batch]:
    source = open_memory(MemoryPrefetcher(images, batch_size), graph=graph, queue_depth=depth)
    try:
        return [next(source) for _ in range(num)]
    finally:
        source.close()


def test_the_worked_example_runs_and_follows_the_sample() -> None:
    """Its outputs by name beside id and label; bit for bit the same at another batch size and depth."""
    images = sized_jpegs(12)
    [whole] = _run(ZOOMED, images, 12, 1)
    assert whole.tensors.keys() == {"image", "window", "id", "label"}
    assert whole.tensors["image"].shape == (12, 3, 32, 32)
    assert whole.tensors["image"].dtype == torch.float32
    draws = uniforms(3, 0, np.arange(12), 4)
    window = whole.tensors["window"].numpy()
    sides = np.minimum(*np.array([(90 + 7 * (i % 5), 110 + 9 * (i % 4)) for i in range(12)]).T)
    assert np.allclose(window[:, 2] - window[:, 0], sides * (0.5 + 0.5 * draws[:, 0]), rtol=1e-5)
    for batch in _run(ZOOMED, images, 4, 3, depth=3):
        for row, sample in enumerate(batch.tensors["id"].tolist()):
            assert torch.equal(batch.tensors["image"][row], whole.tensors["image"][sample])


def test_args_reach_the_graph() -> None:
    images = sized_jpegs(4)
    [sharp] = _run(ZOOMED, images, 4, 1)
    [soft] = _run(GraphConfig(name=ZOOMED.name, size=32, num_draws=4, args={"sigma": 4.0}), images, 4, 1)
    assert soft.tensors["image"].diff(dim=3).abs().mean() < sharp.tensors["image"].diff(dim=3).abs().mean() / 2


def test_samples_of_different_shapes_come_as_a_list() -> None:
    [batch] = _run(GraphConfig(name=f"{HERE}.ragged"), sized_jpegs(5), 5, 1)
    shapes = [tuple(image.shape) for image in batch.tensors["image"]]
    assert shapes == [(90 + 7 * (i % 5), 110 + 9 * (i % 4), 3) for i in range(5)]


def test_bad_samples_cost_no_good_one_in_a_users_graph() -> None:
    images = sized_jpegs(8)
    [clean] = _run(ZOOMED, images, 8, 1)
    images[5] = png_bytes(1, damaged=True)
    [batch] = _run(ZOOMED, images, 8, 1)
    assert batch.tensors["id"].tolist() == [0, 1, 2, 3, 4, 6, 6, 7]
    kept = [0, 1, 2, 3, 4, 6, 7]
    assert torch.equal(batch.tensors["image"][kept], clean.tensors["image"][kept])


def test_a_sample_that_only_this_graph_refuses_is_quarantined() -> None:
    images = [jpeg_bytes(i, height=80, width=160 if i != 2 else 90) for i in range(8)]
    recorder = Recorder()
    source = open_memory(
        MemoryPrefetcher(images, 8), graph=GraphConfig(name=f"{HERE}.fussy", num_threads=2), recorder=recorder
    )
    batch = next(source)
    source.close()
    assert batch.tensors["id"].tolist() == [0, 1, 3, 3, 4, 5, 6, 7]
    assert batch.tensors["image"].shape == (8, 50, 100, 3)
    assert recorder.snapshot()["quarantined.refused"] == 1


def test_a_users_graph_is_checked_for_a_gpu_without_one() -> None:
    assert ("decoders__Image", "mixed") in operators(ZOOMED, "mixed")
    assert ("GaussianBlur", "gpu") in operators(ZOOMED, "mixed")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere.at.all", "No module named 'nowhere'.*PYTHONPATH"),
        (f"{HERE}.missing", "has no 'missing'"),
        (f"{HERE}.NOT_A_FUNCTION", "is a int, not a function"),
        (f"{HERE}.rolls_dice", "RandomResizedCrop, which draws its own random numbers.*compute it from `draws`"),
        (f"{HERE}.fails", "failed while it was built.*syze"),
        (f"{HERE}.no_image", r"returned \['picture'\]; `image` must be among them"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_memory(MemoryPrefetcher(sized_jpegs(2), 2), graph=GraphConfig(name=name))
