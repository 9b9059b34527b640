"""JPEGs decoded at a half, a quarter or an eighth of their size, which DALI's decoders cannot do."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from dalipipe.order.step import Bytes
from dalipipe.shards.imageheader import parse_image_header

if TYPE_CHECKING:
    import torch


# How an image of an EXIF orientation is turned upright. PIL's own `exif_transpose` reads and writes all of the EXIF
# data, and fails in many ways where something in it is damaged.
_TURNS = dict(
    enumerate(
        (
            Image.Transpose.FLIP_LEFT_RIGHT,
            Image.Transpose.ROTATE_180,
            Image.Transpose.FLIP_TOP_BOTTOM,
            Image.Transpose.TRANSPOSE,
            Image.Transpose.ROTATE_270,
            Image.Transpose.TRANSVERSE,
            Image.Transpose.ROTATE_90,
        ),
        start=2,
    )
)


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
        ValueError, OSError, SyntaxError: PIL cannot decode it, or not at that scale, or the window leaves the image.
    """
    import torch

    header = parse_image_header(data.data)
    if start[0] + shape[0] > header.height or start[1] + shape[1] > header.width:
        raise ValueError(f"the window at {start} of {shape} leaves the image of {header.height} x {header.width}")
    with _opened(data) as picture:
        width, height = picture.size
        picture.draft("RGB", (width // factor, height // factor))
        if picture.size != (-(-width // factor), -(-height // factor)):
            raise ValueError(f"a {width} x {height} {picture.format} cannot be decoded at 1/{factor}")
        upright = picture.convert("RGB")
    if header.orientation in _TURNS:
        upright = upright.transpose(_TURNS[header.orientation])
    top, left = (side // factor for side in start)
    bottom, right = (-(-(begin + side) // factor) for begin, side in zip(start, shape, strict=True))
    window = upright.crop((left, top, min(right, upright.width), min(bottom, upright.height)))
    return torch.from_numpy(np.array(window))


def _opened(data: Bytes) -> Image.Image:
    try:
        return Image.open(io.BytesIO(data.data))
    except Image.DecompressionBombError as error:
        raise ValueError(f"PIL refuses so many pixels: {error}") from error
