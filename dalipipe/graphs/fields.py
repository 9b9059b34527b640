"""The fields of a batch that are not pixels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from dalipipe.errors import CorruptSampleError
from dalipipe.order.step import Bytes

if TYPE_CHECKING:
    import torch


def label_tensor(views: Sequence[Bytes], ids: npt.NDArray[np.int64]) -> torch.Tensor:
    """int64 [b] from labels as ASCII decimals.

    Raises:
        CorruptSampleError: a label is not an integer of 64 bits; names the sample id.
    """
    import torch

    labels = np.empty(len(views), np.int64)
    for row, view in enumerate(views):
        text = view.tobytes()
        try:
            labels[row] = int(text)
        except (ValueError, OverflowError):
            raise CorruptSampleError(
                f"label of sample {int(ids[row])} is {text[:40]!r}, not an integer; mend the data set, or leave "
                "`label` out of data.fields"
            ) from None
    return torch.from_numpy(labels)


def bytes_tensors(name: str, views: Sequence[Bytes]) -> dict[str, torch.Tensor]:
    """`name`: uint8 [total], all samples one after the other; `name_offsets`: int64 [b + 1], where each begins."""
    import torch

    offsets = np.zeros(len(views) + 1, np.int64)
    np.cumsum([len(view) for view in views], out=offsets[1:])
    joined = np.concatenate(views) if views else np.empty(0, np.uint8)
    return {name: torch.from_numpy(joined), f"{name}_offsets": torch.from_numpy(offsets)}
