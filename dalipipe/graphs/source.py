"""The local source of batches: encoded samples of the prefetcher in, tensors out, whatever a single image does."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

from dalipipe.errors import ClosedError, PipelineError, PipelineTimeoutError
from dalipipe.graphs.assemble import Assembler
from dalipipe.graphs.check import undecodable
from dalipipe.graphs.config import GraphConfig, QuarantineConfig
from dalipipe.graphs.contract import Batch, BatchSource
from dalipipe.graphs.fields import bytes_tensors, label_tensor
from dalipipe.graphs.image import Backend
from dalipipe.graphs.intake import Intake, IntakeDesk
from dalipipe.graphs.lane import Lane
from dalipipe.graphs.limits import check_config, device_number
from dalipipe.graphs.quarantine import Quarantine
from dalipipe.order.step import Prefetcher
from dalipipe.telemetry import Recorder, Stage

_ASSEMBLE_TIMEOUT_S = 120.0
_CLOSE_WAIT_S = 1.5
_MAX_ROUNDS = 3


def open_source(
    prefetcher: Prefetcher,
    *,
    graph: GraphConfig,
    quarantine: QuarantineConfig,
    fields: Sequence[str],
    seed: int,
    device: str,
    queue_depth: int,
    num_samples: int,
    run_dir: Path | None,
    recorder: Recorder,
    local_ranks: int = 1,
) -> BatchSource:
    """Opens the source of decoded batches over a prefetcher, which it closes with itself.

    Args:
        fields: what a batch holds beside `id`: `image`, `label` (int64 [b], from ASCII decimals) and any other as
            bytes: `NAME` uint8 [total] with `NAME_offsets` int64 [b + 1].
        seed: of the augmentation.
        device: `cpu` or `cuda:N`.
        queue_depth: batches that DALI decodes at once.
        num_samples: of the data set; bad samples are judged as a share of it.
        run_dir: where `quarantine.jsonl` is written; None = nowhere.
        local_ranks: ranks that share this node's CPUs.

    Raises:
        ConfigError: a value that can never work.
        DependencyError: DALI is not installed.
    """
    device_id = device_number(device)
    check_config(graph, quarantine, fields, queue_depth)
    num_threads = graph.num_threads or max(1, len(os.sched_getaffinity(0)) // max(1, local_ranks))
    guard = Quarantine(quarantine, num_samples=num_samples, run_dir=run_dir, recorder=recorder)
    desk = IntakeDesk(
        graph,
        fields=fields,
        seed=seed,
        max_pixels=quarantine.max_pixels,
        quarantine=guard,
        num_threads=num_threads,
        recorder=recorder,
    )
    return LocalSource(
        prefetcher,
        graph=graph,
        desk=desk,
        quarantine=guard,
        max_pixels=quarantine.max_pixels,
        num_threads=num_threads,
        queue_depth=queue_depth,
        device_id=device_id,
        recorder=recorder,
    )


class LocalSource:
    """Batches decoded in this process. One thread iterates; `close` may come from another.

    On a CPU three batches are in work: DALI decodes one, our threads resize the one before, the caller has the third.
    """

    def __init__(
        self,
        prefetcher: Prefetcher,
        *,
        graph: GraphConfig,
        desk: IntakeDesk,
        quarantine: Quarantine,
        max_pixels: int,
        num_threads: int,
        queue_depth: int,
        device_id: int | None,
        recorder: Recorder,
    ) -> None:
        self._prefetcher = prefetcher
        self._graph = graph
        self._desk = desk
        self._quarantine = quarantine
        self._max_pixels = max_pixels
        self._num_threads = num_threads
        self._device_id = device_id
        self._recorder = recorder
        self._lock = threading.Lock()
        self._closed = False
        self._fifo: deque[Intake] = deque()  # taken in, not yet decoded: one entry a `run`, whatever comes of it
        self._assembling: deque[tuple[Intake, Future[Any]]] = deque()
        self._retired: list[Intake] = []  # delivered, views perhaps still held by DALI
        self._failure: BaseException | None = None
        self._started = False
        backend: Backend = "cpu" if device_id is None else "mixed"
        self._backends: tuple[Backend, ...] = ("cpu",) if device_id is None else ("mixed", "host")
        self._lane = self._new_lane(backend, queue_depth)
        self._salvage_lanes: dict[Backend, Lane] = {}
        self._assembler: Assembler | None = None
        if device_id is None and graph.name != "image_raw":
            self._assembler = Assembler(graph, num_threads=num_threads, recorder=recorder)
        self._finisher = ThreadPoolExecutor(1, thread_name_prefix="dalipipe-assemble")

    def __iter__(self) -> LocalSource:
        return self

    def __next__(self) -> Batch:
        """The next batch.

        Raises:
            QuarantineError: too many samples are bad, or the policy is `raise`.
            CorruptSampleError: a label is not an integer.
            PipelineError, PipelineTimeoutError: of the prefetcher or of a stage of ours.
            ClosedError: `close` was called.
        """
        with self._lock:
            if self._closed:
                raise ClosedError("the source of batches is closed")
            self._retire()
            intake, image = self._next_image()
            self._retired.append(intake)
            batch = self._hand_over(intake, image)
            self._quarantine.delivered(len(intake))
            return batch

    def close(self) -> None:
        """Closes the prefetcher, ends all threads and frees the pipelines within 2 s. Idempotent."""
        self._closed = True
        self._prefetcher.close()
        if self._assembler is not None:
            self._assembler.stop()
        # A thread inside `__next__` holds the lock; the two calls above make it return soon.
        if not self._lock.acquire(timeout=_CLOSE_WAIT_S):
            raise PipelineTimeoutError(
                f"a batch was still being decoded {_CLOSE_WAIT_S:g} s after the source was closed"
            )
        try:
            self._finisher.shutdown(wait=True, cancel_futures=True)
            if self._assembler is not None:
                self._assembler.close()
            for lane in (self._lane, *self._salvage_lanes.values()):
                lane.close()
            self._salvage_lanes.clear()
            self._retired += [intake for intake, _ in self._assembling] + list(self._fifo)
            self._assembling.clear()
            self._fifo.clear()
            self._retire()
        finally:
            self._lock.release()

    def _next_image(self) -> tuple[Intake, Any]:
        """The next step and its pixels: for a CPU batch the tensor, else DALI's tensor list, None for no samples."""
        if self._assembler is None:
            return self._decode()
        # The very first batch is not made to wait for the decode of the second.
        wanted = 2 if self._started else 1
        self._started = True
        while len(self._assembling) < wanted and self._failure is None:
            try:
                intake, decoded = self._decode()
            except Exception as error:
                if not self._assembling:
                    raise
                # Batches before it are whole: they are delivered first.
                self._failure = error
                break
            self._assembling.append((intake, self._finisher.submit(self._assemble, intake, decoded)))
        if not self._assembling:
            failure, self._failure = cast(BaseException, self._failure), None
            raise failure
        intake, future = self._assembling.popleft()
        try:
            return intake, future.result(_ASSEMBLE_TIMEOUT_S)
        except TimeoutError:
            raise PipelineTimeoutError(
                f"epoch {intake.step.epoch}, step {intake.step.step}: resize and normalise took more than "
                f"{_ASSEMBLE_TIMEOUT_S:g} s; the CPUs are overcommitted, lower graph.num_threads"
            ) from None

    def _assemble(self, intake: Intake, decoded: Any) -> Any:
        assert self._assembler is not None
        assert intake.windows is not None
        return None if decoded is None else self._assembler.assemble(decoded, intake.windows)

    def _decode(self) -> tuple[Intake, Any]:
        while not self._fifo:
            self._take_in()
        if len(self._fifo[0]) == 0:  # a rank without samples in the short last step
            return self._fifo.popleft(), None
        while self._lane.num_missing:
            self._take_in()
        intake = self._fifo.popleft()
        try:
            with self._recorder.span(Stage.DECODE):
                return intake, self._lane.run()
        except RuntimeError as error:
            with self._recorder.span(Stage.SALVAGE):
                return intake, self._salvage(intake, error)

    def _take_in(self) -> None:
        step = self._prefetcher.next()
        try:
            intake = self._desk.accept(step)
        except BaseException:
            step.release()
            raise
        self._fifo.append(intake)
        if len(intake):
            self._lane.push(intake.graph_inputs(self._graph.size))

    def _salvage(self, intake: Intake, error: RuntimeError) -> Any:
        """Decodes a failed batch again with its bad samples replaced; the good ones come out bit for bit the same."""
        reasons = undecodable(intake.images, max_pixels=self._max_pixels, num_threads=self._num_threads)
        self._replace(intake, reasons)
        for backend in self._backends:
            try:
                return self._rerun(intake, backend, slice(None))
            except RuntimeError as again:
                error = again
        # The graph refuses what the checker accepts: ask it about each sample alone.
        for _ in range(_MAX_ROUNDS):
            self._replace(intake, [self._refusal(intake, row) for row in range(len(intake))])
            try:
                return self._rerun(intake, self._backends[-1], slice(None))
            except RuntimeError as again:
                error = again
        raise PipelineError(
            f"epoch {intake.step.epoch}, step {intake.step.step}: the graph {self._graph.name} fails although each "
            f"sample of the batch passes alone: {_first_line(error)}"
        ) from error

    def _replace(self, intake: Intake, reasons: Sequence[str | None]) -> None:
        for row, reason in enumerate(reasons):
            if reason is not None:
                self._desk.replace(intake, row, reason)
        self._desk.plan(intake)

    def _refusal(self, intake: Intake, row: int) -> str | None:
        try:
            self._rerun(intake, self._backends[-1], slice(row, row + 1))
        except RuntimeError as error:
            return f"the graph refuses it: {_first_line(error)}"
        return None

    def _rerun(self, intake: Intake, backend: Backend, rows: slice) -> Any:
        if backend not in self._salvage_lanes:
            self._salvage_lanes[backend] = self._new_lane(backend, 1)
        lane = self._salvage_lanes[backend]
        lane.push(intake.graph_inputs(self._graph.size, rows))
        return lane.run()

    def _hand_over(self, intake: Intake, image: Any) -> Batch:
        import torch

        with self._recorder.span(Stage.HANDOVER):
            tensors: dict[str, Any] = {"image": self._image(image), "id": torch.from_numpy(intake.ids)}
            for name, views in intake.fields.items():
                if name == "label":
                    tensors[name] = label_tensor(views, intake.ids)
                elif name != "image":
                    tensors |= bytes_tensors(name, views)
            if not intake.step.valid.all():
                tensors["valid"] = torch.from_numpy(intake.step.valid.copy())
            if self._device_id is not None:
                for name in {"id", "label", "valid"} & set(tensors):
                    tensors[name] = tensors[name].pin_memory().to(f"cuda:{self._device_id}", non_blocking=True)
            step = intake.step
            return Batch(epoch=step.epoch, step=step.step, tensors=tensors, near_at=intake.near_at)

    def _image(self, image: Any) -> Any:
        import torch
        from torch.utils.dlpack import from_dlpack

        if isinstance(image, torch.Tensor):
            return image
        if self._graph.name == "image_raw":
            return [] if image is None else [from_dlpack(one) for one in image]
        if image is None:
            dtype, side = getattr(torch, self._graph.dtype), self._graph.size
            device = "cpu" if self._device_id is None else f"cuda:{self._device_id}"
            return torch.empty(0, 3, side, side, dtype=dtype, device=device)
        batch = from_dlpack(image.as_tensor())
        return batch if self._graph.layout == "NCHW" else batch.permute(0, 3, 1, 2)

    def _retire(self) -> None:
        self._retired = [intake for intake in self._retired if not intake.release()]

    def _new_lane(self, backend: Backend, queue_depth: int) -> Lane:
        return Lane(
            self._graph,
            backend,
            num_threads=self._num_threads,
            queue_depth=queue_depth,
            device_id=self._device_id,
        )


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:200] if lines else type(error).__name__
