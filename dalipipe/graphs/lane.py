"""A DALI pipeline and the queue that it is fed from."""

from __future__ import annotations

from collections import deque
from typing import Any, cast

from dalipipe.errors import PipelineError
from dalipipe.graphs.config import GraphConfig
from dalipipe.graphs.image import Backend, SizeHint, build_pipeline, input_names


class Lane:
    """Inputs go in with `push`, outputs come out of `run` in the same order, one a call, failed ones included.

    DALI calls its source from inside `run`, ahead of the outputs: `queue_depth` times before the first one, once for
    every later one. So that a source that waits or fails never does so inside DALI, the inputs are pushed before.
    """

    def __init__(
        self,
        graph: GraphConfig,
        backend: Backend,
        *,
        num_threads: int,
        queue_depth: int,
        device_id: int | None,
        hint: SizeHint = None,
    ) -> None:
        self._queue: deque[dict[str, Any]] = deque()
        self._demand = queue_depth
        self._names = input_names(graph, backend)
        self._device_id = device_id
        self._pipeline: Any
        self._pipeline, self._outputs = build_pipeline(
            self._pop, graph, backend, num_threads=num_threads, queue_depth=queue_depth, device_id=device_id, hint=hint
        )
        self._pipeline.build()

    @property
    def num_missing(self) -> int:
        """Inputs to push before `run` may be called."""
        return max(0, self._demand - len(self._queue))

    def push(self, inputs: dict[str, Any]) -> None:
        """Queues the inputs of one batch by name; see `build_pipeline`."""
        self._queue.append(inputs)

    def run(self) -> dict[str, Any]:
        """The outputs (DALI tensor lists) of the oldest batch by name; on a GPU ordered on torch's current stream.

        Raises:
            RuntimeError: DALI could not process that batch; the next call gives the next batch.
        """
        if self._device_id is None:
            stream = None
        else:
            import torch

            stream = torch.cuda.current_stream(self._device_id)
        self._demand = 1
        return dict(zip(self._outputs, self._pipeline.run(stream), strict=False))

    def close(self) -> None:
        """Ends DALI's threads and drops all inputs. Idempotent."""
        self._queue.clear()
        self._pipeline = None

    def _pop(self) -> tuple[Any, ...]:
        if not self._queue:
            raise PipelineError("DALI asked for more batches ahead than prefetch.queue_depth says; its version changed")
        inputs = self._queue.popleft()
        return tuple(inputs[name] for name in self._names)


def release_memory() -> None:
    """Gives what DALI's pools do not use back to the device, for other users of its memory."""
    from nvidia.dali import backend

    cast(Any, backend).ReleaseUnusedMemory()
