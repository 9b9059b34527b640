"""The kernel that makes a batch of kept images: gather, crop, antialiased bilinear resize, flip, normalise.

One thread a pixel of the output. The filter is that of PIL's and torch's antialiased BILINEAR, which the CPU path uses:
a triangle of half-width max(scale, 1) source pixels around the centre of the output pixel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dalipipe.graphs.config import GraphConfig
from dalipipe.graphs.crop import Windows

if TYPE_CHECKING:
    import torch

NAME = "dalipipe_finish"
_TYPES = {"float32": "float", "float16": "__half", "uint8": "unsigned char"}
_BLOCK = (32, 8, 1)

_SOURCE = """
@INCLUDE@
__device__ inline float triangle(float x) { x = x < 0.0f ? -x : x; return x < 1.0f ? 1.0f - x : 0.0f; }

extern "C" __global__ void @NAME@(
    const unsigned long long* images, const int* windows, const float* factors, @OUT@* out,
    int num, int size, long long plane, long long row, long long column,
    float mean0, float mean1, float mean2, float inverse0, float inverse1, float inverse2) {
  const int x = blockIdx.x * blockDim.x + threadIdx.x;
  const int y = blockIdx.y * blockDim.y + threadIdx.y;
  const int n = blockIdx.z;
  if (x >= size || y >= size || n >= num) return;
  const unsigned char* image = (const unsigned char*)images[n];
  const int* window = windows + 8 * n;
  const int width = window[0], top = window[1], left = window[2], rows = window[3], columns = window[4];
  const float down = factors[2 * n], right = factors[2 * n + 1];
  const float reach_y = down > 1.0f ? down : 1.0f, reach_x = right > 1.0f ? right : 1.0f;
  const float centre_y = (window[5] + y + 0.5f) * down;
  const float centre_x = (window[6] + x + 0.5f) * right;
  int first_y = (int)(centre_y - reach_y + 0.5f), last_y = (int)(centre_y + reach_y + 0.5f);
  int first_x = (int)(centre_x - reach_x + 0.5f), last_x = (int)(centre_x + reach_x + 0.5f);
  first_y = first_y < 0 ? 0 : first_y;
  first_x = first_x < 0 ? 0 : first_x;
  last_y = last_y > rows ? rows : last_y;
  last_x = last_x > columns ? columns : last_x;
  float sum[3] = {0.0f, 0.0f, 0.0f}, total = 0.0f;
  for (int i = first_y; i < last_y; ++i) {
    const float weight_y = triangle((i - centre_y + 0.5f) / reach_y);
    const unsigned char* line = image + ((long long)(top + i) * width + left) * 3;
    for (int j = first_x; j < last_x; ++j) {
      const float weight = weight_y * triangle((j - centre_x + 0.5f) / reach_x);
      total += weight;
      for (int c = 0; c < 3; ++c) sum[c] += weight * line[3 * j + c];
    }
  }
  const float mean[3] = {mean0, mean1, mean2}, inverse[3] = {inverse0, inverse1, inverse2};
  @OUT@* target = out + (long long)n * 3 * size * size + y * row + (window[7] ? size - 1 - x : x) * column;
  for (int c = 0; c < 3; ++c) {
    float level = total > 0.0f ? floorf(sum[c] / total + 0.5f) : 0.0f;
    level = level > 255.0f ? 255.0f : level;
    target[c * plane] = (@OUT@)((level - mean[c]) * inverse[c]);
  }
}
"""


def source(dtype: str) -> str:
    """The kernel in CUDA C++ for a batch of `dtype` (`float32`, `float16` or `uint8`)."""
    include = "#include <cuda_fp16.h>" if dtype == "float16" else ""
    return _SOURCE.replace("@INCLUDE@", include).replace("@NAME@", NAME).replace("@OUT@", _TYPES[dtype])


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """What the kernel is told of each of n rows.

    windows: int32 [n, 8], width of the image, top, left, rows and columns of the window, corner of the output in the
    resized window (row, column), mirror. factors: float32 [n, 2], source pixels per output pixel.
    """

    windows: npt.NDArray[np.int32]
    factors: npt.NDArray[np.float32]


def make_table(windows: Windows, widths: Sequence[int]) -> Table:
    """The table of a batch. widths: of the whole images, in pixels."""
    corner = np.rint(windows.begin / windows.scale)
    columns = [np.asarray(widths, np.int32)[:, None], windows.start, windows.shape, corner]
    joined = np.concatenate([*columns, windows.mirror[:, None]], axis=1).astype(np.int32)
    return Table(windows=np.ascontiguousarray(joined), factors=np.ascontiguousarray(windows.scale, np.float32))


def normalisation(graph: GraphConfig) -> tuple[list[float], list[float]]:
    """Mean and 1 / std of each channel; none for uint8."""
    if graph.dtype == "uint8":
        return [0.0] * 3, [1.0] * 3
    return [float(value) for value in graph.mean], [1 / value for value in graph.std]


def strides(graph: GraphConfig) -> tuple[int, int, int]:
    """Elements from one channel, row and column of an output image to the next."""
    return (graph.size**2, graph.size, 1) if graph.layout == "NCHW" else (1, 3 * graph.size, 3)


def filter_weights(num: int, corner: int, scale: float, side: int) -> npt.NDArray[np.float32]:
    """The kernel's filter along one side as a matrix: float32 [num, side], rows sum to 1 where they see anything."""
    centre = ((corner + np.arange(num, dtype=np.float32) + np.float32(0.5)) * np.float32(scale)).astype(np.float32)
    reach = np.float32(max(scale, 1.0))
    first = np.maximum((centre - reach + np.float32(0.5)).astype(np.int32), 0)
    last = np.minimum((centre + reach + np.float32(0.5)).astype(np.int32), side)
    pixels = np.arange(side)
    weights = np.maximum(1 - np.abs((pixels - centre[:, None] + np.float32(0.5)) / reach), 0).astype(np.float32)
    weights[(pixels < first[:, None]) | (pixels >= last[:, None])] = 0
    total = weights.sum(axis=1, keepdims=True)
    normalised: npt.NDArray[np.float32] = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)
    return normalised


