"""The DALI graphs of the image tasks: one function a task, with a switch between CPU and GPU.

On a GPU (`backend="mixed"`) everything from the bytes to the normalised batch is one graph. On a CPU DALI decodes
(`backend="cpu"`), our threads resize, and `normalize` finishes; see `assemble`.

No random operators: what is random arrives as an input, computed from (seed, epoch, sample id), so that a sample's
augmentation does not depend on its rank, its batch or how often the job was restarted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from dalipipe.errors import ConfigError
from dalipipe.graphs.augment import apply, strength_inputs
from dalipipe.graphs.config import GraphConfig
from dalipipe.graphs.custom import check_stateless, is_custom, load_graph, outputs_of

Backend = Literal["cpu", "mixed", "host", "twin"]
"""`host` is `mixed` with the decoder on the CPU, for batches whose images the GPU's decoder refuses; `twin` is the
same operators all on the CPU, which checks the figures of `mixed` where there is no GPU."""
Feed = Callable[[], tuple[Any, ...]]
Inputs = dict[str, Any]
SizeHint = tuple[int, int] | None

MAX_BATCH_SIZE = 8192
"""Samples a step and rank. DALI wants a bound; what it allocates follows the batches that come."""


def image_train(inputs: Inputs, graph: GraphConfig, backend: Backend, hint: SizeHint) -> Any:
    """Random resized crop, flip, colour. CPU: the decoded window, uint8 HWC, which must lie inside the image."""
    return _windowed(inputs, graph, backend, hint)


def image_eval(inputs: Inputs, graph: GraphConfig, backend: Backend, hint: SizeHint) -> Any:
    """Short side to `resize_shorter`, centre crop. CPU: the part of the image that the crop can see, uint8 HWC."""
    return _windowed(inputs, graph, backend, hint)


def image_raw(inputs: Inputs, graph: GraphConfig, backend: Backend, hint: SizeHint) -> Any:
    """The decoded images, uint8 HWC, each in its own size."""
    return decode(inputs["image"], graph, backend, hint)


GRAPHS: dict[str, Callable[[Inputs, GraphConfig, Backend, SizeHint], Any]] = {
    "image_train": image_train,
    "image_eval": image_eval,
    "image_raw": image_raw,
    "multimodal": image_train,
}

# What a graph is fed with: DALI type and dimensions of a sample. DALI warns of inputs that it does not read.
_INPUTS = {
    "image": ("UINT8", 1),
    "start": ("INT32", 1),
    "shape": ("INT32", 1),
    "roi_start": ("FLOAT", 1),
    "roi_end": ("FLOAT", 1),
    "mirror": ("INT32", 0),
    "draws": ("FLOAT", 1),
}


def input_names(graph: GraphConfig, backend: Backend) -> tuple[str, ...]:
    """The inputs of a graph, in order."""
    if is_custom(graph.name):
        return ("image", "draws")
    if graph.name == "image_raw":
        return ("image",)
    if backend == "cpu":
        return ("image", "start", "shape")
    return ("image", "roi_start", "roi_end", "mirror", *strength_inputs(graph))


def decode(jpeg: Any, graph: GraphConfig, backend: Backend, hint: SizeHint = None) -> Any:
    """The decoded images, uint8 HWC, RGB, upright, on the CPU or (`mixed`, `host`) on the GPU.

    hint: height and width of the largest images, for which the GPU's decoder sets memory aside at once.
    """
    from nvidia.dali import fn, types

    if backend != "mixed":
        decoded = fn.decoders.image(jpeg, output_type=types.RGB)
        return decoded.gpu() if backend == "host" else decoded
    height, width = hint or (0, 0)
    return fn.decoders.image(
        jpeg,
        device="mixed",
        output_type=types.RGB,
        hw_decoder_load=graph.hw_decoder_load,
        preallocate_height_hint=height,
        preallocate_width_hint=width,
        # Without it the GPU's chroma differs visibly from the CPU's and PIL's.
        jpeg_fancy_upsampling=True,
    )


def build_pipeline(
    feed: Feed,
    graph: GraphConfig,
    backend: Backend,
    *,
    num_threads: int,
    queue_depth: int,
    device_id: int | None,
    hint: SizeHint = None,
) -> tuple[Any, tuple[str, ...]]:
    """The DALI pipeline of `graph`, not yet built, and the names of its first outputs.

    `feed` gives the inputs of one batch a call, those of `input_names`: image as b uint8 arrays, start and shape as
    int32 [b, 2], roi_start and roi_end as float32 [b, 2], mirror as int32 [b], draws as float32 [b, d], the rest as in
    `plan_strengths`.

    Only the default execution model survives a bad image and hands out buffers that it never touches again.

    Raises:
        ConfigError: a graph of the user's own cannot be built.
    """
    pipeline = _pipeline(num_threads, queue_depth, device_id)
    with pipeline:
        inputs = _inputs(feed, input_names(graph, backend), graph)
        if is_custom(graph.name):
            outputs = _custom(inputs, graph, backend)
            unused = [inputs["draws"]]  # an input that no output needs makes DALI warn
        else:
            outputs, unused = {"image": GRAPHS[graph.name](inputs, graph, backend, hint)}, []
        pipeline.set_outputs(*outputs.values(), *unused)
    return pipeline, tuple(outputs)


def build_normalize(feed: Feed, graph: GraphConfig, *, num_threads: int) -> Any:
    """The CPU pipeline that ends a batch, not yet built: uint8 [b, H, W, 3], mirror int32 [b] and the strengths of
    `strength_inputs` to dtype and layout.

    DALI's kernel takes 0.2 ms an image where torch takes 1 to 2 (measured 2026-11).
    """
    from nvidia.dali import fn, types

    strengths = strength_inputs(graph)
    kinds = [("UINT8", 3), ("INT32", 0), *strengths.values()]
    pipeline = _pipeline(num_threads, 1, None)
    with pipeline:
        image, mirror, *rest = fn.external_source(
            source=feed, num_outputs=len(kinds), batch=True, no_copy=True, ndim=[ndim for _, ndim in kinds],
            dtype=[getattr(types, name) for name, _ in kinds], layout=["HWC", *[""] * (len(kinds) - 1)],
        )  # fmt: skip
        image = apply(image, dict(zip(strengths, rest, strict=True)))
        pipeline.set_outputs(_normalize(image, mirror, graph))
    return pipeline


def check_custom(graph: GraphConfig, backend: Backend) -> None:
    """Builds a graph of the user's own once, on no device, and looks at its operators.

    Raises:
        ConfigError: there is no such function, it fails, or it draws its own random numbers.
    """
    check_stateless(graph.name, [kind for kind, _ in operators(graph, backend)])


def operators(graph: GraphConfig, backend: Backend) -> list[tuple[str, str]]:
    """(operator, device) of the graph in order, after serialising it: this checks arguments and placement without a
    GPU. The one place that calls DALI's private graph builder."""
    pipeline, _ = build_pipeline(lambda: (), graph, backend, num_threads=1, queue_depth=1, device_id=None)
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


