"""JPEGs decoded at a scale: the same windows, pixels that differ by no more than filters do."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from dalipipe.errors import ConfigError
from dalipipe.graphs.config import GraphConfig, QuarantineConfig
from dalipipe.graphs.contract import Batch
from dalipipe.graphs.crop import NUM_UNIFORMS, plan_windows
from dalipipe.graphs.scaled import decode_scaled
from dalipipe.telemetry import Recorder
from tests.support.images import jpeg_bytes, textured_image
from tests.unit.graphs.steps import MemoryPrefetcher, open_memory, sized_jpegs


def _large(num: int = 8, orientation: int = 1) -> list[bytes]:
    return [
        jpeg_bytes(i, height=403 + 8 * i, width=517 - 6 * i, orientation=1 + (i * orientation) % 8) for i in range(num)
    ]


def _batch(images: list[bytes], graph: GraphConfig, recorder: Recorder | None = None) -> Batch:
    guard = QuarantineConfig(max_fraction=1)
    source = open_memory(MemoryPrefetcher(images, len(images)), graph=graph, quarantine=guard, recorder=recorder)
    try:
        return next(source)
    finally:
        source.close()


def _decibels(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(10 * torch.log10(255**2 / (one.float() - other.float()).square().mean()))


@pytest.mark.parametrize("name", ["image_train", "image_eval"])
@pytest.mark.parametrize("orientation", [1, 3])
def test_pixels_are_close_to_those_of_the_full_decode(name: str, orientation: int) -> None:
    """All EXIF orientations; and in their place: moved by one pixel of the output they are much farther apart."""
    images = _large(8, orientation)
    exact = GraphConfig(name=name, size=32, resize_shorter=40, dtype="uint8", num_threads=2, scale=[0.5, 1.0])
    scaled = GraphConfig(
        name=name, size=32, resize_shorter=40, dtype="uint8", num_threads=2, scale=[0.5, 1.0], jpeg_scale="auto"
    )
    one, other = _batch(images, exact).tensors, _batch(images, scaled).tensors
    assert torch.equal(one["id"], other["id"])
    assert not torch.equal(one["image"], other["image"])
    close = _decibels(one["image"], other["image"])
    # Train windows move by up to seven of 400 pixels; evaluation shows exactly the same.
    assert close > (38 if name == "image_eval" else 28)
    if name == "image_eval":
        assert max(_decibels(one["image"], other["image"].roll(1, dim)) for dim in (2, 3)) < close - 10


def test_only_where_twice_the_pixels_are_left() -> None:
    """The largest factor of 8, 4, 2; windows move to whole pixels of the smaller picture and stay inside."""
    sizes = np.array([[200, 300], [449, 500], [896, 896], [1792, 4000], [4000, 4000], [30_000, 30_000]], np.int32)
    graph = GraphConfig(scale=[1.0, 1.0], ratio=[0.9, 1.1], jpeg_scale="auto")
    uniforms = np.full((6, NUM_UNIFORMS), 0.5, np.float32)
    windows = plan_windows(graph, sizes, uniforms)
    assert windows.reduce.tolist() == [1, 1, 2, 4, 8, 1]
    factor = windows.reduce[:, None]
    assert (windows.start % factor == 0).all()
    assert (windows.shape % factor == 0).all()
    assert (windows.shape // factor >= 448).all(where=factor > 1)
    assert (windows.start + windows.shape <= sizes).all()
    assert (plan_windows(GraphConfig(), sizes, uniforms).reduce == 1).all()


def test_other_formats_and_small_images_take_the_full_way() -> None:
    """A PNG of the same size, in one batch with scaled JPEGs, is decoded exactly."""
    sink = io.BytesIO()
    textured_image(3, height=420, width=420).save(sink, "PNG")
    images = [*_large(3), sink.getvalue(), *sized_jpegs(2)]
    graph = GraphConfig(name="image_eval", size=32, resize_shorter=40, dtype="uint8", num_threads=2)
    auto = GraphConfig(name="image_eval", size=32, resize_shorter=40, dtype="uint8", num_threads=2, jpeg_scale="auto")
    one, other = _batch(images, graph).tensors["image"], _batch(images, auto).tensors["image"]
    assert [torch.equal(a, b) for a, b in zip(one, other, strict=True)] == [False] * 3 + [True] * 3


def test_a_bad_jpeg_is_replaced_and_its_neighbours_stay_bit_for_bit() -> None:
    images = _large(8)
    graph = GraphConfig(size=32, scale=[0.5, 1.0], num_threads=2, jpeg_scale="auto")
    clean = _batch(images, graph).tensors["image"]
    images[4] = images[4].replace(b"\xff\xdb", b"\xff\xfe")  # no quantization table, which nobody looks for
    recorder = Recorder()
    batch = _batch(images, graph, recorder).tensors
    assert batch["id"].tolist() == [0, 1, 2, 3, 5, 5, 6, 7]
    assert recorder.snapshot()["quarantined"] == 1
    kept = [0, 1, 2, 3, 5, 6, 7]
    assert torch.equal(batch["image"][kept], clean[kept])
    assert torch.equal(batch["image"][4], clean[5])


def test_a_jpeg_that_only_the_full_decoder_takes_is_decoded_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no bad sample, and its neighbours stay scaled."""
    images = _large(6)
    graph = GraphConfig(size=32, scale=[0.5, 1.0], num_threads=2, dtype="uint8", jpeg_scale="auto")
    clean = _batch(images, graph).tensors["image"]

    def picky(data: np.ndarray, factor: int, start: tuple[int, int], shape: tuple[int, int]) -> torch.Tensor:
        if data.tobytes() == images[2]:
            raise OSError("not to my liking")
        return decode_scaled(data, factor, start, shape)

    monkeypatch.setattr("dalipipe.graphs.assemble.decode_scaled", picky)
    recorder = Recorder()
    batch = _batch(images, graph, recorder).tensors
    assert batch["id"].tolist() == list(range(6))
    assert "quarantined" not in recorder.snapshot()
    same = [torch.equal(a, b) for a, b in zip(batch["image"], clean, strict=True)]
    assert same == [True, True, False, True, True, True]


