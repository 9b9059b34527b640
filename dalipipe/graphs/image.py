"""The DALI graphs of the image tasks: one function a task, with a switch between CPU and GPU.

On a GPU (`backend="mixed"`) everything from the bytes to the normalised batch is one graph. On a CPU DALI decodes
(`backend="cpu"`), our threads resize, and `normalize` finishes; see `assemble`.

No random operators: what is random arrives as an input, computed from (seed, epoch, sample id), so that a sample's
augmentation does not depend on its rank, its batch or how often the job was restarted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from dalipipe.graphs.config import GraphConfig

Backend = Literal["cpu", "mixed", "host", "twin"]
"""`host` is `mixed` with the decoder on the CPU, for batches whose images the GPU's decoder refuses; `twin` is the
same operators all on the CPU, which checks the figures of `mixed` where there is no GPU."""
Feed = Callable[[], tuple[Any, ...]]

MAX_BATCH_SIZE = 8192
"""Samples a step and rank. DALI wants a bound; what it allocates follows the batches that come."""


def image_train(feed: Feed, graph: GraphConfig, backend: Backend) -> Any:
    """Random resized crop and flip. CPU: the decoded window, uint8 HWC, which must lie inside the image."""
    return _windowed(feed, graph, backend)


def image_eval(feed: Feed, graph: GraphConfig, backend: Backend) -> Any:
    """Short side to `resize_shorter`, centre crop. CPU: the part of the image that the crop can see, uint8 HWC."""
    return _windowed(feed, graph, backend)


def image_raw(feed: Feed, graph: GraphConfig, backend: Backend) -> Any:
    """The decoded images, uint8 HWC, each in its own size."""
    from nvidia.dali import fn, types

    (jpeg,) = _inputs(feed, input_names(graph, backend))
    if backend == "cpu":
        return fn.decoders.image(jpeg, output_type=types.RGB)
    return _decode_for_gpu(jpeg, graph, backend)


# What a graph is fed with; DALI warns of inputs that it does not read.
_FUSED = ("image", "roi_start", "roi_end", "mirror")
_DTYPES = {
    "image": "UINT8",
    "start": "INT32",
    "shape": "INT32",
    "roi_start": "FLOAT",
    "roi_end": "FLOAT",
    "mirror": "INT32",
}


def input_names(graph: GraphConfig, backend: Backend) -> tuple[str, ...]:
    """The inputs of a graph, in order."""
    if graph.name == "image_raw":
        return ("image",)
    return ("image", "start", "shape") if backend == "cpu" else _FUSED


GRAPHS: dict[str, Callable[[Feed, GraphConfig, Backend], Any]] = {
    "image_train": image_train,
    "image_eval": image_eval,
    "image_raw": image_raw,
}


def build_pipeline(
    feed: Feed, graph: GraphConfig, backend: Backend, *, num_threads: int, queue_depth: int, device_id: int | None
) -> Any:
    """The DALI pipeline of `graph`, not yet built. `feed` gives the inputs of one batch a call, those of
    `input_names`: image as b uint8 arrays, start and shape as int32 [b, 2], roi_start and
    roi_end as float32 [b, 2], mirror as int32 [b].

    Only the default execution model survives a bad image and hands out buffers that it never touches again.
    """
    pipeline = _pipeline(num_threads, queue_depth, device_id)
    with pipeline:
        pipeline.set_outputs(GRAPHS[graph.name](feed, graph, backend))
    return pipeline


def build_normalize(feed: Feed, graph: GraphConfig, *, num_threads: int) -> Any:
    """The CPU pipeline that ends a batch, not yet built: uint8 [b, H, W, 3] and mirror int32 [b] to dtype and layout.

    DALI's kernel takes 0.2 ms an image where torch takes 1 to 2 (measured 2026-11).
    """
    from nvidia.dali import fn, types

    pipeline = _pipeline(num_threads, 1, None)
    with pipeline:
        image, mirror = fn.external_source(
            source=feed, num_outputs=2, batch=True, no_copy=True, dtype=[types.UINT8, types.INT32], ndim=[3, 0],
            layout=["HWC", ""],
        )  # fmt: skip
        pipeline.set_outputs(_normalize(image, mirror, graph))
    return pipeline


def operators(graph: GraphConfig, backend: Backend) -> list[tuple[str, str]]:
    """(operator, device) of the graph in order, after serialising it: this checks arguments and placement without a
    GPU. The one place that calls DALI's private graph builder."""
    pipeline = build_pipeline(lambda: (), graph, backend, num_threads=1, queue_depth=1, device_id=None)
    pipeline._build_graph()
    pipeline.serialize()
    kinds = [operator._op for operator in pipeline._ops]
    return [(getattr(kind, "schema_name", None) or type(kind).__name__, kind.device) for kind in kinds]


def _pipeline(num_threads: int, queue_depth: int, device_id: int | None) -> Any:
    from nvidia.dali import Pipeline

    return Pipeline(
        batch_size=MAX_BATCH_SIZE,
        num_threads=num_threads,
        device_id=device_id,
        prefetch_queue_depth=queue_depth,
        set_affinity=False,
    )


def _inputs(feed: Feed, names: tuple[str, ...]) -> Any:
    from nvidia.dali import fn, types

    return fn.external_source(
        source=feed,
        num_outputs=len(names),
        batch=True,
        no_copy=True,
        dtype=[getattr(types, _DTYPES[name]) for name in names],
        ndim=[0 if name == "mirror" else 1 for name in names],
    )


def _windowed(feed: Feed, graph: GraphConfig, backend: Backend) -> Any:
    from nvidia.dali import fn, types

    inputs = _inputs(feed, input_names(graph, backend))
    if backend == "cpu":
        jpeg, start, shape = inputs
        return fn.decoders.image_slice(jpeg, start=start, shape=shape, axis_names="HW", output_type=types.RGB)
    jpeg, begin, end, mirror = inputs
    return _finish_on_gpu(_decode_for_gpu(jpeg, graph, backend), begin, end, mirror, graph)


def _decode_for_gpu(jpeg: Any, graph: GraphConfig, backend: Backend) -> Any:
    from nvidia.dali import fn, types

    if backend != "mixed":
        decoded = fn.decoders.image(jpeg, output_type=types.RGB)
        return decoded.gpu() if backend == "host" else decoded

    return fn.decoders.image(
        jpeg,
        device="mixed",
        output_type=types.RGB,
        hw_decoder_load=graph.hw_decoder_load,
        # Without it the GPU's chroma differs visibly from the CPU's and PIL's.
        jpeg_fancy_upsampling=True,
    )


def _finish_on_gpu(image: Any, begin: Any, end: Any, mirror: Any, graph: GraphConfig) -> Any:
    """Resizes a region of the decoded image to the output size and normalises it."""
    from nvidia.dali import fn, types

    size = [graph.size, graph.size]
    resized = fn.resize(image, size=size, roi_start=begin, roi_end=end, interp_type=types.INTERP_LINEAR, antialias=True)
    return _normalize(resized, mirror, graph)


def _normalize(image: Any, mirror: Any, graph: GraphConfig) -> Any:
    from nvidia.dali import fn, types

    dtype = {"float32": types.FLOAT, "float16": types.FLOAT16, "uint8": types.UINT8}[graph.dtype]
    plain = graph.dtype == "uint8"
    return fn.crop_mirror_normalize(
        image,
        mirror=mirror,
        dtype=dtype,
        output_layout="CHW" if graph.layout == "NCHW" else "HWC",
        mean=[0.0] * 3 if plain else list(graph.mean),
        std=[1.0] * 3 if plain else list(graph.std),
    )
