"""The binding of `resize.c`: checks everything before the call, holds the interpreter's lock for none of the work."""

from __future__ import annotations

import ctypes
import functools
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

_log = logging.getLogger(__name__)

LIBRARY: Final = Path(__file__).with_name("libresize.so")
_SOURCE: Final = "resize.c"
_VERSION = 1
PATHS: Final = ("plain", "sse4.1", "avx2")
"""The ways through the kernel, slowest first; they give the same bits."""

# The structures of resize.c.
_TASK = np.dtype(
    [
        ("pixels", "u8"), ("height", "i8"), ("width", "i8"), ("stride", "i8"), ("top", "f8"), ("left", "f8"),
        ("down", "f8"), ("right", "f8"), ("out", "u8"), ("mirror", "i8"),
    ]
)  # fmt: skip
_TARGET = np.dtype(
    [
        ("height", "i8"), ("width", "i8"), ("row", "i8"), ("column", "i8"), ("channel", "i8"), ("item_bytes", "i8"),
        ("table", "u8"), ("floats", "i8"), ("mean", "f4", 3), ("inverse", "f4", 3),
    ]
)  # fmt: skip
_MAX_SIDE = 2**20
# A window's end is a sum of products; what rounding adds to it is far below this, in pixels.
_TOLERANCE = 1e-6

Levels = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class Values:
    """What becomes of the levels of each channel.

    table: float32, float16 or uint8 [3, 256]. mean, inverse: float32 [3], with which the table of a float type is
    (level - mean) * inverse, computed in single precision.
    """

    table: npt.NDArray[Any]
    mean: npt.NDArray[np.float32]
    inverse: npt.NDArray[np.float32]


def normalised(dtype: str, mean: Sequence[float], std: Sequence[float]) -> Values:
    """The values of `crop_mirror_normalize`, bit for bit; for uint8 the levels, which are not normalised.

    dtype: `float32`, `float16` or `uint8`. mean, std: per channel, in levels.
    """
    centre, inverse = np.asarray(mean, np.float32), np.float32(1) / np.asarray(std, np.float32)
    levels = np.arange(256, dtype=np.float32)
    if dtype == "uint8":
        table: npt.NDArray[Any] = np.tile(levels.astype(np.uint8), (3, 1))
    else:
        table = ((levels - centre[:, None]) * inverse[:, None]).astype(dtype)
    return Values(table=table, mean=centre, inverse=inverse)


