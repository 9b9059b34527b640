"""From what the graph gave to the tensors of a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dalipipe.errors import PipelineError
from dalipipe.graphs.config import GraphConfig
from dalipipe.graphs.contract import Batch
from dalipipe.graphs.fields import bytes_tensors, json_tensors, label_tensor, multi_hot_tensor
from dalipipe.graphs.intake import Intake
from dalipipe.graphs.quarantine import Quarantine
from dalipipe.telemetry import Recorder, Stage

if TYPE_CHECKING:
    import torch


class HandOver:
    """Makes the dictionary of tensors. Pixels are not copied; small tensors go to the GPU through pinned memory."""

    def __init__(
        self, graph: GraphConfig, *, quarantine: Quarantine, device_id: int | None, recorder: Recorder
    ) -> None:
        self._graph = graph
        self._quarantine = quarantine
        self._device_id = device_id
        self._recorder = recorder

    def batch(self, intake: Intake, pixels: Any) -> Batch:
        """The batch of a step. pixels: the finished tensor, DALI tensor lists by name, or None for no samples.

        Raises:
            CorruptSampleError: a label or a JSON field is not what the configuration says; names the sample.
        """
        import torch

        with self._recorder.span(Stage.HANDOVER):
            tensors = self._pixels(intake, pixels) | {"id": torch.from_numpy(intake.ids)} | self._fields(intake)
            if not intake.step.valid.all():
                tensors["valid"] = torch.from_numpy(intake.valid)
            step = intake.step
            return Batch(epoch=step.epoch, step=step.step, tensors=tensors, near_at=intake.near_at)

    def _fields(self, intake: Intake) -> dict[str, Any]:
        def name(row: int) -> str:
            return self._quarantine.name(int(intake.ids[row]))

        graph, tensors = self._graph, {}
        for field, views in intake.fields.items():
            if field == "label" and graph.labels == "multi_hot":
                tensors[field] = multi_hot_tensor(views, name, graph.num_classes)
            elif field == "label":
                tensors[field] = label_tensor(views, name)
            elif field != "image":
                tensors |= bytes_tensors(field, views)
            if field == "json" and graph.json_fields:
                tensors |= json_tensors(views, name, graph.json_fields)
        return tensors

    def on_device(self, batch: Batch) -> Batch:
        """The batch with ids, labels and numbers on the GPU; text stays on the host."""
        if self._device_id is None:
            return batch
        device = f"cuda:{self._device_id}"
        moving = {"id", "label", "valid", *self._graph.json_fields} & set(batch.tensors)
        for name in moving:
            batch.tensors[name] = batch.tensors[name].pin_memory().to(device, non_blocking=True)
        return batch

    def _pixels(self, intake: Intake, pixels: Any) -> dict[str, Any]:
        import torch

        if isinstance(pixels, torch.Tensor):
            return {"image": pixels}
        if pixels is None:
            return {"image": self._nothing()}
        if self._graph.name == "image_raw":
            return {"image": _samples(pixels["image"])}
        tensors = {name: _dense(found) for name, found in pixels.items()}
        for name, tensor in tensors.items():
            if len(tensor) != len(intake):
                raise PipelineError(f"{self._graph.name} gave {len(tensor)} of {name!r} for {len(intake)} samples")
        if self._graph.name in ("image_train", "image_eval", "multimodal") and self._graph.layout == "NHWC":
            tensors["image"] = tensors["image"].permute(0, 3, 1, 2)
        return tensors

    def _nothing(self) -> Any:
        import torch

        if self._graph.name == "image_raw":
            return []
        dtype, side = getattr(torch, self._graph.dtype), self._graph.size
        device = "cpu" if self._device_id is None else f"cuda:{self._device_id}"
        return torch.empty(0, 3, side, side, dtype=dtype, device=device)


def _samples(found: Any) -> list[torch.Tensor]:
    from torch.utils.dlpack import from_dlpack

    return [from_dlpack(one) for one in found]


def _dense(found: Any) -> Any:
    """One tensor [b, …] where all samples have one shape, else a list of b tensors; no copy either way."""
    from torch.utils.dlpack import from_dlpack

    return from_dlpack(found.as_tensor()) if found.is_dense_tensor() else _samples(found)
