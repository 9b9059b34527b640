"""The native resize kernel, compiled from this tree, on each of its paths."""

from __future__ import annotations

import atexit
import functools
import importlib.util
import shutil
import tempfile
from pathlib import Path
from types import ModuleType

import numpy as np
import numpy.typing as npt
import pytest

from dalipipe.graphs.native import PATHS, NativeResize, Values, load_native

ROOT = Path(__file__).resolve().parents[3]


def build_hook() -> ModuleType:
    """The module hatch_build.py."""
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def kernels() -> tuple[NativeResize, ...]:
    """One kernel a path that this CPU has, the plain one first; skips where there is no compiler."""
    # Not the installed one, which may be of another state of the source.
    folder = Path(tempfile.mkdtemp(prefix="dalipipe-kernel-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    library = folder / "libresize.so"
    reason = build_hook().build_library(library)
    if reason:
        pytest.skip(f"the native kernel cannot be built here: {reason}")
    found = {kernel.name: kernel for path in range(len(PATHS)) if (kernel := load_native(library, path))}
    assert found
    return tuple(found.values())


def resize(
    kernel: NativeResize,
    image: npt.NDArray[np.uint8],
    size: tuple[int, int],
    box: tuple[float, float, float, float] | None = None,
    *,
    mirror: bool = False,
    values: Values | None = None,
    layout: str = "NHWC",
) -> npt.NDArray[np.generic]:
    """One window, box = (top, left, bottom, right): [H, W, 3] or, NCHW, [3, H, W]."""
    dtype = np.uint8 if values is None else values.table.dtype
    shape = (1, *size, 3) if layout == "NHWC" else (1, 3, *size)
    batch = np.zeros(shape, dtype)
    top, left, bottom, right = box or (0.0, 0.0, float(image.shape[0]), float(image.shape[1]))
    kernel.job(
        [image],
        batch.transpose(0, 3, 1, 2) if layout == "NHWC" else batch,
        begin=np.array([[top, left]]),
        scale=np.array([[(bottom - top) / size[0], (right - left) / size[1]]]),
        mirror=np.array([mirror], np.int32),
        values=values,
    ).run()
    return batch[0]
