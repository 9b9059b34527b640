"""The CPU's decode, image by image: a bad one costs nothing but itself."""

from __future__ import annotations

import concurrent.futures
import itertools
import threading
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from dalipipe.errors import PipelineTimeoutError
from dalipipe.graphs.check import open_decoder
from dalipipe.order.step import Bytes

Pixels = npt.NDArray[np.uint8]

_TIMEOUT_S = 120.0


class SampleLane:
    """Takes the inputs of a CPU `Lane` and gives its outputs, bit for bit, but None for an image that fails.

    Where DALI's operator gives up a whole batch for one bad image, nvImageCodec, which it calls, gives up the image.
    Both take the same time (0.85 to 0.9 ms of CPU a window of a photograph, measured 2026-11). A decoder a thread,
    since nvImageCodec's own pool leaves one CPU unused.

    windowed: whether windows of the images are wanted (the inputs `start` and `shape`) or all of them.
    """

    def __init__(self, *, windowed: bool, num_threads: int, queue_depth: int) -> None:
        self._windowed = windowed
        self._num_threads = num_threads
        self._queue_depth = queue_depth
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="dalipipe-decode")
        self._of_thread = threading.local()
        self._stop = threading.Event()
        self._pending: deque[_Job] = deque()

    @property
    def num_missing(self) -> int:
        """Inputs to push before `run` may be called."""
        return max(0, self._queue_depth - len(self._pending))

    def push(self, inputs: dict[str, Any]) -> None:
        """Begins to decode a batch; see `Intake.graph_inputs`."""
        job = _Job(inputs, self._windowed)
        threads = range(min(self._num_threads, len(job.images)))
        job.futures = [self._pool.submit(self._work, job) for _ in threads]
        self._pending.append(job)

    def run(self) -> dict[str, list[Pixels | None]]:
        """The images of the oldest batch: uint8 [h, w, 3], None where one cannot be decoded.

        Raises:
            PipelineTimeoutError: it took more than two minutes.
        """
        job = self._pending.popleft()
        deadline = time.monotonic() + _TIMEOUT_S
        try:
            for future in job.futures:
                future.result(max(0.0, deadline - time.monotonic()))
        except concurrent.futures.TimeoutError:  # before Python 3.11 not the builtin one
            raise PipelineTimeoutError(
                f"{len(job.images)} images were not decoded within {_TIMEOUT_S:g} s; the CPUs are overcommitted, lower "
                "graph.num_threads"
            ) from None
        return {"image": job.pixels}

    def decode(self, inputs: dict[str, Any]) -> list[Pixels | None]:
        """The images of `inputs` at once, on the caller's thread, past the batches that wait."""
        job = _Job(inputs, self._windowed)
        self._work(job)
        return job.pixels

    def close(self) -> None:
        """Ends all threads and drops what was pushed. Idempotent."""
        self._stop.set()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._pending.clear()

    def _work(self, job: _Job) -> None:
        decoder = getattr(self._of_thread, "decoder", None)
        if decoder is None:
            decoder = self._of_thread.decoder = open_decoder(1)
        # The threads take places from one counter: no task is longer than an image.
        while (place := next(job.places)) < len(job.images) and not self._stop.is_set():
            window = None if job.windows is None else job.windows[place]
            job.pixels[place] = _decode_window(decoder, job.images[place], window)


class _Job:
    """One batch on its way.

    windows: (top, left, bottom, right) of each image, or None for whole images.
    """

    def __init__(self, inputs: dict[str, Any], windowed: bool) -> None:
        self.images: list[Bytes] = inputs["image"]
        self.windows: list[list[int]] | None = None
        if windowed:
            self.windows = np.concatenate([inputs["start"], inputs["start"] + inputs["shape"]], axis=1).tolist()
        self.pixels: list[Pixels | None] = [None] * len(self.images)
        self.places = itertools.count()
        self.futures: list[Future[None]] = []


def _decode_window(decoder: Any, data: Bytes, window: list[int] | None) -> Pixels | None:
    from nvidia import nvimgcodec

    try:
        stream = nvimgcodec.CodeStream(data)
    except RuntimeError:  # no format that it knows
        return None
    if window is not None:
        stream = stream.get_sub_code_stream(0, nvimgcodec.Region(*window))
    image = decoder.decode(stream)
    return None if image is None else np.asarray(image)
