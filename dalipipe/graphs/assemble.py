"""The CPU's second half: decoded images to one batch, resized in our threads and normalised there or by DALI."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dalipipe.errors import ClosedError
from dalipipe.graphs.augment import strength_inputs
from dalipipe.graphs.buffers import Buffers
from dalipipe.graphs.config import GraphConfig
from dalipipe.graphs.crop import Windows
from dalipipe.graphs.image import build_normalize
from dalipipe.graphs.intake import Intake
from dalipipe.graphs.native import NativeResize, ResizeJob, Values, normalised
from dalipipe.graphs.resize import best_kernel, resize_window
from dalipipe.graphs.scaled import ScaledDecodeError, decode_scaled
from dalipipe.telemetry import Recorder, Stage

if TYPE_CHECKING:
    import torch

    from dalipipe.cache.decoded import DecodedSamples

Pixels = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Images:
    """Decoded windows: uint8 [h, w, 3] each, and begin and scale, float64 [b, 2], in their pixels."""

    pixels: list[Pixels]
    begin: npt.NDArray[np.float64]
    scale: npt.NDArray[np.float64]


class Assembler:
    """Makes image batches, one at a time.

    native: the kernel of ours, which also normalises where no colour operator stands between; None = torch resizes and
    DALI normalises. kept: where images that DALI decoded whole are put.
    """

    def __init__(
        self,
        graph: GraphConfig,
        *,
        num_threads: int,
        recorder: Recorder,
        native: NativeResize | None = None,
        kept: DecodedSamples | None = None,
    ) -> None:
        self._graph = graph
        self._native = native
        self._kept = kept
        self._num_threads = num_threads
        self._recorder = recorder
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="dalipipe-resize")
        self._stop = threading.Event()
        self._job: ResizeJob | None = None
        self._levels = Buffers()
        self._batches = Buffers()
        self._inputs: tuple[Any, ...] = ()
        self._normalize: Any = None
        self._values: Values | None = None
        if native is not None and not strength_inputs(graph):
            self._values = normalised(graph.dtype, graph.mean, graph.std)
        else:
            self._normalize = build_normalize(self._take, graph, num_threads=num_threads)
            self._normalize.build()
        if native is None:
            best_kernel()

    def assemble(self, decoded: Any, intake: Intake, fed: Sequence[int]) -> torch.Tensor:
        """Resizes and normalises the b images of a step.

        Args:
            decoded: the outputs of the lane: the rows of `fed` as uint8 HWC; None where there are none.
            fed: rows that DALI decoded, in order; the others were decoded before, or are JPEGs that are decoded here,
                at a scale.

        Returns: [b, 3, size, size] in the dtype and memory layout of the graph; a buffer of its own.

        Raises:
            ScaledDecodeError: names the rows that did not decode at a scale.
        """
        windows = intake.windows
        assert windows is not None
        images = self._images(decoded, intake, fed, windows)
        self._recorder.add(f"resized.{'torch' if self._native is None else self._native.name}", len(images.pixels))
        if self._values is not None:
            return self._finished(images, windows.mirror)
        return self._normalised(self._resized(images), intake, windows)

    def stop(self) -> None:
        """Makes a batch in work end soon with ClosedError. From any thread."""
        self._stop.set()
        job = self._job
        if job is not None:
            job.stop()

    def close(self) -> None:
        """Ends all threads. Nothing may be in work. Idempotent."""
        self._stop.set()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._normalize = None
        self._levels = self._batches = Buffers()

    def _images(self, decoded: Any, intake: Intake, fed: Sequence[int], windows: Windows) -> _Images:
        """The decoded window of each row."""
        num = len(windows.mirror)
        pixels = {row: self._window(np.asarray(decoded["image"][place]), intake, row) for place, row in enumerate(fed)}
        for row in set(range(num)) - set(pixels):
            if int(intake.ids[row]) in intake.found:
                pixels[row] = _cut(intake.found[int(intake.ids[row])], windows, row)
        scaled = [row for row in range(num) if row not in pixels]
        reduce, failed = np.ones((num, 1), np.int32), []
        for row, image in zip(
            scaled, self._pool.map(lambda row: self._scaled(intake, windows, row), scaled), strict=True
        ):
            if image is None:
                failed.append(row)
            else:
                pixels[row], reduce[row] = image, windows.reduce[row]
        self._check_open()
        if failed:
            raise ScaledDecodeError(failed)
        begin, scale = windows.begin / reduce, windows.scale / reduce
        return _Images(pixels=[pixels[row] for row in range(num)], begin=begin, scale=scale)

    def _window(self, image: Pixels, intake: Intake, row: int) -> Pixels:
        """The window out of what DALI decoded, which is that window or the whole image."""
        if not intake.in_full:
            return image
        assert intake.windows is not None
        if self._kept is not None:
            self._kept.keep(int(intake.ids[row]), image)
        return _cut(image, intake.windows, row)

    def _scaled(self, intake: Intake, windows: Windows, row: int) -> Pixels | None:
        """The decoded window of a JPEG at its scale; None where that fails."""
        start, shape = windows.start[row].tolist(), windows.shape[row].tolist()
        if self._stop.is_set():
            return None
        with self._recorder.span(Stage.RESIZE):
            try:
                return decode_scaled(intake.images[row], int(windows.reduce[row]), start, shape).numpy()
            except (ValueError, OSError, SyntaxError):
                return None

    def _finished(self, images: _Images, mirror: npt.NDArray[np.int32]) -> torch.Tensor:
        """The whole second half in one pass of our kernel."""
        import torch

        num, size, nchw = len(images.pixels), self._graph.size, self._graph.layout == "NCHW"
        batch = self._batches.take((num, 3, size, size) if nchw else (num, size, size, 3), self._graph.dtype)
        self._run(images, batch if nchw else batch.transpose(0, 3, 1, 2), mirror, self._values)
        tensor = torch.from_numpy(batch)
        return tensor if nchw else tensor.permute(0, 3, 1, 2)

    def _resized(self, images: _Images) -> Pixels:
        """The resized windows before they are mirrored: uint8 [b, size, size, 3]."""
        num, size = len(images.pixels), self._graph.size
        levels = self._levels.take((num, size, size, 3), np.uint8)
        if self._native is None:
            self._resize_by_torch(images, levels)
        else:
            self._run(images, levels.transpose(0, 3, 1, 2), np.zeros(num, np.int32), None)
        return levels

    def _run(
        self, images: _Images, out: npt.NDArray[Any], mirror: npt.NDArray[np.int32], values: Values | None
    ) -> None:
        assert self._native is not None
        job = self._native.job(images.pixels, out, begin=images.begin, scale=images.scale, mirror=mirror, values=values)
        self._job = job
        if self._stop.is_set():
            job.stop()

        def work() -> None:
            with self._recorder.span(Stage.RESIZE):
                job.run()

        self._in_all_threads(work, len(images.pixels))
        self._job = None

    def _resize_by_torch(self, images: _Images, levels: Pixels) -> None:
        import torch

        out = torch.from_numpy(levels)
        # The threads take rows from one counter: no task is longer than an image, and none costs a future.
        rows = itertools.count()

        def work() -> None:
            with self._recorder.span(Stage.RESIZE), torch.inference_mode():
                while (row := next(rows)) < len(out) and not self._stop.is_set():
                    image = images.pixels[row]
                    # A part of an image that was kept: torch takes no read-only memory, and the window contiguous.
                    whole = image.flags.writeable and image.flags.c_contiguous
                    pixels = torch.from_numpy(image if whole else image.copy())
                    resize_window(pixels, out[row], images.begin[row].tolist(), images.scale[row].tolist())

        self._in_all_threads(work, len(out))

    def _in_all_threads(self, work: Callable[[], None], num: int) -> None:
        for future in [self._pool.submit(work) for _ in range(min(self._num_threads, num))]:
            future.result()
        self._check_open()

    def _check_open(self) -> None:
        if self._stop.is_set():
            raise ClosedError("the source was closed while it assembled a batch")

    def _normalised(self, levels: Pixels, intake: Intake, windows: Windows) -> torch.Tensor:
        from torch.utils.dlpack import from_dlpack

        with self._recorder.span(Stage.NORMALIZE):
            self._inputs = (levels, windows.mirror, *intake.strengths.values())
            output = self._normalize.run()[0]
            batch = from_dlpack(output.as_tensor())
        return batch if self._graph.layout == "NCHW" else batch.permute(0, 3, 1, 2)

    def _take(self) -> tuple[Any, ...]:
        inputs, self._inputs = self._inputs, ()
        return inputs


def _cut(image: Pixels, windows: Windows, row: int) -> Pixels:
    """The window of a whole image, a view."""
    (top, left), (height, width) = windows.start[row].tolist(), windows.shape[row].tolist()
    return image[top : top + height, left : left + width]
