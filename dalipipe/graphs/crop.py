"""Where an image is cut: windows as arithmetic of uniform numbers and image sizes, in numpy alone.

All windows are in upright coordinates (after the EXIF rotation), in pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dalipipe.graphs.config import GraphConfig

_NUM_TRIES = 10
_FLIP, _TOP, _LEFT, _FIRST_TRY = 0, 1, 2, 3
NUM_UNIFORMS = _FIRST_TRY + 2 * _NUM_TRIES
"""Uniform numbers that one sample consumes: flip, top, left, then (area, ratio) of each try."""

# Beyond this aspect the middle of the long side is cut out before the resize: a 20,000 x 2 image with its short side
# brought to 256 would be 2.5 million pixels wide.
_MAX_EVAL_ASPECT = 16

Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """What to cut of each of n images. start, shape: int32 [n, 2] as (row, column) and (height, width);
    mirror: int32 [n], 1 = flip left and right; resized: int32 [n, 2], the size the window is resized to."""

    start: Int32
    shape: Int32
    mirror: Int32
    resized: Int32

    def region(self, size: int, rows: slice) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """The part of the source that a square of `size` in the middle of the resized window shows.

        Returns: begin and end, float32 [n, 2], in pixels with fractions; the window itself where it becomes `size`.
        """
        scale = self.shape[rows] / self.resized[rows]
        # From the whole pixel of the resized image that the CPU's crop begins at: both show the same.
        begin = self.start[rows] + centre_start(self.resized[rows], size) * scale
        return begin.astype(np.float32), (begin + size * scale).astype(np.float32)


def plan_windows(graph: GraphConfig, sizes: Int32, uniforms: npt.NDArray[np.float32]) -> Windows:
    """The windows of `graph` for images of `sizes` (int32 [n, 2], upright height and width, all at least 1).

    uniforms: float32 [n, NUM_UNIFORMS] in [0, 1); read by `image_train` only.
    """
    if graph.name == "image_train":
        start, shape = random_resized_crop(sizes, uniforms, scale=graph.scale, ratio=graph.ratio)
        mirror = (uniforms[:, _FLIP] < graph.flip).astype(np.int32)
        return Windows(start=start, shape=shape, mirror=mirror, resized=np.full_like(shape, graph.size))
    mirror = np.zeros(len(sizes), np.int32)
    if graph.name == "image_eval":
        start, shape = middle(sizes)
        return Windows(start=start, shape=shape, mirror=mirror, resized=shorter_side(shape, graph.resize_shorter))
    return Windows(start=np.zeros_like(sizes), shape=sizes, mirror=mirror, resized=sizes)


def random_resized_crop(
    sizes: Int32, uniforms: npt.NDArray[np.float32], *, scale: Sequence[float], ratio: Sequence[float]
) -> tuple[Int32, Int32]:
    """Random resized crop: start and shape, int32 [n, 2] each.

    Ten tries of an area uniform in `scale` (share of the image) and an aspect ratio (width / height) log-uniform in
    `ratio`; the first window that fits is placed uniformly. Where none fits, the largest centred window whose aspect
    lies in `ratio`. Source: Szegedy et al., "Going deeper with convolutions" (2014), section 6, with the fallback
    that has become standard since.
    """
    num = len(sizes)
    height, width = sizes[:, 0].astype(np.float64), sizes[:, 1].astype(np.float64)
    tries = uniforms[:, _FIRST_TRY:NUM_UNIFORMS].reshape(num, _NUM_TRIES, 2).astype(np.float64)
    area = (height * width)[:, None] * (scale[0] + tries[:, :, 0] * (scale[1] - scale[0]))
    low, high = np.log(ratio[0]), np.log(ratio[1])
    aspect = np.exp(low + tries[:, :, 1] * (high - low))
    try_width = np.rint(np.sqrt(area * aspect))
    try_height = np.rint(np.sqrt(area / aspect))
    fits = (try_width >= 1) & (try_width <= width[:, None]) & (try_height >= 1) & (try_height <= height[:, None])
    rows, first = np.arange(num), fits.argmax(axis=1)
    found = fits[rows, first]
    # No window fits a very long or flat image: cut the long side until the aspect is legal.
    fall_height = np.where(width / height < ratio[0], np.rint(width / ratio[0]), height)
    fall_width = np.where(width / height > ratio[1], np.rint(height * ratio[1]), width)
    crop_height = np.where(found, try_height[rows, first], np.clip(fall_height, 1, height))
    crop_width = np.where(found, try_width[rows, first], np.clip(fall_width, 1, width))
    top_share = np.where(found, uniforms[:, _TOP], 0.5)
    left_share = np.where(found, uniforms[:, _LEFT], 0.5)
    # floor(u * (n + 1)) is uniform over the n + 1 places; u = 0.5 gives the middle.
    top = np.minimum(np.floor(top_share * (height - crop_height + 1)), height - crop_height)
    left = np.minimum(np.floor(left_share * (width - crop_width + 1)), width - crop_width)
    start = np.stack([top, left], axis=1).astype(np.int32)
    return start, np.stack([crop_height, crop_width], axis=1).astype(np.int32)


def middle(sizes: Int32) -> tuple[Int32, Int32]:
    """The whole image, or its centred part where the aspect is beyond 16: start and shape, int32 [n, 2] each."""
    limit = sizes.min(axis=1, keepdims=True) * _MAX_EVAL_ASPECT
    # An even number of pixels goes, so that the centre stays where it was.
    start = np.maximum(sizes - limit, 0) // 2
    shape: Int32 = (sizes - 2 * start).astype(np.int32)
    return start.astype(np.int32), shape


def shorter_side(shape: Int32, target: int) -> Int32:
    """The size after bringing the short side to `target` (the long side is rounded down): int32 [n, 2]."""
    short = shape.min(axis=1, keepdims=True).astype(np.int64)
    resized: Int32 = (shape.astype(np.int64) * target // short).astype(np.int32)
    return resized


def centre_start(resized: Int32, size: int) -> Int32:
    """Where a centred square of `size` begins in images of `resized`: int32 [n, 2], halves rounded to even."""
    corner: Int32 = np.rint((resized - size) / 2.0).astype(np.int32)
    return corner
