"""The CPU's second half: decoded images to one batch, resized in our threads and normalised by DALI."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from dalipipe.errors import ClosedError
from dalipipe.graphs.config import GraphConfig
from dalipipe.graphs.crop import Windows
from dalipipe.graphs.image import build_normalize
from dalipipe.graphs.intake import Intake
from dalipipe.graphs.resize import best_kernel, resize_into
from dalipipe.graphs.scaled import ScaledDecodeError, decode_scaled
from dalipipe.telemetry import Recorder, Stage

if TYPE_CHECKING:
    import torch

    from dalipipe.cache.decoded import DecodedSamples


class Assembler:
    """Makes image batches, one at a time; the uint8 buffer between the two steps is used again for each.

    kept: where images that DALI decoded whole are put.
    """

    def __init__(
        self, graph: GraphConfig, *, num_threads: int, recorder: Recorder, kept: DecodedSamples | None = None
    ) -> None:
        self._graph = graph
        self._kept = kept
        self._num_threads = num_threads
        self._recorder = recorder
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="dalipipe-resize")
        self._stop = threading.Event()
        self._buffer: torch.Tensor | None = None
        self._inputs: tuple[Any, ...] = ()
        self._normalize: Any = build_normalize(self._take, graph, num_threads=num_threads)
        self._normalize.build()
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
        from torch.utils.dlpack import from_dlpack

        assert intake.windows is not None
        images = {row: decoded["image"][place] for place, row in enumerate(fed)}
        pixels = self._resize(images, intake, intake.windows)
        with self._recorder.span(Stage.NORMALIZE):
            self._inputs = (pixels.numpy(), intake.windows.mirror, *intake.strengths.values())
            output = self._normalize.run()[0]
            batch = from_dlpack(output.as_tensor())
        return batch if self._graph.layout == "NCHW" else batch.permute(0, 3, 1, 2)

    def stop(self) -> None:
        """Makes a batch in work end soon with ClosedError. From any thread."""
        self._stop.set()

    def close(self) -> None:
        """Ends all threads. Nothing may be in work. Idempotent."""
        self._stop.set()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._normalize = None
        self._buffer = None

    def _take(self) -> tuple[Any, ...]:
        inputs, self._inputs = self._inputs, ()
        return inputs

    def _resize(self, images: dict[int, Any], intake: Intake, windows: Windows) -> torch.Tensor:
        import torch

        num, size = len(windows.mirror), self._graph.size
        if self._buffer is None or len(self._buffer) < num:
            self._buffer = torch.empty(num, size, size, 3, dtype=torch.uint8)
        pixels = self._buffer[:num]
        # The threads take rows from one counter: no task is longer than an image, and none costs a future.
        rows = itertools.count()
        failed: list[int] = []

        def work() -> None:
            with self._recorder.span(Stage.RESIZE), torch.inference_mode():
                while (row := next(rows)) < num and not self._stop.is_set():
                    image, factor = self._window(images, intake, windows, row)
                    if image is None:
                        failed.append(row)
                        continue
                    scale = windows.scale[row] / factor
                    self._resize_one(image, pixels[row], windows, row, scale.tolist())

        for future in [self._pool.submit(work) for _ in range(min(self._num_threads, num))]:
            future.result()
        if self._stop.is_set():
            raise ClosedError("the source was closed while it assembled a batch")
        if failed:
            raise ScaledDecodeError(sorted(failed))
        return pixels

    def _window(
        self, images: dict[int, Any], intake: Intake, windows: Windows, row: int
    ) -> tuple[torch.Tensor | None, int]:
        """The decoded window of a row, and by how much it is smaller; None for a JPEG that fails at its scale."""
        import torch

        sample_id = int(intake.ids[row])
        (top, left), (height, width) = windows.start[row].tolist(), windows.shape[row].tolist()
        window = (slice(top, top + height), slice(left, left + width))
        if sample_id in intake.found:
            # A copy: torch takes no read-only memory, and the window must be contiguous.
            return torch.from_numpy(intake.found[sample_id][window].copy()), 1
        if row not in images:
            return self._scaled(intake, windows, row), int(windows.reduce[row])
        image = _tensor(images[row])
        if not intake.in_full:
            return image, 1
        if self._kept is not None:
            self._kept.keep(sample_id, image.numpy())
        return image[window].contiguous(), 1

    def _scaled(self, intake: Intake, windows: Windows, row: int) -> torch.Tensor | None:
        start, shape = windows.start[row].tolist(), windows.shape[row].tolist()
        try:
            return decode_scaled(intake.images[row], int(windows.reduce[row]), start, shape)
        except (ValueError, OSError, SyntaxError):
            return None

    def _resize_one(
        self, image: torch.Tensor, out: torch.Tensor, windows: Windows, row: int, scale: list[float]
    ) -> None:
        import torch

        size = self._graph.size
        if self._graph.name != "image_eval":
            resize_into(image, out)
            return
        top, left = windows.corner[row].tolist()
        down, right = scale
        resized = torch.empty(*windows.resized[row].tolist(), 3, dtype=torch.uint8)
        resize_into(image, resized, (down, right))
        out.copy_(resized[top : top + size, left : left + size])


def _tensor(decoded: Any) -> torch.Tensor:
    from torch.utils.dlpack import from_dlpack

    return from_dlpack(decoded)
