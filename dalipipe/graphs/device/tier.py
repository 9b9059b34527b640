"""The device tier: decoded, not yet augmented images near the model, and batches made of them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dalipipe.errors import ConfigError, DependencyError, PipelineError
from dalipipe.graphs.config import GraphConfig
from dalipipe.graphs.device.arena import PIECE_BYTES, Arena, Slot, Usage
from dalipipe.graphs.device.kernel import make_table
from dalipipe.graphs.device.memory import CudaDevice, Device
from dalipipe.graphs.intake import Intake
from dalipipe.graphs.limits import device_number
from dalipipe.telemetry import Recorder, Stage
from dalipipe.units import parse_capacity

if TYPE_CHECKING:
    import torch

KEY = "cache.tiers.device.capacity"
_GRAPHS = ("image_train", "image_eval", "multimodal")


class DeviceTier:
    """Keeps what DALI decoded and finishes batches, kept or not, with one kernel. Thread-safe.

    A batch is the same whether its images were kept. Images stay until the tier gives way.

    Args:
        device: a card, or the twin.
        budget_bytes: of the card's memory.
    """

    def __init__(
        self,
        device: Device,
        graph: GraphConfig,
        budget_bytes: int,
        recorder: Recorder,
        *,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        check_graph(graph)
        self._device = device
        self._recorder = recorder
        self._lock = threading.Lock()
        self._arena = Arena(device, budget_bytes, piece_bytes=piece_bytes, record=recorder.add)
        self.lane_graph = replace(graph, name="image_raw")
        """What DALI is left with: to decode."""

    @property
    def usage(self) -> Usage:
        """Bytes and images that are kept just now."""
        with self._lock:
            return self._arena.usage

    @property
    def budget_bytes(self) -> int:
        """What pieces may still come to; it shrinks when the tier gives way."""
        return self._arena.budget_bytes

    def seek(self, intake: Intake) -> None:
        """Gives the step its kept images, which then need no decode and stay valid while it holds them."""
        with self._lock:
            self._arena.make_way()
            slots = {sample_id: self._arena.find(sample_id) for sample_id in intake.ids.tolist()}
            intake.found = {sample_id: slot for sample_id, slot in slots.items() if slot is not None}

    def assemble(self, decoded: Any, intake: Intake, fed: Sequence[int]) -> torch.Tensor:
        """The batch of a step, [b, 3, size, size] in the dtype and memory layout of the graph.

        Args:
            decoded: DALI's outputs for the rows of `fed`, whole images; None where there are none.

        Raises:
            PipelineError: an image is not of the size that the index has, or the device has no memory for a batch.
        """
        with self._lock, self._recorder.span(Stage.NORMALIZE):
            self._device.order()
            images = {row: _slot(decoded["image"][place]) for place, row in enumerate(fed)}
            for row, image in images.items():
                self._keep(int(intake.ids[row]), image)
            for row in intake.decoded_before():
                images[row] = intake.found[int(intake.ids[row])]
                self._recorder.add("samples_hit.device")
                self._recorder.add("bytes_read.device", len(images[row].memory))
            batch = self._finish([images[row] for row in range(len(intake))], intake)
            self._device.mark()
            return batch

    def release(self, num_bytes: int | None = None) -> int:
        """Gives memory back to the model: drops kept images of at least `num_bytes` (None = all) and keeps as much
        less from here on. From any thread, for example where a step of the model has run out of memory. What a step in
        work holds is free when that step is done.

        Returns: the bytes that were freed.
        """
        with self._lock:
            return self._arena.release(num_bytes)

    def close(self) -> None:
        """Frees all of it. Idempotent."""
        with self._lock:
            if self._arena.usage.pieces_bytes:
                self._arena.release()
            self._arena.budget_bytes = 0

    def _keep(self, sample_id: int, image: Slot) -> None:
        slot = self._arena.put(sample_id, image.height, image.width)
        if slot is not None:
            slot.memory.copy_(image.memory)
            self._recorder.add("samples_kept.device")

    def _finish(self, images: list[Slot], intake: Intake) -> torch.Tensor:
        assert intake.windows is not None
        for row, image in enumerate(images):
            if (image.height, image.width) != tuple(intake.sizes[row].tolist()):
                raise PipelineError(
                    f"sample {intake.ids[row]} is {image.height} x {image.width} pixels and its index says "
                    f"{' x '.join(map(str, intake.sizes[row].tolist()))}; run `dalipipe verify`"
                )
        table = make_table(intake.windows, [image.width for image in images])
        memory = [image.memory for image in images]
        try:
            return self._device.finish(memory, table)
        except MemoryError:
            self._arena.release()
        try:
            return self._device.finish(memory, table)
        except MemoryError as error:
            raise PipelineError(
                f"epoch {intake.step.epoch}, step {intake.step.step}: the device has no memory for a batch, with all "
                f"kept images dropped ({error}); lower loader.batch_size or what the model takes"
            ) from error


def open_device_tier(
    graph: GraphConfig, device: str, capacity: int | float | str, recorder: Recorder
) -> DeviceTier | None:
    """The device tier of this process, where `cache.tiers.device.capacity` asks for one. Experimental.

    Args:
        capacity: bytes, or a fraction of the card's memory that is free now.

    Raises:
        ConfigError: the capacity is no size, the device no card, or the graph one that the kernel does not do.
        DependencyError: CuPy is not installed.
    """
    if parse_capacity(capacity, 2**62, KEY) == 0:
        return None
    device_id = device_number(device)
    if device_id is None:
        raise ConfigError(f"{KEY}={capacity} needs a GPU, and device={device}: set it to 0, or device=cuda:N")
    check_graph(graph)
    import torch

    try:
        card = CudaDevice(graph, device_id)
    except ImportError as error:
        raise DependencyError(f"{KEY}={capacity} needs CuPy ({error}); pip install 'dalipipe[cuda13]'") from error
    budget_bytes = parse_capacity(capacity, torch.cuda.mem_get_info(device_id)[0], KEY)
    return DeviceTier(card, graph, budget_bytes, recorder, piece_bytes=min(PIECE_BYTES, max(2**20, budget_bytes // 64)))


def check_graph(graph: GraphConfig) -> None:
    """Refuses what the kernel does not do.

    Raises:
        ConfigError: names the key.
    """
    if graph.name not in _GRAPHS:
        raise ConfigError(f"{KEY} is for graph.name={', '.join(_GRAPHS)}, not {graph.name}")
    if graph.jitter.is_on or graph.rand_augment.is_on:
        raise ConfigError(f"{KEY} goes without graph.jitter and graph.rand_augment: its kernel does not do them")
    if graph.jpeg_scale != "off":
        raise ConfigError(f"{KEY} keeps whole images: give it with graph.jpeg_scale=off, not {graph.jpeg_scale}")


def _slot(image: Any) -> Slot:
    from torch.utils.dlpack import from_dlpack

    pixels = from_dlpack(image)
    height, width = pixels.shape[:2]
    return Slot(memory=pixels.reshape(-1), height=int(height), width=int(width))
