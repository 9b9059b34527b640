"""Is it fast? The hand-over, the sweep of decoder settings, and raw DALI on the same images in the same process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.gpu.checks import inputs
from benchmarks.gpu.kit import Kit, rate, source
from dalipipe.graphs.config import GraphConfig
from dalipipe.graphs.contract import BatchSource
from dalipipe.graphs.image import build_pipeline, input_names

Result = dict[str, Any]
_LOADS = (0.0, 0.35, 0.65, 0.9, 1.0)
_ROUNDS = 3
_TRAINING_S = 60.0  # kept for the section after the sweep


def hand_over(kit: Kit) -> Result:
    """`run(stream)` against `run()` which waits for the card; both feed one reduction on torch's stream per batch."""
    if not kit.on_gpu:
        return {"ok": None, "why": "streams need a card"}
    import torch

    graph = GraphConfig(num_threads=kit.threads)
    rates: dict[str, list[float]] = {"stream": [], "synchronised": []}
    for _ in range(_ROUNDS):
        for name, values in rates.items():
            pipeline = build_pipeline(
                _positional(kit, graph), graph, "mixed", num_threads=kit.threads, queue_depth=2, device_id=kit.device_id
            )[0]
            pipeline.build()

            def step(name: str = name, pipeline: Any = pipeline) -> int:
                stream = torch.cuda.current_stream(kit.device) if name == "stream" else None
                batch = torch.utils.dlpack.from_dlpack(pipeline.run(stream)[0].as_tensor())
                batch.mean()
                return len(batch)

            values.append(rate(kit, step, seconds=kit.seconds / 2))
            del pipeline
    best = {name: round(max(values)) for name, values in rates.items()}
    return {"ok": True, "images_per_s": best, "ratio": round(best["stream"] / best["synchronised"], 3)}


def sweep(kit: Kit) -> Result:
    """Images a second of the package's source and of raw DALI for each share of the hardware decoder and thread count.

    One cell runs both, one after the other on the same images; the ratio is of that cell.
    """
    files = _files(kit)
    rows: list[dict[str, Any]] = []
    for threads in _thread_counts(kit):
        for load in _LOADS if kit.on_gpu and not kit.quick else (0.65,):
            if kit.left_s() < _TRAINING_S and rows:
                return {"ok": False, "why": f"stopped after {len(rows)} cells: out of time", "rows": rows}
            graph = GraphConfig(num_threads=threads, hw_decoder_load=load)
            with source(kit, kit.images, graph) as batches:
                ours = rate(kit, _images_of(batches))
            with _raw_dali(kit, files, graph) as raw:
                dali = rate(kit, raw)
            rows.append(
                {
                    "threads": threads,
                    "hw_decoder_load": load,
                    "ours_images_per_s": round(ours),
                    "dali_images_per_s": round(dali),
                    "ratio": round(ours / dali, 3),
                }
            )
    best = max(rows, key=lambda row: row["ours_images_per_s"])
    mean_bytes = sum(map(len, kit.images)) // len(kit.images)
    return {"ok": True, "batch_size": kit.batch_size, "mean_image_bytes": mean_bytes, "best": best, "rows": rows}


def _thread_counts(kit: Kit) -> list[int]:
    if kit.quick or not kit.on_gpu:
        return [kit.threads]
    return sorted({min(kit.threads, count) for count in (2, 4, 8, 16)})


def _images_of(batches: BatchSource) -> Callable[[], int]:
    return lambda: len(next(batches).tensors["image"])


def _positional(kit: Kit, graph: GraphConfig) -> Callable[[], tuple[Any, ...]]:
    feed, names = inputs(kit, graph), input_names(graph, "mixed")

    def positional() -> tuple[Any, ...]:
        given = feed()
        return tuple(given[name] for name in names)

    return positional


def _files(kit: Kit) -> list[str]:
    folder = kit.scratch / "files"
    folder.mkdir(exist_ok=True)
    paths = [folder / f"{number:05d}.jpg" for number in range(len(kit.images))]
    for path, data in zip(paths, kit.images, strict=True):
        path.write_bytes(data)
    return [str(path) for path in paths]


@contextmanager
def _raw_dali(kit: Kit, files: list[str], graph: GraphConfig) -> Iterator[Callable[[], int]]:
    """What a DALI user writes: readers.file, the fused random crop, resize, normalise, DALIGenericIterator."""
    from nvidia.dali.plugin.pytorch import DALIGenericIterator

    pipeline = raw_pipeline(files, graph, batch_size=kit.batch_size, mixed=kit.on_gpu, device_id=kit.device_id)
    batches: Any = DALIGenericIterator([pipeline], ["image", "label"])
    yield lambda: len(next(batches)[0]["image"])


def raw_pipeline(files: list[str], graph: GraphConfig, *, batch_size: int, mixed: bool, device_id: int | None) -> Any:
    """The peer's pipeline, not yet built; with `mixed` its decoder and all that follows are on the card."""
    from nvidia.dali import Pipeline, fn, types

    pipeline = Pipeline(
        batch_size=batch_size, num_threads=graph.num_threads, device_id=device_id, prefetch_queue_depth=2
    )
    decoder: dict[str, Any] = {"device": "mixed", "hw_decoder_load": graph.hw_decoder_load} if mixed else {}
    with pipeline:
        jpeg, label = fn.readers.file(files=files, labels=[0] * len(files), name="files", random_shuffle=True)
        image = fn.decoders.image_random_crop(
            jpeg,
            random_area=graph.scale,
            random_aspect_ratio=graph.ratio,
            output_type=types.RGB,
            **decoder,
        )
        image = fn.resize(image, size=[graph.size, graph.size])
        image = fn.crop_mirror_normalize(
            image,
            mirror=fn.random.coin_flip(),
            dtype=types.FLOAT,
            output_layout="CHW",
            mean=graph.mean,
            std=graph.std,
        )
        pipeline.set_outputs(image, label)
    return pipeline
