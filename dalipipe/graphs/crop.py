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

# Larger images are always decoded in full: PIL, which decodes at a scale, has a limit of its own.
_MAX_SCALED_PIXELS = 2**26
_SCALED_PAYS = 1.2

Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """What to cut of each of n images, and what becomes of it.

    start, shape: int32 [n, 2], the window to decode as (row, column) and (height, width). begin: float64 [n, 2], where
    in the window the output's first pixel begins, in pixels of the source: a fraction where the resize takes one, else
    a whole multiple of the scale. scale: float64 [n, 2], source pixels per output pixel. mirror: int32 [n], 1 = flip
    left and right. reduce: int32 [n], 1, 2, 4 or 8: by how much a JPEG may be decoded smaller before that
    (`jpeg_scale`); it divides start.
    """

    start: Int32
    shape: Int32
    begin: npt.NDArray[np.float64]
    scale: npt.NDArray[np.float64]
    mirror: Int32
    reduce: Int32

    def region(self, size: int, rows: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """The part of the source that the output square of `size` shows: for a resize that takes fractions.

        Returns: begin and end, float32 [n, 2], in pixels of the source.
        """
        begin = self.start[rows] + self.begin[rows]
        return begin.astype(np.float32), (begin + size * self.scale[rows]).astype(np.float32)


def plan_windows(
    graph: GraphConfig, sizes: Int32, uniforms: npt.NDArray[np.float32], *, fractions: bool = False
) -> Windows:
    """The windows of `graph` for images of `sizes` (int32 [n, 2], upright height and width, all at least 1).

    Args:
        uniforms: float32 [n, NUM_UNIFORMS or more] in [0, 1); read by `image_train` and `multimodal` only.
        fractions: whether the resize can begin at a fraction of a pixel, so that nothing is decoded that it does not
            see.
    """
    if graph.name in ("image_train", "multimodal"):
        return _train_windows(graph, sizes, uniforms)
    if graph.name == "image_eval":
        return _eval_windows(graph, sizes, fractions=fractions)
    mirror, one = np.zeros(len(sizes), np.int32), np.ones(len(sizes), np.int32)
    whole, scale = np.zeros(sizes.shape), np.ones(sizes.shape)
    return Windows(start=np.zeros_like(sizes), shape=sizes, begin=whole, scale=scale, mirror=mirror, reduce=one)


def _train_windows(graph: GraphConfig, sizes: Int32, uniforms: npt.NDArray[np.float32]) -> Windows:
    start, shape = random_resized_crop(sizes, uniforms, scale=graph.scale, ratio=graph.ratio)
    reduce = _reduction(graph, sizes, shape, np.full_like(sizes, graph.size), shape)
    # The window moves to whole pixels of the smaller picture, by at most seven of the large one.
    start -= start % reduce[:, None]
    shape -= shape % reduce[:, None]
    return Windows(
        start=start,
        shape=shape,
        begin=np.zeros(sizes.shape),
        scale=shape / graph.size,
        mirror=(uniforms[:, _FLIP] < graph.flip).astype(np.int32),
        reduce=reduce,
    )


def _reduction(graph: GraphConfig, sizes: Int32, shape: Int32, resized: Int32, decoded: Int32) -> Int32:
    """The largest of 8, 4, 2 that leaves twice the pixels that are needed both ways and pays, else 1: int32 [n].

    A scaled decode goes through the whole image, the full one only through the window: it pays where the window is more
    than about 1.2 / factor of the image (from the cost of both at 1600 x 1200, 2026-11).

    Args:
        shape: int32 [n, 2], of what becomes `resized`, int32 [n, 2]. decoded: int32 [n, 2], of the part of it that a
            full decode goes through.
    """
    spare = (shape // (2 * resized)).min(axis=1)
    num_pixels = sizes.prod(axis=1, dtype=np.int64)
    spare[num_pixels > _MAX_SCALED_PIXELS] = 1
    factor: Int32 = np.select([spare >= 8, spare >= 4, spare >= 2], [8, 4, 2], 1).astype(np.int32)
    factor[decoded.prod(axis=1, dtype=np.int64) * factor < _SCALED_PAYS * num_pixels] = 1
    return factor if graph.jpeg_scale == "auto" else np.ones_like(factor)


def _eval_windows(graph: GraphConfig, sizes: Int32, *, fractions: bool) -> Windows:
    start, whole = middle(sizes)
    resized = shorter_side(whole, graph.resize_shorter)
    scale = whole / resized
    begin = centre_start(resized, graph.size) * scale
    one, mirror = np.ones((len(sizes), 1), np.int32), np.zeros(len(sizes), np.int32)
    if fractions:
        _, shape = _seen(begin, scale, whole, one, graph.size)
    else:
        # What lies below and to the right of the last output pixel's filter is never decoded. Above and to the left it
        # must stay: the filter's phase is counted from the window's first pixel.
        # Only where the image shrinks: torch's kernel copies when both sides are equal, whatever the scale, and a part
        # of an image that grows a little can have that side.
        reach = np.minimum(whole, np.ceil(begin + scale * (graph.size + 0.5) + 0.5))
        shape = np.where(scale.min(axis=1, keepdims=True) >= 1, reach, whole).astype(np.int32)
    reduce = np.where(start.any(axis=1), 1, _reduction(graph, sizes, whole, resized, shape)).astype(np.int32)
    if fractions:
        first, shape = _seen(begin, scale, whole, reduce[:, None], graph.size)
        start, begin = (start + first).astype(np.int32), begin - first
    return Windows(start=start, shape=shape, begin=begin, scale=scale, mirror=mirror, reduce=reduce)


def _seen(
    begin: npt.NDArray[np.float64], scale: npt.NDArray[np.float64], whole: Int32, reduce: Int32, size: int
) -> tuple[Int32, Int32]:
    """What the filters of the output square see of a whole image, in whole pixels of the reduced and of the full
    picture: start and shape, int32 [n, 2] each. Where the whole ends the filters end too, as in a resize of it."""
    support, centre = np.maximum(scale, reduce), begin + scale / 2
    first = np.maximum(np.floor((centre - support) / reduce) * reduce, 0)
    stop = np.minimum(np.ceil((centre + scale * (size - 1) + support) / reduce) * reduce, whole)
    return first.astype(np.int32), (stop - first).astype(np.int32)


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
