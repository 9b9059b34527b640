"""Decoded batches kept ready for the trainer, on a thread that the loader owns.

On a GPU the feeder runs the graph on a stream of its own, so that decoding overlaps training; each batch carries an
event that the trainer's stream waits for, which costs the host nothing.
"""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import time
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dalipipe.errors import ClosedError, PipelineError, PipelineTimeoutError
from dalipipe.graphs.contract import Batch, BatchSource
from dalipipe.loader.lent import Lent, tensors_of
from dalipipe.telemetry import Causes, Recorder

if TYPE_CHECKING:
    import torch

# The prefetcher's own deadline is as long, and its error names the files that are waited for.
_SAYS_WHY_S = 0.5
_POLL_S = 0.1
_JOIN_S = 1.9
_LEAST_JOIN_S = 0.1
_EXIT_WAIT_S = 60.0

# Feeders that outlived their loader. A thread that is inside DALI when the interpreter goes away takes the process
# with it (abort), so the exit waits for them; registered here, it comes after the loaders' own clean-up.
_LATE: weakref.WeakSet[threading.Thread] = weakref.WeakSet()

_log = logging.getLogger(__name__)


@atexit.register
def _wait_for_late_feeders() -> None:
    deadline_s = time.monotonic() + _EXIT_WAIT_S
    for thread in list(_LATE):
        thread.join(max(0.0, deadline_s - time.monotonic()))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ready:
    batch: Batch | None
    put_at: float = 0.0
    event: Any = None  # torch.cuda.Event, where there is a GPU
    error: BaseException | None = None


class BatchesAhead:
    """A bounded queue of decoded batches, filled from a source by one thread."""

    def __init__(
        self, source: BatchSource, *, depth: int, device: torch.device, timeout_s: float, recorder: Recorder
    ) -> None:
        self._source = source
        self._device = device
        self._timeout_s = timeout_s
        self._recorder = recorder
        self._ready: queue.Queue[_Ready] = queue.Queue(maxsize=max(1, depth))
        self._causes = Causes("decode")
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        self._lent = Lent(lambda: _mark(device)) if device.type == "cuda" else None
        self._thread = threading.Thread(target=self._feed, name="dalipipe-batches", daemon=True)

    def start(self) -> None:
        """Begins to fill. Apart from the constructor, so that whoever is to close this holds it before there is a
        thread to be joined."""
        self._thread.start()

    def ready(self) -> int:
        """Decoded batches that lie ready."""
        return self._ready.qsize()

    def next(self) -> tuple[Batch, dict[str, float]]:
        """Returns the next batch, and the seconds of this call by what the batch lacked meanwhile.

        Raises:
            PipelineTimeoutError: nothing arrived within `prefetch.timeout_s`.
            DalipipeError, PipelineError: what ended the feeder, with its traceback as the cause; again at each call.
        """
        if self._failure is not None:
            raise self._failure
        if self._lent is not None:
            self._lent.settle()
        asked_at = time.perf_counter()
        ready = self._take(asked_at + self._timeout_s + _SAYS_WHY_S)
        if ready.error is not None:
            self._failure = ready.error
            raise ready.error
        assert ready.batch is not None
        got_at = time.perf_counter()
        put_at = min(max(ready.put_at, asked_at), got_at)
        waits = self._causes.charge(asked_at, put_at)
        waits["handover"] = waits.get("handover", 0.0) + got_at - put_at
        if ready.event is not None:
            import torch

            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(ready.event)
            on_device = [tensor for tensor in tensors_of(ready.batch.tensors) if tensor.is_cuda]
            for tensor in on_device:  # for those of torch's allocator
                tensor.record_stream(stream)
            if self._lent is not None:  # for those of DALI's
                self._lent.lend(on_device)
            if not ready.event.query():
                # The host does not wait here, but the device will: its own time, seen where the trainer synchronises.
                self._recorder.add("late_on_device")
        return ready.batch, waits

    def close(self) -> None:
        """Stops the feeder and closes the source, within 2 s. Idempotent.

        A feeder that waits for DALI to decode a batch ends, and frees the rest, when that has come.
        """
        began_s = time.monotonic()
        self._stop.set()
        self._source.close()
        self._drain()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(max(_LEAST_JOIN_S, _JOIN_S - (time.monotonic() - began_s)))
            if self._thread.is_alive():
                _log.warning("closed while a batch was being decoded; its memory comes back when it is done")
                _LATE.add(self._thread)
        self._drain()
        if self._lent is not None:
            self._lent.close()

    def _take(self, deadline: float) -> _Ready:
        while True:
            try:
                return self._ready.get(timeout=_POLL_S)
            except queue.Empty:
                if self._stop.is_set():
                    raise ClosedError("the loader was closed while it waited for a batch") from None
                if not self._thread.is_alive() and self._ready.empty():
                    raise PipelineError("the thread that decodes batches ended without saying why") from None
                if time.perf_counter() > deadline:
                    raise PipelineTimeoutError(
                        f"no batch within prefetch.timeout_s={self._timeout_s:g} s; decoding is stuck or slower than "
                        "that: look at graph.num_threads and at the lake, or raise the deadline"
                    ) from None

    def _feed(self) -> None:
        self._recorder.follow(self._causes)
        try:
            with _stream_of(self._device) as mark:
                while not self._stop.is_set():
                    batch = next(self._source)
                    if not self._put(_Ready(batch=batch, put_at=time.perf_counter(), event=mark())):
                        return
        except BaseException as error:  # noqa: BLE001 - handed to the trainer, who raises it
            self._put(_Ready(batch=None, error=error))

    def _put(self, item: _Ready) -> bool:
        began_s = time.perf_counter()
        try:
            with self._recorder.lacking("handover"):
                while not self._stop.is_set():
                    try:
                        self._ready.put(item, timeout=_POLL_S)
                        return True
                    except queue.Full:
                        continue
            return False
        finally:
            # The queue was full: the downstream side is the slow one.
            self._recorder.add("put_wait_s.batches", time.perf_counter() - began_s)

    def _drain(self) -> None:
        while True:
            try:
                self._ready.get_nowait()
            except queue.Empty:
                return


def _mark(device: torch.device) -> Any:
    """The end of the work of the caller's stream so far."""
    import torch

    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


class _stream_of:  # noqa: N801 - a context manager used like a function
    """A side stream on a GPU, nothing on a CPU; gives a function that marks 'all work so far' (or None)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._context: Any = None

    def __enter__(self) -> Any:
        if self._device.type != "cuda":
            return lambda: None
        import torch

        torch.cuda.set_device(self._device)
        self._context = torch.cuda.stream(torch.cuda.Stream(self._device))  # type: ignore[no-untyped-call]
        self._context.__enter__()

        def mark() -> Any:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            return event

        return mark

    def __exit__(self, *error: object) -> None:
        if self._context is not None:
            self._context.__exit__(*error)
