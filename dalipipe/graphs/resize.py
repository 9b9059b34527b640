"""Antialiased bilinear resize of uint8 images: which kernel does it, and torch's.

The kernel of `resize.c` (through `native`) takes windows that begin at fractions of a pixel and finishes the batch in
the same pass. Where it was not built torch's takes its place: the same bits for whole windows, within one level of it
for the others. Torch's fast way is an overload that torch keeps private; it is used here and nowhere else, and the
public way gives the same bits.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence

import torch

from dalipipe.errors import ConfigError
from dalipipe.graphs.native import LIBRARY, NativeResize, load_native

_log = logging.getLogger(__name__)

Scale = tuple[float, float] | None
Kernel = Callable[[torch.Tensor, torch.Tensor, Scale], None]


def choose_native(wanted: str) -> NativeResize | None:
    """The kernel of `resize.c`, or None for torch's: the one place that decides.

    wanted: `graph.resize_kernel`; `auto` takes the native one where it is.

    Raises:
        ConfigError: `native` is wanted and was not built.
    """
    native = None if wanted == "torch" else load_native()
    if native is None and wanted == "native":
        raise ConfigError(
            f"graph.resize_kernel=native but there is no {LIBRARY.name} of this version in {LIBRARY.parent}; install "
            "the package again where there is a C compiler, or use auto"
        )
    _log.info("images are resized by %s", "torch" if native is None else f"the {native.name} kernel")
    return native


def resize_private(image: torch.Tensor, out: torch.Tensor, scale: Scale) -> None:
    """Resizes uint8 [1, 3, h, w] into `out` (uint8 [1, 3, H, W]), both channels_last, without a copy.

    scale: source pixels per output pixel, as (rows, columns); None = (h / H, w / W). With a scale of at least 1,
    `out` may be the upper left part of the resized image only.
    """
    down, right = (None, None) if scale is None else (1 / scale[0], 1 / scale[1])
    torch.ops.aten._upsample_bilinear2d_aa.out(image, list(out.shape[2:]), False, down, right, out=out)


def resize_public(image: torch.Tensor, out: torch.Tensor, scale: Scale) -> None:
    """The same through the public function: one allocation and one copy more."""
    height, width = out.shape[2:]
    interpolate = functools.partial(torch.nn.functional.interpolate, image, mode="bilinear", antialias=True)
    if scale is None:
        out.copy_(interpolate(size=[height, width]))
        return
    # The public function cuts its output to ⌊side / scale⌋; a factor a hair larger keeps the last pixel from rounding
    # away and vanishes in the kernel's single precision.
    factors = [(1 + 1e-12) / side for side in scale]
    out.copy_(interpolate(scale_factor=factors)[:, :, :height, :width])


@functools.cache
def best_kernel() -> Kernel:
    """The private overload where this torch has it and it agrees with the public function, else the public one."""
    probe = torch.arange(9 * 7 * 3, dtype=torch.uint8).reshape(1, 9, 7, 3).permute(0, 3, 1, 2)
    fast, slow = (torch.empty(1, 5, 4, 3, dtype=torch.uint8).permute(0, 3, 1, 2) for _ in range(2))
    resize_public(probe, slow, None)
    try:
        resize_private(probe, fast, None)
    except (AttributeError, RuntimeError, TypeError):
        return resize_public
    return resize_private if torch.equal(fast, slow) else resize_public


def resize_into(image: torch.Tensor, out: torch.Tensor, scale: Scale = None, kernel: Kernel | None = None) -> None:
    """Resizes `image` (uint8 [h, w, 3]) into `out` (uint8 [H, W, 3]) as PIL's BILINEAR does; both contiguous.

    scale: see `resize_private`.
    """
    if scale is None and image.shape == out.shape:
        out.copy_(image)
        return
    kernel = best_kernel() if kernel is None else kernel
    kernel(image.permute(2, 0, 1).unsqueeze(0), out.permute(2, 0, 1).unsqueeze(0), scale)


def resize_window(image: torch.Tensor, out: torch.Tensor, begin: Sequence[float], scale: Sequence[float]) -> None:
    """Resizes a part of `image` (uint8 [h, w, 3]) to `out` (uint8 [H, W, 3]) with torch.

    begin: row and column where the output begins, whole multiples of the scale. scale: source pixels per output pixel.
    """
    sides, size = image.shape[:2], out.shape[:2]
    if not any(begin) and all(side / num == factor for side, num, factor in zip(sides, size, scale, strict=True)):
        resize_into(image, out)
        return
    down, right = scale
    top, left = round(begin[0] / down), round(begin[1] / right)
    if min(scale) >= 1:
        num_rows, num_columns = top + size[0], left + size[1]
    else:  # torch copies where a side stays as it is, whatever the scale: a part may not have that side
        num_rows, num_columns = round(sides[0] / down), round(sides[1] / right)
    resized = torch.empty(num_rows, num_columns, 3, dtype=torch.uint8)
    resize_into(image, resized, (down, right))
    out.copy_(resized[top : top + size[0], left : left + size[1]])
