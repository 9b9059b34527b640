"""The encoded samples of one step of one rank: what a prefetcher fills and the graphs read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One encoded sample: its id, field bytes (uint8 [n] views, read-only) and size in pixels (0 = unknown)."""

    id: int
    fields: dict[str, Bytes]
    height: int = 0
    width: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The samples of this rank's slots in one global step.

    ids: int64 [b]. fields: name -> b views (uint8 [n], read-only, over cached blocks). sizes: int32 [b, 2] as
    (height, width) upright, 0 where the index does not know. valid: bool [b], False for padding (which repeats a
    real sample); a partial last step has fewer samples, on some ranks perhaps none.
    substitutes(i): the samples to use, in this order, when sample i is bad. release(): lets the views
    go; call it once the graph has dropped them.
    """

    epoch: int
    step: int
    ids: npt.NDArray[np.int64]
    fields: dict[str, list[Bytes]]
    sizes: npt.NDArray[np.int32]
    valid: npt.NDArray[np.bool_]
    substitutes: Callable[[int], Iterator[Sample]]
    release: Callable[[], None]


class Prefetcher(Protocol):
    """The moving window over the order. Endless: after the last step of an epoch comes the first of the next."""

    def next(self) -> Step:
        """Returns the next step, waiting for it at most the deadline.

        Raises:
            IntegrityError, StorageError, CacheError …: a block of this step could not be had; again at each call.
            PipelineError: a worker thread died; its exception is the cause.
            PipelineTimeoutError: the step did not arrive in time; names the blocks that are missing.
            ClosedError: `close` was called.
        """

    def close(self) -> None:
        """Ends and joins all threads within 2 s, also while one waits. Idempotent."""
