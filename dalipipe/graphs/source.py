"""The local source of batches: encoded samples of the prefetcher in, tensors out, whatever a single image does."""

from __future__ import annotations

import concurrent.futures
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from dalipipe.engines.cpus import default_workers
from dalipipe.errors import ClosedError, PipelineError, PipelineTimeoutError
from dalipipe.graphs.assemble import Assembler
from dalipipe.graphs.bysample import SampleLane
from dalipipe.graphs.config import GraphConfig, QuarantineConfig
from dalipipe.graphs.contract import Batch, BatchSource
from dalipipe.graphs.custom import is_custom
from dalipipe.graphs.handover import HandOver
from dalipipe.graphs.image import GRAPHS, Backend, SizeHint, input_names
from dalipipe.graphs.intake import Intake, IntakeDesk
from dalipipe.graphs.lane import Lane, release_memory
from dalipipe.graphs.limits import check_config, check_kept, device_number
from dalipipe.graphs.native import NativeResize
from dalipipe.graphs.origin import Origin
from dalipipe.graphs.quarantine import Quarantine
from dalipipe.graphs.resize import choose_native
from dalipipe.graphs.salvage import Salvage, first_line
from dalipipe.graphs.scaled import ScaledDecodeError
from dalipipe.order.step import Prefetcher
from dalipipe.telemetry import Recorder, Stage

if TYPE_CHECKING:
    from dalipipe.cache.decoded import DecodedSamples
    from dalipipe.graphs.device.tier import DeviceTier

_ASSEMBLE_TIMEOUT_S = 120.0
_CLOSE_WAIT_S = 1.5
_MAX_ROUNDS = 4

