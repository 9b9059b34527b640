"""What the loader takes batches from: a local DALI graph, a remote service, or synthetic data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The decoded batch of one rank and step.

    tensors: by field of the batch; always `id` (int64 [b]); `image` in the layout and dtype of the graph
    (`image_raw`: a list of b uint8 [h, w, 3] tensors);
    `valid` (bool [b]) only where the tail is padded. near_at: when the step's bytes were all near, on the clock of
    time.perf_counter(), so that a wait can be charged to what the batch lacked.
    """

    epoch: int
    step: int
    tensors: dict[str, Any]
    near_at: float = 0.0


class BatchSource(Protocol):
    """An endless iterator of batches in the order of the steps."""

    def __iter__(self) -> BatchSource: ...

    def __next__(self) -> Batch:
        """The next batch. Raises what the prefetcher raises, and QuarantineError when too many samples are bad."""

    def close(self) -> None:
        """Frees threads, pipelines and views within 2 s. Idempotent."""