def finish_on_host(images: Sequence[Any], table: Table, graph: GraphConfig) -> torch.Tensor:
    """The kernel's twin over host memory. images: n flat uint8 tensors, each of a whole image.

    Returns: [n, 3, size, size] in the dtype and memory layout of `graph`.
    """
    import torch

    size = graph.size
    levels = np.empty((len(images), size, size, 3), np.float32)
    for row, image in enumerate(images):
        width, top, left, rows, columns, down, right, mirror = table.windows[row].tolist()
        pixels = image.numpy().reshape(-1, width, 3)[top : top + rows, left : left + columns].astype(np.float32)
        vertical = filter_weights(size, down, float(table.factors[row, 0]), rows)
        horizontal = filter_weights(size, right, float(table.factors[row, 1]), columns)
        found = np.einsum("yi,ijc,xj->yxc", vertical, pixels, horizontal, optimize=True)
        found = np.clip(np.floor(found + 0.5), 0, 255)
        levels[row] = found[:, ::-1] if mirror else found
    mean, inverse = (np.asarray(values, np.float32) for values in normalisation(graph))
    batch = torch.from_numpy((levels - mean) * inverse).to(getattr(torch, graph.dtype)).permute(0, 3, 1, 2)
    return batch.contiguous() if graph.layout == "NCHW" else batch


class CudaKernel:
    """The kernel on a card, compiled by CuPy on first use and run on torch's current stream. Not yet run on one."""

    def __init__(self, graph: GraphConfig, device_id: int) -> None:
        import cupy

        self._graph = graph
        self._device_id = device_id
        self._kernel = cupy.RawKernel(source(graph.dtype), NAME)

    def finish(self, images: Sequence[Any], table: Table, out: torch.Tensor) -> None:
        """As `finish_on_host`, into `out`, memory of the card. The images must live until the stream has come by."""
        import cupy
        import torch

        def upload(array: npt.NDArray[Any]) -> torch.Tensor:
            return torch.from_numpy(array).pin_memory().to(out.device, non_blocking=True)

        pointers = upload(np.array([image.data_ptr() for image in images], np.int64))
        windows, factors = upload(table.windows), upload(table.factors)
        size, num = self._graph.size, len(images)
        mean, inverse = normalisation(self._graph)
        grid = (-(-size // _BLOCK[0]), -(-size // _BLOCK[1]), num)
        stream = torch.cuda.current_stream(self._device_id)
        with cupy.cuda.Device(self._device_id), cupy.cuda.ExternalStream(stream.cuda_stream, self._device_id):
            self._kernel(
                grid,
                _BLOCK,
                (
                    pointers.data_ptr(),
                    windows.data_ptr(),
                    factors.data_ptr(),
                    out.data_ptr(),
                    np.int32(num),
                    np.int32(size),
                    *(np.int64(stride) for stride in strides(self._graph)),
                    *(np.float32(value) for value in (*mean, *inverse)),
                ),
            )
