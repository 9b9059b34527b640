"""What ranks must agree on before they may load: who sits on which slots of the global batch."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt


class Coordinator(Protocol):
    """Agreement between the ranks of a job. Never changes *what* is trained on, only who loads it."""

    def slots(self, batch_size: int) -> npt.NDArray[np.int64]:
        """int64 [batch_size / world_size], ascending: the slots of every global batch that this rank loads.

        The slots of all ranks partition [0, batch_size).

        Raises:
            ConfigError: the batch cannot be divided among the ranks; names the nearest sizes that can.
        """

    def close(self) -> None:
        """Leaves the agreement. Idempotent."""