_log = logging.getLogger(__name__)


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
    origin: Callable[[int], Origin] | None = None,
    size_hint: SizeHint = None,
    kept: DecodedSamples | None = None,
    tier: DeviceTier | None = None,
) -> BatchSource:
    """Opens the source of decoded batches over a prefetcher, which it closes with itself.

    Args:
        fields: what a batch holds beside `id`: `image`, `label` (int64 [b], from ASCII decimals) and any other as
            bytes: `NAME` uint8 [total] with `NAME_offsets` int64 [b + 1]. With `graph.json_fields` also numbers of
            `json`; a graph of the user's own adds its outputs.
        seed: of the augmentation.
        device: `cpu` or `cuda:N`.
        queue_depth: batches that DALI decodes at once.
        num_samples: of the data set; bad samples are judged as a share of it.
        run_dir: where `quarantine.jsonl` is written; None = nowhere.
        local_ranks: ranks that share this node's CPUs.
        origin: tells where a sample comes from, for messages and `quarantine.jsonl`.
        size_hint: height and width of the largest images, in pixels, for which a GPU's decoder sets memory aside.
        kept: images decoded before, on the CPU: they are not decoded again, and others are put there.
        tier: keeps decoded images in the device's memory and finishes batches there.

    Raises:
        ConfigError: a value that can never work.
        DependencyError: DALI is not installed.
    """
    device_id = device_number(device)
    check_config(graph, quarantine, fields, queue_depth)
    if kept is not None:
        check_kept(graph, device)
    num_threads = graph.num_threads or max(1, default_workers() // max(1, local_ranks))
    # On a GPU and in a graph of the user's own DALI resizes; the device tier has a kernel of its own.
    on_cpu = device_id is None and tier is None and graph.name in GRAPHS and graph.name != "image_raw"
    native = choose_native(graph.resize_kernel) if on_cpu else None
    guard = Quarantine(quarantine, num_samples=num_samples, run_dir=run_dir, recorder=recorder, origin=origin)
    desk = IntakeDesk(
        graph,
        fields=fields,
        seed=seed,
        max_pixels=quarantine.max_pixels,
        quarantine=guard,
        num_threads=num_threads,
        recorder=recorder,
        fractions=native is not None,
    )
    return LocalSource(
        prefetcher,
        graph=graph,
        desk=desk,
        native=native,
        quarantine=guard,
        max_pixels=quarantine.max_pixels,
        num_threads=num_threads,
        queue_depth=queue_depth,
        device_id=device_id,
        size_hint=size_hint,
        recorder=recorder,
        kept=kept,
        tier=tier,
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
        native: NativeResize | None,
        quarantine: Quarantine,
        max_pixels: int,
        num_threads: int,
        queue_depth: int,
        device_id: int | None,
        size_hint: SizeHint,
        recorder: Recorder,
        kept: DecodedSamples | None = None,
        tier: DeviceTier | None = None,
    ) -> None:
        self._kept = kept
        self._tier = tier
        self._prefetcher = prefetcher
        self._graph = graph
        self._desk = desk
        self._quarantine = quarantine
        self._num_threads = num_threads
        self._device_id = device_id
        self._size_hint = size_hint
        self._recorder = recorder
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._fifo: deque[Intake] = deque()  # taken in, not yet decoded: one entry a `run`, whatever comes of it
        self._assembling: deque[tuple[Intake, Future[Any]]] = deque()
        self._retired: list[Intake] = []  # delivered, views perhaps still held by DALI
        self._failure: BaseException | None = None
        self._started = False
        backends: tuple[Backend, ...] = ("cpu",) if device_id is None else ("mixed", "host")
        # A lane that asks for inputs ahead would wait for a step with something left to decode, perhaps for ever.
        bypassed = kept is not None or tier is not None or graph.jpeg_scale != "off"
        self._lane_depth = 1 if bypassed else queue_depth
        self._lane: Lane | SampleLane = self._new_lane(backends[0], self._lane_depth)
        # On a GPU the decoder is part of one graph; so it is in a graph of the user's own.
        self._separable = device_id is None and tier is None and not is_custom(graph.name)
        self._assembler: Assembler | None = None
        if self._separable and graph.name != "image_raw":
            self._assembler = Assembler(graph, num_threads=num_threads, recorder=recorder, native=native, kept=kept)
        self._salvage = Salvage(
            desk,
            lambda backend: self._new_lane(backend, 1),
            backends=backends,
            name=graph.name,
            size=graph.size,
            scales=self._assembler is not None,
            max_pixels=max_pixels,
            num_threads=num_threads,
        )
        self._hand_over = HandOver(graph, quarantine=quarantine, device_id=device_id, recorder=recorder)
        self._finisher = ThreadPoolExecutor(1, thread_name_prefix="dalipipe-assemble")

    def __iter__(self) -> LocalSource:
        return self

    def __next__(self) -> Batch:
        """The next batch.

        Raises:
            QuarantineError: too many samples are bad, or the policy is `raise`.
            CorruptSampleError: a label or a JSON field is not what the configuration says.
            PipelineError, PipelineTimeoutError: of the prefetcher or of a stage of ours.
            ClosedError: `close` was called.
        """
        with self._lock:
            if self._closed.is_set():
                raise ClosedError("the source of batches is closed")
            try:
                self._retire()
                intake, pixels = self._next_pixels()
                self._retired.append(intake)
                batch = self._hand_over.on_device(self._hand_over.batch(intake, pixels))
                self._quarantine.delivered(len(intake))
                return batch
            finally:
                if self._closed.is_set():  # meanwhile, and `close` did not wait for this batch
                    self._free()

    def close(self) -> None:
        """Closes the prefetcher, ends all threads and frees the pipelines, within 2 s. Idempotent.

        A batch that DALI is decoding cannot be given up: the thread that waits for it then does the rest when it has
        come, and `close` does not wait for that.
        """
        self._closed.set()
        self._prefetcher.close()
        if self._assembler is not None:
            self._assembler.stop()
        # A thread inside `__next__` holds the lock; the two calls above make it return soon.
        if self._lock.acquire(timeout=_CLOSE_WAIT_S):
            try:
                self._free()
            finally:
                self._lock.release()

    def _free(self) -> None:
        """Ends what is owned; under the lock, by whoever has it when the source is closed."""
        self._finisher.shutdown(wait=True, cancel_futures=True)
        if self._assembler is not None:
            self._assembler.close()
        self._lane.close()
        self._salvage.close()
        self._retired += [intake for intake, _ in self._assembling] + list(self._fifo)
        self._assembling.clear()
        self._fifo.clear()
        self._retire()
        if self._device_id is not None:
            release_memory()

    def _next_pixels(self) -> tuple[Intake, Any]:
        """The next step and its pixels: for a CPU batch the tensor, else DALI's tensor lists, None for no samples."""
        if self._tier is not None:
            intake, decoded = self._decode()
            fed = self._salvage.fed(intake)
            return intake, self._tier.assemble(decoded, intake, fed) if len(intake) else None
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
            return intake, self._assembled(intake, future)
        except BaseException:
            self._retired.append(intake)
            raise

    def _assembled(self, intake: Intake, future: Future[Any]) -> Any:
        for _ in range(_MAX_ROUNDS):
            try:
                return future.result(_ASSEMBLE_TIMEOUT_S)
            except ScaledDecodeError as error:
                with self._recorder.span(Stage.SALVAGE):
                    decoded = self._salvage.rescale(intake, error)
                future = self._finisher.submit(self._assemble, intake, decoded)
            except concurrent.futures.TimeoutError:  # before Python 3.11 not the builtin one
                raise PipelineTimeoutError(
                    f"epoch {intake.step.epoch}, step {intake.step.step}: resize and normalise took more than "
                    f"{_ASSEMBLE_TIMEOUT_S:g} s; the CPUs are overcommitted, lower graph.num_threads"
                ) from None
        raise PipelineError(
            f"epoch {intake.step.epoch}, step {intake.step.step}: JPEGs fail again and again at a scale although they "
            "decode whole; use graph.jpeg_scale=off"
        )

    def _assemble(self, intake: Intake, decoded: Any) -> Any:
        assert self._assembler is not None
        return None if len(intake) == 0 else self._assembler.assemble(decoded, intake, self._salvage.fed(intake))

    def _decode(self) -> tuple[Intake, Any]:
        while not self._fifo:
            self._take_in()
        if not self._fifo[0].is_fed:  # no samples in the short last step, or all of them decoded at a scale
            return self._fifo.popleft(), None
        while self._lane.num_missing:
            if isinstance(self._lane, SampleLane) and len(self._fifo) > self._lane_depth:
                break  # steps of which all samples were dropped; there may be no other ones, and it can do without
            self._take_in()
        intake = self._fifo.popleft()
        try:
            return intake, self._decoded(intake)
        except BaseException:
            self._retired.append(intake)  # to be released like those that were delivered
            raise

    def _decoded(self, intake: Intake) -> Any:
        if isinstance(self._lane, Lane):
            try:
                with self._recorder.span(Stage.DECODE):
                    return self._lane.run()
            except RuntimeError as error:
                if not self._separable:
                    with self._recorder.span(Stage.SALVAGE):
                        return self._salvage.decode(intake, error)
                self._lane = self._separate(self._lane, intake, error)
        with self._recorder.span(Stage.DECODE):
            decoded = self._lane.run()
        if any(image is None for image in decoded["image"]):
            with self._recorder.span(Stage.SALVAGE):
                return self._salvage.mend(intake, decoded, self._lane)
        return decoded

    def _separate(self, lane: Lane, intake: Intake, error: RuntimeError) -> SampleLane:
        """From the first batch on that DALI refuses each image is decoded on its own: as fast, the same bits, and the
        next bad one costs no batch."""
        lane.close()
        _log.info("DALI refused a batch, each image is decoded on its own from here on: %s", first_line(error))
        windowed = "start" in input_names(self._graph, "cpu")
        separate = SampleLane(windowed=windowed, num_threads=self._num_threads, queue_depth=self._lane_depth)
        for waiting in (intake, *self._fifo):
            if waiting.is_fed:
                separate.push(waiting.graph_inputs(self._graph.size, self._salvage.fed(waiting)))
        return separate

    def _take_in(self) -> None:
        step = self._prefetcher.next()
        try:
            intake = self._desk.accept(step)
        except BaseException:
            step.release()
            raise
        self._fifo.append(intake)
        if self._kept is not None:
            self._find(intake, self._kept)
        if self._tier is not None:
            self._tier.seek(intake)
        rows = self._salvage.fed(intake)
        intake.is_fed = bool(rows)
        if rows:
            self._lane.push(intake.graph_inputs(self._graph.size, rows))

    def _find(self, intake: Intake, kept: DecodedSamples) -> None:
        """Looks up what was decoded before. The rest is decoded whole while there is room for it."""
        for sample_id in set(intake.ids.tolist()):
            image = kept.find(sample_id)
            if image is not None:
                intake.found[sample_id] = image
        intake.in_full = kept.has_room
        # Where the index has a wrong size the image tells, or its window would lie outside of it.
        sizes = {row: intake.found[int(intake.ids[row])].shape[:2] for row in intake.decoded_before()}
        wrong = [row for row, size in sizes.items() if size != tuple(intake.sizes[row].tolist())]
        for row in wrong:
            intake.sizes[row] = sizes[row]
        if wrong:
            self._desk.plan(intake)

    def _retire(self) -> None:
        self._retired = [intake for intake in self._retired if not intake.release()]

    def _new_lane(self, backend: Backend, queue_depth: int) -> Lane:
        return Lane(
            self._graph if self._tier is None else self._tier.lane_graph,
            backend,
            num_threads=self._num_threads,
            queue_depth=queue_depth,
            device_id=self._device_id,
            hint=self._size_hint,
        )
