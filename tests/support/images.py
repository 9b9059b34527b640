"""Real JPEG files for tests: textured like photographs, so that they compress and decode like them."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image


def jpeg_bytes(seed: int, *, height: int = 120, width: int = 160, quality: int = 90, orientation: int = 1) -> bytes:
    """One textured JPEG; equal arguments give equal bytes. orientation: the EXIF tag, stored pixels are not turned."""
    picture = textured_image(seed, height=height, width=width)
    exif = Image.Exif()
    if orientation != 1:
        exif[0x0112] = orientation
    sink = io.BytesIO()
    picture.save(sink, "JPEG", quality=quality, exif=exif)
    return sink.getvalue()


def textured_image(seed: int, *, height: int = 120, width: int = 160) -> Image.Image:
    """Smooth colour patches with fine grain on top."""
    rng = np.random.Generator(np.random.Philox(seed))
    patches = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8))
    smooth = np.asarray(patches.resize((width, height), Image.Resampling.BICUBIC), np.int16)
    grain = rng.integers(-12, 13, smooth.shape, dtype=np.int16)
    return Image.fromarray(np.clip(smooth + grain, 0, 255).astype(np.uint8))


def write_image_tree(
    root: Path, *, num_images: int, num_classes: int = 3, height: int = 120, width: int = 160, seed: int = 0
) -> list[Path]:
    """Writes `num_images` JPEGs of slightly different sizes as `root/class_c/image_i.jpg`, classes in turn.

    With `num_classes=0` they lie flat in `root`. Returns the files in the order of i.
    """
    files = []
    for i in range(num_images):
        folder = root / f"class_{i % num_classes}" if num_classes else root
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"image_{i:05d}.jpg"
        path.write_bytes(jpeg_bytes(seed + i, height=height + 2 * (i % 5), width=width + 4 * (i % 7)))
        files.append(path)
    return files
