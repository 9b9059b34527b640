"""A contact sheet of images with a line of text below each."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

_TEXT_PIXELS = 14
_GAP_PIXELS = 4
_SHOWN_CHARACTERS_PER_PIXEL = 1 / 6.5


def to_pixels(images: npt.NDArray[Any], *, mean: Sequence[float], std: Sequence[float]) -> npt.NDArray[np.uint8]:
    """uint8 [n, H, W, 3] as the eye sees them, of [n, 3, H, W]: uint8, or floats normalised by mean and std (per
    channel, in units of 0..255)."""
    pixels: npt.NDArray[Any] = np.moveaxis(images, 1, -1)
    if pixels.dtype != np.uint8:
        pixels = np.rint(pixels.astype(np.float32) * np.asarray(std, np.float32) + np.asarray(mean, np.float32))
    clipped: npt.NDArray[np.uint8] = np.clip(pixels, 0, 255).astype(np.uint8)
    return clipped


def contact_sheet(images: Sequence[npt.NDArray[np.uint8]], captions: Sequence[str], columns: int) -> bytes:
    """The PNG of images (uint8 [H, W, 3] each, sizes may differ) in rows of `columns`, each with its caption below."""
    from PIL import Image, ImageDraw

    height = max(image.shape[0] for image in images)
    width = max(image.shape[1] for image in images)
    columns = min(columns, len(images))
    rows = -(-len(images) // columns)
    cell_height, cell_width = height + _TEXT_PIXELS + _GAP_PIXELS, width + _GAP_PIXELS
    sheet = Image.new("RGB", (columns * cell_width + _GAP_PIXELS, rows * cell_height + _GAP_PIXELS), "white")
    draw = ImageDraw.Draw(sheet)
    limit = max(1, int(width * _SHOWN_CHARACTERS_PER_PIXEL))
    for number, (image, caption) in enumerate(zip(images, captions, strict=True)):
        x = _GAP_PIXELS + number % columns * cell_width
        y = _GAP_PIXELS + number // columns * cell_height
        sheet.paste(Image.fromarray(np.ascontiguousarray(image)), (x, y))
        shown = caption if len(caption) <= limit else f"{caption[: limit - 1]}…"
        draw.text((x, y + height + 1), shown, fill="black", font_size=10)
    sink = io.BytesIO()
    sheet.save(sink, "PNG")
    return sink.getvalue()
