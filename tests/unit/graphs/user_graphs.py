"""Graphs as a user writes them; the first is the worked example of docs/graphs.md."""

from __future__ import annotations

from typing import Any

from dalipipe.graphs.config import GraphConfig
from dalipipe.graphs.image import decode


def zoomed(jpeg: Any, draws: Any, graph: GraphConfig, backend: str) -> dict[str, Any]:
    """A random square zoom, blurred by as much as `graph.args` says, with the window beside it."""
    from nvidia.dali import fn, math, types

    image = decode(jpeg, graph, backend)  # uint8 HWC, on the CPU or the GPU
    shape = jpeg_shape(image)
    side = math.min(shape[0], shape[1]) * (0.5 + 0.5 * draws[0])
    top, left = (shape[0] - side) * draws[1], (shape[1] - side) * draws[2]
    begin, end = fn.stack(top, left), fn.stack(top + side, left + side)
    image = fn.resize(image, size=[graph.size, graph.size], roi_start=begin, roi_end=end, antialias=True)
    image = fn.gaussian_blur(image, sigma=graph.args.get("sigma", 1.0))
    image = fn.crop_mirror_normalize(
        image, mirror=fn.cast(draws[3] < 0.5, dtype=types.INT32), dtype=types.FLOAT, output_layout="CHW",
        mean=graph.mean, std=graph.std,
    )  # fmt: skip
    return {"image": image, "window": fn.cat(begin, end)}


def jpeg_shape(image: Any) -> Any:
    """Height and width as floats, on the CPU."""
    from nvidia.dali import fn, types

    return fn.cast(image.shape(), dtype=types.FLOAT)


def ragged(jpeg: Any, draws: Any, graph: GraphConfig, backend: str) -> Any:
    """A single node, each sample in its own size."""
    return decode(jpeg, graph, backend)


def fussy(jpeg: Any, draws: Any, graph: GraphConfig, backend: str) -> Any:
    """Refuses images that are narrower than 100 pixels: the window lies outside."""
    from nvidia.dali import fn

    return fn.slice(decode(jpeg, graph, backend), start=[0, 0], end=[50, 100], axes=[0, 1])


def rolls_dice(jpeg: Any, draws: Any, graph: GraphConfig, backend: str) -> Any:
    """What must not be: DALI's own random numbers."""
    from nvidia.dali import fn

    return fn.random_resized_crop(decode(jpeg, graph, backend), size=[32, 32])


def fails(jpeg: Any, draws: Any, graph: GraphConfig, backend: str) -> Any:
    """A misspelt argument."""
    from nvidia.dali import fn

    return fn.resize(decode(jpeg, graph, backend), syze=3)


def no_image(jpeg: Any, draws: Any, graph: GraphConfig, backend: str) -> Any:
    """The output that must be there is missing."""
    return {"picture": decode(jpeg, graph, backend)}


NOT_A_FUNCTION = 3
