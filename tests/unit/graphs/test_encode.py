"""The GPU's way to encode images again, run on the CPU operators of nvImageCodec."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from dalipipe.errors import ConfigError, CorruptSampleError
from dalipipe.graphs.encode import shrink
from tests.support.images import jpeg_bytes


@pytest.mark.parametrize("orientation", [1, 6])
def test_it_shrinks_as_pillow_does(orientation):
    data = jpeg_bytes(2, height=300, width=400, quality=95, orientation=orientation)
    encoded, height, width = shrink(memoryview(data), short_side=150, quality=95, device="cpu")
    image = Image.open(io.BytesIO(encoded))
    assert (image.format, image.height, image.width) == ("JPEG", height, width)
    assert (height, width) == ((150, 200) if orientation == 1 else (200, 150))
    turned = Image.open(io.BytesIO(data))
    turned = turned.transpose(Image.Transpose.ROTATE_270) if orientation == 6 else turned
    expected = np.asarray(turned.resize((width, height), Image.Resampling.BICUBIC), np.float32)
    assert np.abs(np.asarray(image, np.float32) - expected).mean() < 3


def test_quality_decides_the_size():
    data = memoryview(jpeg_bytes(2, height=300, width=400, quality=98))
    sizes = [len(shrink(data, short_side=0, quality=quality, device="cpu")[0]) for quality in (30, 95)]
    assert sizes[0] < sizes[1] / 2


def test_bytes_that_are_no_image():
    with pytest.raises(CorruptSampleError, match="cannot decode"):
        shrink(memoryview(b"no image at all"), short_side=10, quality=90, device="cpu")


def test_a_gpu_that_is_not_there():
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ConfigError, match=r"pack\.device='cuda:0' but torch sees no GPU"):
        shrink(memoryview(jpeg_bytes(1)), short_side=10, quality=90, device="cuda:0")


@pytest.mark.gpu
def test_on_a_card():
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    data = memoryview(jpeg_bytes(2, height=300, width=400, quality=95))
    on_card, on_cpu = (
        np.asarray(Image.open(io.BytesIO(shrink(data, short_side=150, quality=95, device=device)[0])), np.float32)
        for device in ("cuda:0", "cpu")
    )
    assert np.abs(on_card - on_cpu).mean() < 3