def _inputs(feed: Feed, names: tuple[str, ...], graph: GraphConfig) -> Inputs:
    from nvidia.dali import fn, types

    kinds = [(_INPUTS | strength_inputs(graph))[name] for name in names]
    nodes = fn.external_source(
        source=feed,
        num_outputs=len(names),
        batch=True,
        no_copy=True,
        dtype=[getattr(types, dtype) for dtype, _ in kinds],
        ndim=[ndim for _, ndim in kinds],
    )
    return dict(zip(names, nodes, strict=True))


def _custom(inputs: Inputs, graph: GraphConfig, backend: Backend) -> Inputs:
    function = load_graph(graph.name)
    try:
        found = function(inputs["image"], inputs["draws"], graph, backend)
    except Exception as error:
        raise ConfigError(f"graph.name={graph.name!r} failed while it was built: {error!r}") from error
    return outputs_of(graph.name, found)


def _windowed(inputs: Inputs, graph: GraphConfig, backend: Backend, hint: SizeHint) -> Any:
    from nvidia.dali import fn, types

    if backend == "cpu":
        return fn.decoders.image_slice(
            inputs["image"], start=inputs["start"], shape=inputs["shape"], axis_names="HW", output_type=types.RGB
        )
    return _finish_on_gpu(decode(inputs["image"], graph, backend, hint), inputs, graph)


def _finish_on_gpu(image: Any, inputs: Inputs, graph: GraphConfig) -> Any:
    """Resizes a region of the decoded image to the output size, changes its colour and normalises it."""
    from nvidia.dali import fn, types

    resized = fn.resize(
        image,
        size=[graph.size, graph.size],
        roi_start=inputs["roi_start"],
        roi_end=inputs["roi_end"],
        interp_type=types.INTERP_LINEAR,
        antialias=True,
    )
    resized = apply(resized, {name: inputs[name] for name in strength_inputs(graph)})
    return _normalize(resized, inputs["mirror"], graph)


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
