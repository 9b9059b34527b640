"""Where the device tier's memory comes from: torch's caching allocator on a card, host memory in its twin."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from dalipipe.graphs.config import GraphConfig
from dalipipe.graphs.device.arena import Memory
from dalipipe.graphs.device.kernel import CudaKernel, Table, finish_on_host

if TYPE_CHECKING:
    import torch

# What must stay free of the card's memory, as a share: room for a model whose need varies.
_HEADROOM = 0.1


class Device(Memory, Protocol):
    """Memory, and what makes a batch of images that lie in it."""

    def finish(self, images: Sequence[Any], table: Table) -> torch.Tensor:
        """The batch of a table's rows; see `kernel.finish_on_host`. Raises MemoryError."""

    def order(self) -> None:
        """Makes the work to come wait for the work so far, where it is on another stream."""

    def mark(self) -> None:
        """Notes the end of the work so far."""


class HostTwin:
    """The device tier without a device, over host memory: for tests.

    limit_bytes: beyond it memory has run out. short_bytes: beyond it others lack some. others_bytes: what they take.
    """

    def __init__(self, graph: GraphConfig, *, limit_bytes: int = 2**40, short_bytes: int = 2**40) -> None:
        self._graph = graph
        self.limit_bytes = limit_bytes
        self.short_bytes = short_bytes
        self.others_bytes = 0
        self.taken_bytes = 0
        self.num_given_back = 0

    def allocate(self, num_bytes: int) -> Any:
        """A piece of host memory."""
        import weakref

        import torch

        if self.taken_bytes + self.others_bytes + num_bytes > self.limit_bytes:
            raise MemoryError(f"simulated: no room for {num_bytes} bytes")
        piece = torch.empty(num_bytes, dtype=torch.uint8)
        self.taken_bytes += num_bytes
        weakref.finalize(piece, self._freed, num_bytes)
        return piece

    def is_short(self, num_bytes: int) -> bool:
        """Whether pieces and others would be beyond `short_bytes`."""
        return self.taken_bytes + self.others_bytes + num_bytes > self.short_bytes

    def give_back(self) -> None:
        """Counts."""
        self.num_given_back += 1

    def finish(self, images: Sequence[Any], table: Table) -> torch.Tensor:
        """The batch, in host memory. Raises MemoryError where others have it all."""
        if self.taken_bytes + self.others_bytes > self.limit_bytes:
            raise MemoryError("simulated: no room for a batch")
        return finish_on_host(images, table, self._graph)

    def order(self) -> None:
        """Nothing runs behind the caller's back."""

    def mark(self) -> None:
        """Nothing runs behind the caller's back."""

    def _freed(self, num_bytes: int) -> None:
        self.taken_bytes -= num_bytes


class CudaDevice:
    """A card. CuPy takes what it needs from torch's caching allocator, so that there is one pool. Not yet run on one.

    Raises:
        ImportError: CuPy is not installed.
    """

    def __init__(self, graph: GraphConfig, device_id: int) -> None:
        import cupy
        import torch

        self._graph = graph
        self._device_id = device_id
        self._kernel = CudaKernel(graph, device_id)
        self._allocator = cupy.cuda.PythonFunctionAllocator(_torch_allocate, _torch_free)
        self._total_bytes = torch.cuda.mem_get_info(device_id)[1]
        self._last: torch.cuda.Event | None = None

    def allocate(self, num_bytes: int) -> Any:
        """A piece of the card's memory, as a tensor over CuPy's array."""
        return self._empty((num_bytes,), "uint8")

    def is_short(self, num_bytes: int) -> bool:
        """Whether less than a tenth of the card would be free: what the driver has, and what torch has to spare."""
        import torch

        free_bytes = torch.cuda.mem_get_info(self._device_id)[0]
        spare_bytes = torch.cuda.memory_reserved(self._device_id) - torch.cuda.memory_allocated(self._device_id)
        return bool(free_bytes + spare_bytes - num_bytes < _HEADROOM * self._total_bytes)

    def give_back(self) -> None:
        """Empties torch's cache: freed pieces belong to this stream's pool until then."""
        import torch

        torch.cuda.empty_cache()

    def finish(self, images: Sequence[Any], table: Table) -> torch.Tensor:
        """The batch, in the card's memory, handed over by DLPack."""
        size, num = self._graph.size, len(images)
        shape = (num, 3, size, size) if self._graph.layout == "NCHW" else (num, size, size, 3)
        batch = self._empty(shape, self._graph.dtype)
        self._kernel.finish(images, table, batch)
        return batch if self._graph.layout == "NCHW" else batch.permute(0, 3, 1, 2)

    def order(self) -> None:
        """Makes torch's current stream wait for the last mark."""
        import torch

        if self._last is not None:
            torch.cuda.current_stream(self._device_id).wait_event(self._last)

    def mark(self) -> None:
        """Records an event on torch's current stream."""
        import torch

        self._last = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._last.record(torch.cuda.current_stream(self._device_id))

    def _empty(self, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        import cupy
        import torch
        from torch.utils.dlpack import from_dlpack

        with _as_memory_error(), cupy.cuda.Device(self._device_id):
            stream = torch.cuda.current_stream(self._device_id).cuda_stream
            with (
                cupy.cuda.ExternalStream(stream, self._device_id),
                cupy.cuda.using_allocator(self._allocator.malloc),
            ):
                return from_dlpack(cupy.empty(shape, dtype))


@contextmanager
def _as_memory_error() -> Iterator[None]:
    import cupy
    import torch

    try:
        yield
    except (torch.cuda.OutOfMemoryError, cupy.cuda.memory.OutOfMemoryError) as error:
        raise MemoryError(str(error)) from error


def _torch_allocate(num_bytes: int, device_id: int) -> int:
    import torch

    # torch's own streams only: CuPy's current one is torch's where this package calls it.
    stream = torch.cuda.current_stream(device_id).cuda_stream
    return int(torch.cuda.caching_allocator_alloc(num_bytes, device_id, stream))


def _torch_free(pointer: int, _device_id: int) -> None:
    import torch

    torch.cuda.caching_allocator_delete(pointer)  # type: ignore[no-untyped-call]