@pytest.mark.parametrize("kind", [1, 2, 7])
def test_damaged_exif_data_stop_nothing(kind: int) -> None:
    """A resolution of a wrong type, for which PIL's own turning upright raises a TypeError; the turn is still made."""
    exif, sink = Image.Exif(), io.BytesIO()
    exif[0x0112], exif[0x011A] = 6, 72.0
    textured_image(3, height=240, width=300).save(sink, "JPEG", exif=exif)
    sound = sink.getvalue()
    at = sound.index(b"\x01\x1a\x00\x05") + 3
    damaged = sound[:at] + bytes([kind]) + sound[at + 1 :]
    graph = GraphConfig(name="image_eval", size=32, resize_shorter=32, num_threads=2, jpeg_scale="auto")
    recorder = Recorder()
    batch = _batch([sound, damaged], graph, recorder).tensors
    assert torch.equal(*batch["image"])
    assert not torch.equal(batch["image"][0], _batch([sound], replace(graph, jpeg_scale="off")).tensors["image"][0])
    assert "quarantined" not in recorder.snapshot()


def test_a_batch_of_scaled_images_alone_and_mixed_batches_keep_their_order() -> None:
    """Nothing is left for DALI in some steps; depth and FIFO stay in step."""
    images = [*_large(4), *sized_jpegs(4)] * 3
    graph = GraphConfig(size=32, scale=[0.5, 1.0], num_threads=2, jpeg_scale="auto")
    source = open_memory(MemoryPrefetcher(images, 4), graph=graph, queue_depth=3)
    ids = [next(source).tensors["id"].tolist() for _ in range(8)]
    source.close()
    assert ids == [list(range(4 * (i % 6), 4 * (i % 6) + 4)) for i in range(8)]


def test_decoding_at_a_scale_is_the_scaled_picture() -> None:
    """The whole and a window, against PIL's reduction of the full decode."""
    data = np.frombuffer(jpeg_bytes(1, height=403, width=517), np.uint8)
    whole = decode_scaled(data, 4, (0, 0), (403, 517))
    assert whole.shape == (101, 130, 3)
    reduced = np.asarray(Image.open(io.BytesIO(data.tobytes())).convert("RGB").reduce(4))
    assert np.abs(whole.numpy().astype(int) - reduced.astype(int)).mean() < 4
    assert torch.equal(decode_scaled(data, 4, (40, 80), (100, 62)), whole[10:35, 20:36])
    with pytest.raises(ValueError, match=r"the window at \(40, 80\) of \(364, 62\) leaves the image of 403 x 517"):
        decode_scaled(data, 4, (40, 80), (364, 62))
    with pytest.raises(ValueError, match="cannot be decoded at 1/2"):
        sink = io.BytesIO()
        textured_image(3).save(sink, "PNG")
        decode_scaled(np.frombuffer(sink.getvalue(), np.uint8), 2, (0, 0), (10, 10))


def test_an_unknown_scale_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"graph\.jpeg_scale='half' is not one of off, auto"):
        open_memory(MemoryPrefetcher(sized_jpegs(2), 2), graph=GraphConfig(jpeg_scale="half"))
