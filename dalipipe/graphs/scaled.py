"""JPEGs decoded at a half, a quarter or an eighth of their size, which DALI's decoders cannot do."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageOps

from dalipipe.order.step import Bytes

if TYPE_CHECKING:
    import torch


class ScaledDecodeError(Exception):
    """Rows of a batch that could not be decoded at a scale; the full decoder has the last word on them."""

    def __init__(self, rows: list[int]) -> None:
        super().__init__(f"rows {rows} could not be decoded at a scale")
        self.rows = rows


def is_jpeg(data: Bytes) -> bool:
    """Whether the bytes start as a JPEG."""
    return len(data) > 2 and bool(data[0] == 0xFF) and bool(data[1] == 0xD8)


def decode_scaled(data: Bytes, factor: int, start: tuple[int, int], shape: tuple[int, int]) -> torch.Tensor:
    """The window of an upright image, decoded at 1 / factor of its size: uint8 [h, w, 3].

    Inverse transforms of fewer coefficients, in libjpeg-turbo through PIL (`draft`); the interpreter's lock is free
    meanwhile.

    Args:
        factor: 2, 4 or 8.
        start, shape: the window in pixels of the whole image; `factor` divides start.

    Raises:
        ValueError, OSError, SyntaxError: PIL cannot decode it, or not at that scale.
    """
    import torch

    with Image.open(io.BytesIO(data.data)) as picture:
        width, height = picture.size
        picture.draft("RGB", (width // factor, height // factor))
        if picture.size != (-(-width // factor), -(-height // factor)):
            raise ValueError(f"a {width} x {height} {picture.format} cannot be decoded at 1/{factor}")
        upright = ImageOps.exif_transpose(picture).convert("RGB")
    top, left = (side // factor for side in start)
    bottom, right = (-(-(begin + side) // factor) for begin, side in zip(start, shape, strict=True))
    window = upright.crop((left, top, min(right, upright.width), min(bottom, upright.height)))
    return torch.from_numpy(np.array(window))