class NativeResize:
    """The kernel of a library, on one of the paths that this CPU has."""

    def __init__(self, library: ctypes.CDLL, path: int) -> None:
        self.name = f"native {PATHS[path]}"
        self._path = path
        self._library = library
        self._scratch = threading.local()

    def job(
        self,
        images: Sequence[Any],
        out: npt.NDArray[Any],
        *,
        begin: npt.NDArray[np.float64],
        scale: npt.NDArray[np.float64],
        mirror: npt.NDArray[np.int32],
        values: Values | None,
    ) -> ResizeJob:
        """The resize of b windows into a batch, to be run by as many threads as one likes.

        Args:
            images: b uint8 [h, w, 3] with an `__array_interface__`, pixels of a row side by side. They are held.
            out: [b, 3, H, W] in any order of the axes, aligned; written to.
            begin: float64 [b, 2], row and column where the output begins, in pixels of the image.
            scale: float64 [b, 2], source pixels per output pixel.
            mirror: int32 [b], 1 = flip left and right.
            values: what is written for a level, in out's dtype; None = the level, into uint8 whose channels lie side by
                side.

        Raises:
            ValueError: something has another shape, dtype or memory layout, or a window leaves its image.
        """
        tasks = np.zeros(len(images), _TASK)
        for row, image in enumerate(images):
            tasks[row] = (*_memory(image, row), 0.0, 0.0, 0.0, 0.0, 0, 0)
        target = _target(out, values)
        _check_windows(tasks, begin, scale, mirror, out)
        tasks["top"], tasks["left"] = begin.T
        tasks["down"], tasks["right"] = scale.T
        tasks["out"] = out.ctypes.data + np.arange(len(out)) * out.strides[0]
        tasks["mirror"] = mirror
        return ResizeJob(self, tasks, target, (images, out, values))

    def scratch_bytes(self, tasks: npt.NDArray[Any], target: npt.NDArray[Any]) -> int:
        """What one thread needs for any of the tasks."""
        return int(self._library.dalipipe_resize_scratch(tasks.ctypes.data, len(tasks), target.ctypes.data))

    def run(self, job: ResizeJob) -> None:
        """Takes windows of the job until there are none or it is stopped; other threads may do the same."""
        self._library.dalipipe_resize(
            job.tasks.ctypes.data,
            len(job.tasks),
            job.target.ctypes.data,
            job.counters.ctypes.data,
            job.counters[1:].ctypes.data,
            self._address(job.scratch_bytes),
            self._path,
        )

    def _address(self, num_bytes: int) -> int:
        """This thread's scratch, which grows and is kept."""
        held: Levels | None = getattr(self._scratch, "held", None)
        if held is None or len(held) < num_bytes + 64:
            held = self._scratch.held = np.empty(num_bytes + 64, np.uint8)
        return -(-held.ctypes.data // 64) * 64


class ResizeJob:
    """Windows to be resized, and who took which so far."""

    def __init__(
        self, kernel: NativeResize, tasks: npt.NDArray[Any], target: npt.NDArray[Any], held: tuple[Any, ...]
    ) -> None:
        self.tasks = tasks
        self.target = target
        self.counters = np.zeros(2, np.int64)  # the next window, and whether to stop
        self.scratch_bytes = kernel.scratch_bytes(tasks, target)
        self._kernel = kernel
        self._held = held

    def run(self) -> None:
        """Works until no window is left. From any number of threads at once; all of them must have come back."""
        self._kernel.run(self)

    def stop(self) -> None:
        """No further window is begun. From any thread."""
        self.counters[1] = 1


@functools.cache
def load_native(file: Path = LIBRARY, path: int | None = None) -> NativeResize | None:
    """The kernel, where it was built when this package was installed and its version is the one of this module.

    path: index in `PATHS`; None = the fastest of this CPU, which also bounds it.
    """
    try:
        library = ctypes.CDLL(str(file))
        version, best = library.dalipipe_resize_version, library.dalipipe_resize_path
        version.restype = best.restype = ctypes.c_int64
        if version() != _VERSION:
            _log.warning("%s is version %d of the resize kernel, not %d: install again", file, version(), _VERSION)
            return None
        source = file.with_name(_SOURCE)  # beside an editable install alone
        if source.exists() and source.stat().st_mtime > file.stat().st_mtime:
            _log.warning("%s is older than %s: run `make setup`, or `python hatch_build.py`", file, _SOURCE)
        address, number = ctypes.c_void_p, ctypes.c_int64
        library.dalipipe_resize_scratch.argtypes = [address, number, address]
        library.dalipipe_resize_scratch.restype = number
        library.dalipipe_resize.argtypes = [address, number, address, address, address, address, number]
        library.dalipipe_resize.restype = None
    except (OSError, AttributeError) as error:
        _log.info("no native resize kernel: %s", error)
        return None
    fastest = int(best())
    return NativeResize(library, fastest if path is None else min(path, fastest))


def _memory(image: Any, row: int) -> tuple[int, int, int, int]:
    """Address, height, width and bytes from row to row."""
    memory = image.__array_interface__
    shape, strides = memory["shape"], memory.get("strides")
    if len(shape) != 3 or shape[2] != 3 or memory["typestr"] != "|u1" or not 0 < min(shape) <= max(shape) <= _MAX_SIDE:
        raise ValueError(f"image {row} is {memory['typestr']} {shape}, not uint8 [h, w, 3]")
    stride = 3 * shape[1] if strides is None else strides[0]
    if stride < 3 * shape[1] or (strides is not None and strides[1:] != (3, 1)):
        raise ValueError(f"image {row} of {shape} has strides {strides}: its pixels do not lie side by side")
    return memory["data"][0], shape[0], shape[1], stride


def _target(out: npt.NDArray[Any], values: Values | None) -> npt.NDArray[Any]:
    """The structure Target of resize.c."""
    if out.ndim != 4 or out.shape[1] != 3 or not out.flags.writeable or not out.flags.aligned or min(out.strides) < 1:
        raise ValueError(f"the batch {out.dtype} {out.shape} with strides {out.strides} is not a writable [b, 3, H, W]")
    target = np.zeros(1, _TARGET)
    target["height"], target["width"] = out.shape[2:]
    _, target["channel"], target["row"], target["column"] = out.strides
    target["item_bytes"] = out.itemsize
    if values is None:
        if out.dtype != np.uint8 or out.strides[1] != 1 or out.strides[3] != 3:
            raise ValueError(f"levels go into uint8 whose channels lie side by side, not {out.dtype} {out.strides}")
        return target
    table = values.table
    if table.shape != (3, 256) or table.dtype != out.dtype or not table.flags.c_contiguous or out.itemsize > 4:
        raise ValueError(f"the table is {table.dtype} {table.shape}, not {out.dtype} [3, 256] of at most 4 bytes")
    target["table"], target["floats"] = table.ctypes.data, out.dtype.kind == "f"
    target["mean"], target["inverse"] = values.mean, values.inverse
    return target


def _check_windows(
    tasks: npt.NDArray[Any],
    begin: npt.NDArray[np.float64],
    scale: npt.NDArray[np.float64],
    mirror: npt.NDArray[np.int32],
    out: npt.NDArray[Any],
) -> None:
    num = len(out)
    if not (len(tasks) == num and begin.shape == scale.shape == (num, 2) and mirror.shape == (num,)):
        raise ValueError(
            f"{len(tasks)} images, {begin.shape} begins, {scale.shape} scales and {mirror.shape} mirrors "
            f"for a batch of {num}"
        )
    sides = np.stack([tasks["height"], tasks["width"]], axis=1)
    end = begin + scale * out.shape[2:]
    fits = (begin >= 0) & (scale > 0) & (end <= sides + _TOLERANCE)  # false for what is not a number
    if not fits.all():
        row = int(np.argwhere(~fits)[0, 0])
        raise ValueError(f"image {row} of {sides[row]} pixels cannot show {begin[row]} to {end[row]}")
