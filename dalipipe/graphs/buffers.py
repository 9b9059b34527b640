"""Memory for batches that is used again once nobody holds the batch any more.

A batch of 64 float32 images is 38 MB: fresh memory of that size comes from the kernel page by page, which costs about
as much as writing the pixels.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

_MAX_FREE = 4
_ALIGNMENT_BYTES = 64

Memory = npt.NDArray[np.uint8]


class Buffers:
    """Gives arrays out; their memory comes back when the last view of it, a tensor for example, is gone."""

    def __init__(self) -> None:
        self._free: deque[Memory] = deque(maxlen=_MAX_FREE)

    def take(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """An array of any content, contiguous and aligned to 64 bytes."""
        num_bytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        memory = self._fetch(max(num_bytes, 1))
        lent = np.asarray(_Lent(memory, self._free))
        return lent[:num_bytes].view(dtype).reshape(shape)

    def _fetch(self, num_bytes: int) -> Memory:
        while True:
            try:
                memory = self._free.pop()
            except IndexError:
                break
            if len(memory) >= num_bytes:
                return memory
            # Too small: a smaller batch came first, and it would only be in the way.
        room = np.empty(num_bytes + _ALIGNMENT_BYTES, np.uint8)
        return room[-room.ctypes.data % _ALIGNMENT_BYTES :][:num_bytes]


class _Lent:
    """What every view of the memory holds."""

    def __init__(self, memory: Memory, free: deque[Memory]) -> None:
        self._memory = memory
        self._free = free
        self.__array_interface__ = memory.__array_interface__

    def __del__(self) -> None:
        self._free.append(self._memory)
