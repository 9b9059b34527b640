"""The native resize kernel: torch's bits for whole windows, PIL's level for fractions, DALI's bits when it finishes."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from dalipipe.errors import ConfigError
from dalipipe.graphs import resize as resize_module
from dalipipe.graphs.buffers import Buffers
from dalipipe.graphs.config import GraphConfig
from dalipipe.graphs.image import build_normalize
from dalipipe.graphs.native import load_native, normalised
from dalipipe.graphs.resize import choose_native, resize_into
from tests.support.images import textured_image
from tests.unit.graphs.kernels import build_hook, kernels, resize

MEAN, STD = [123.675, 116.28, 103.53], [58.395, 57.12, 57.375]
SIDES = st.one_of(st.integers(1, 12), st.integers(1, 500))


def _noise(height: int, width: int) -> np.ndarray:
    """Every level beside every other: the hardest picture for rounding."""
    random = np.random.Generator(np.random.Philox(height * 10_007 + width))
    return random.integers(0, 256, (height, width, 3), dtype=np.uint8)


@settings(deadline=None, max_examples=150)
@given(height=SIDES, width=SIDES, rows=SIDES, columns=SIDES, mirror=st.booleans())
@example(height=1, width=1, rows=224, columns=224, mirror=False)
@example(height=2, width=8000, rows=32, columns=32, mirror=True)
@example(height=9000, width=1, rows=1, columns=7, mirror=False)
@example(height=375, width=500, rows=224, columns=224, mirror=True)
@example(height=224, width=224, rows=224, columns=224, mirror=True)
@example(height=1025, width=1023, rows=1024, columns=1024, mirror=False)
def test_whole_windows_are_torchs_bits(height: int, width: int, rows: int, columns: int, mirror: bool) -> None:
    """Up and down, one pixel, lines; every path; a mirrored window is the mirror image."""
    image, wanted = _noise(height, width), torch.empty(rows, columns, 3, dtype=torch.uint8)
    resize_into(torch.from_numpy(image), wanted)
    right_way = wanted.numpy()[:, ::-1] if mirror else wanted.numpy()
    for kernel in kernels():
        assert np.array_equal(resize(kernel, image, (rows, columns), mirror=mirror), right_way), kernel.name


@settings(deadline=None, max_examples=150)
@given(
    sides=st.tuples(SIDES, SIDES), size=st.tuples(st.integers(1, 200), st.integers(1, 200)),
    cut=st.tuples(*[st.floats(0, 1)] * 4), mirror=st.booleans(),
)  # fmt: skip
@example(sides=(250, 250), size=(200, 200), cut=(0.0, 0.0, 1.0, 1.0), mirror=False)
@example(sides=(60, 80), size=(48, 48), cut=(0.1, 0.1, 0.9, 0.9), mirror=False)
def test_fractions_of_pixels_are_within_a_level_of_pil(
    sides: tuple[int, int], size: tuple[int, int], cut: tuple[float, ...], mirror: bool
) -> None:
    """Windows that begin and end anywhere; all paths give the same bits. Where both passes round a tie the other way
    than Pillow's wider weights it may be two levels, as with torch: in fewer than 1 of 10,000 values at 5 to 4."""
    (height, width), (rows, columns), image = sides, size, _noise(*sides)
    top, bottom = sorted(share * height for share in cut[:2])
    left, right = sorted(share * width for share in cut[2:])
    box = (min(top, height - 0.01), min(left, width - 0.01), max(bottom, top + 0.01), max(right, left + 0.01))
    box = (*box[:2], min(box[2], height), min(box[3], width))
    first, *others = [resize(kernel, image, (rows, columns), box, mirror=mirror) for kernel in kernels()]
    assert all(np.array_equal(first, other) for other in others)
    picture = Image.fromarray(image).resize(
        (columns, rows), Image.Resampling.BILINEAR, box=(box[1], box[0], box[3], box[2])
    )
    wanted = np.asarray(picture, int)[:, ::-1] if mirror else np.asarray(picture, int)
    away = np.abs(first.astype(int) - wanted)
    assert away.max() <= 2
    assert (away > 1).sum() <= 1 + 2e-4 * away.size


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "uint8"])
def test_finished_batches_are_dalis_bits(dtype: str, layout: str) -> None:
    """Every level of every channel, mirrored and not, at a width that no vector divides."""
    graph = GraphConfig(size=53, dtype=dtype, layout=layout)
    image = np.arange(53 * 53 * 3, dtype=np.uint32).reshape(53, 53, 3).astype(np.uint8)
    fed = (np.stack([image, image]), np.array([0, 1], np.int32))
    pipeline = build_normalize(lambda: fed, graph, num_threads=1)
    pipeline.build()
    wanted = np.array(pipeline.run()[0].as_tensor())
    values = normalised(dtype, graph.mean, graph.std)
    for kernel in kernels():
        for mirror in (0, 1):
            got = resize(kernel, image, (53, 53), mirror=bool(mirror), values=values, layout=layout)
            assert got.dtype == wanted.dtype
            assert got.tobytes() == wanted[mirror].tobytes(), kernel.name


def test_nothing_outside_the_window_is_read() -> None:
    """Neither the columns beside it, nor a byte before or behind its memory, where the pages cannot be read."""
    whole, box = _noise(90, 120), (slice(7, 61), slice(13, 101))
    spoilt = 255 - whole
    spoilt[box] = whole[box]
    page = mmap.PAGESIZE
    with mmap.mmap(-1, 6 * page) as memory:
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        protect = ctypes.CDLL(None).mprotect
        protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        for start in (0, 5 * page):
            assert protect(address + start, page, 0) == 0
        flat = np.frombuffer(memory, np.uint8)[page : 5 * page]
        for height, width in ((54, 88), (31, 5), (1, 17), (200, 1)):
            small = np.ascontiguousarray(whole[7 : 7 + height, 13 : 13 + width] if height < 80 else _noise(200, 1))
            num_bytes = small.size
            for place in (flat[:num_bytes], flat[-num_bytes:]):
                place[:] = small.ravel()
                for kernel in kernels():
                    for size in ((32, 32), (9, 140)):
                        wanted = resize(kernel, small, size)
                        assert np.array_equal(
                            resize(kernel, place.reshape(small.shape), size, mirror=True)[:, ::-1], wanted
                        )
        for start in (0, 5 * page):
            assert protect(address + start, page, mmap.PROT_READ | mmap.PROT_WRITE) == 0
        del flat, place
    for kernel in kernels():
        assert np.array_equal(resize(kernel, whole[box], (40, 40)), resize(kernel, spoilt[box], (40, 40)))


def test_threads_share_a_batch_and_stop() -> None:
    """Each window is resized once, by whichever thread; a stopped job begins none."""
    kernel, images = kernels()[-1], [_noise(60 + i, 90 - i) for i in range(24)]
    batch = np.zeros((24, 3, 33, 33), np.float32)
    values = normalised("float32", MEAN, STD)
    scale = np.array([[image.shape[0] / 33, image.shape[1] / 33] for image in images])
    given_ = {"begin": np.zeros((24, 2)), "scale": scale, "mirror": np.arange(24, dtype=np.int32) % 2, "values": values}
    job = kernel.job(images, batch, **given_)
    threads = [threading.Thread(target=job.run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for row, image in enumerate(images):
        wanted = resize(kernel, image, (33, 33), mirror=bool(row % 2), values=values, layout="NCHW")
        assert np.array_equal(batch[row], wanted)
    batch[:] = 7
    stopped = kernel.job(images, batch, **given_)
    stopped.stop()
    stopped.run()
    assert (batch == 7).all()


_IMAGE, _BATCH = _noise(20, 30), np.zeros((1, 3, 8, 8), np.float32)
_GOOD: dict[str, Any] = {
    "images": [_IMAGE], "out": _BATCH, "begin": np.zeros((1, 2)), "scale": np.ones((1, 2)),
    "mirror": np.zeros(1, np.int32), "values": normalised("float32", MEAN, STD),
}  # fmt: skip
_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "gray": ({"images": [_IMAGE[:, :, 0]]}, r"image 0 is \|u1 \(20, 30\), not uint8"),
    "float": ({"images": [_IMAGE.astype(np.float32)]}, "not uint8"),
    "no pixel": ({"images": [_IMAGE[:0]]}, "not uint8"),
    "turned": ({"images": [_IMAGE.transpose(1, 0, 2)]}, "do not lie side by side"),
    "upside down": ({"images": [_IMAGE[::-1]]}, "do not lie side by side"),
    "every second column": ({"images": [_IMAGE[:, ::2]]}, "do not lie side by side"),
    "too many": ({"images": [_IMAGE] * 2}, "2 images, .* for a batch of 1"),
    "begins before": ({"begin": np.array([[0.0, -0.1]])}, r"image 0 of \[20 30\] pixels cannot show \[ 0.  -0.1\]"),
    "ends behind": ({"scale": np.array([[2.51, 1.0]])}, "cannot show"),
    "no scale": ({"scale": np.array([[0.0, 1.0]])}, "cannot show"),
    "not a number": ({"begin": np.array([[np.nan, 0.0]])}, "cannot show"),
    "infinite": ({"scale": np.array([[np.inf, 1.0]])}, "cannot show"),
    "begins of another shape": ({"begin": np.zeros(2)}, "begins"),
    "mirrors of another shape": ({"mirror": np.zeros(2, np.int32)}, "mirror"),
    "another dtype": ({"out": _BATCH.astype(np.float16)}, "the table is float32"),
    "doubles": ({"out": _BATCH.astype(np.float64)}, "the table is float32"),
    "levels into floats": ({"values": None}, "levels go into uint8"),
    "batch of gray": ({"out": _BATCH[:, :1]}, "is not a writable"),
    "read-only batch": ({"out": np.broadcast_to(_BATCH, (1, 3, 8, 8))}, "is not a writable"),
    "batch turned": ({"out": _BATCH[:, :, ::-1]}, "is not a writable"),
}


@pytest.mark.parametrize("case", _REFUSED)
def test_what_does_not_fit_is_refused_before_the_call(case: str) -> None:
    """Python checks; the kernel trusts."""
    change, message = _REFUSED[case]
    with pytest.raises(ValueError, match=message):
        kernels()[-1].job(**(_GOOD | change))


def test_a_missing_or_foreign_library_leaves_torch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No file, no library, and one of another version; `native` then says what to do."""
    kernels()
    (tmp_path / "text.so").write_text("no library")
    assert load_native(tmp_path / "none.so") is None
    assert load_native(tmp_path / "text.so") is None
    hook = build_hook()
    old = tmp_path / "resize.c"
    old.write_text(re.sub(r"#define VERSION \d+", "#define VERSION 0", hook._SOURCE.read_text()))
    monkeypatch.setattr(hook, "_SOURCE", old)
    assert hook.build_library(tmp_path / "old.so") == ""
    with caplog.at_level(logging.WARNING):
        assert load_native(tmp_path / "old.so") is None
    assert re.search(r"is version 0 of the resize kernel, not \d+: install again", caplog.text)
    monkeypatch.setattr(resize_module, "load_native", lambda: None)
    assert choose_native("auto") is None
    with pytest.raises(ConfigError, match="install the package again where there is a C compiler, or use auto"):
        choose_native("native")
    monkeypatch.setattr(resize_module, "load_native", lambda: kernels()[-1])
    assert choose_native("auto") is choose_native("native") is kernels()[-1]
    assert choose_native("torch") is None


def test_a_cpu_that_hides_f16c_is_not_given_the_avx2_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some hypervisors show AVX2 without it; the kernel is compiled against a CPUID that says so."""
    if kernels()[-1].name != "native avx2":
        pytest.skip("this CPU has no AVX2 path")
    (tmp_path / "cpuid.h").write_text(
        "static int __get_cpuid(unsigned leaf, unsigned *a, unsigned *b, unsigned *c, unsigned *d)\n"
        "{ *a = *b = *d = leaf; *c = ~(1u << 29); return 1; }\n"
    )
    monkeypatch.setenv("CFLAGS", f"{os.environ.get('CFLAGS', '')} -I{tmp_path}")
    assert build_hook().build_library(tmp_path / "libresize.so") == ""
    kernel = load_native(tmp_path / "libresize.so")
    assert kernel is not None
    assert kernel.name == "native sse4.1"


def test_without_a_compiler_the_hook_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line, no library, nothing left behind."""
    hook = build_hook()
    monkeypatch.setenv("CC", str(tmp_path / "gone-cc"))
    assert "gone-cc" in hook.build_library(tmp_path / "libresize.so")
    monkeypatch.setenv("CC", "false")
    assert "false -std=c99" in hook.build_library(tmp_path / "libresize.so")
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert hook.build_library(tmp_path / "libresize.so").startswith("no C compiler")
    assert list(tmp_path.iterdir()) == []


def test_a_library_that_is_older_than_its_source_is_not_taken_for_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An editable install says so; where compiling fails, or a folder cannot be written, none is left."""
    hook, library = build_hook(), tmp_path / "libresize.so"
    kernels()
    assert hook.build_library(library) == ""
    with caplog.at_level(logging.WARNING):
        assert load_native(library) is not None
        assert caplog.text == ""
        (tmp_path / "resize.c").write_text("")
        os.utime(tmp_path / "resize.c", (2e9, 2e9))
        assert load_native.__wrapped__(library) is not None
    assert "libresize.so is older than resize.c: run `make setup`" in caplog.text
    monkeypatch.setenv("CC", "false")
    assert hook.build_library(library) != ""
    assert not library.exists()
    monkeypatch.delenv("CC")
    assert "No such file" in hook.build_library(tmp_path / "gone" / "libresize.so")


def test_buffers_come_back_when_the_last_view_is_gone() -> None:
    """A tensor holds its memory, a slice of it too; then the next batch gets it, a smaller one as well."""
    buffers = Buffers()
    first = torch.from_numpy(buffers.take((4, 3, 8, 8), "float32"))
    first[:] = 1
    second = buffers.take((4, 3, 8, 8), "float32")
    assert second.ctypes.data % 64 == 0
    second[:] = 2
    assert (first == 1).all()
    address, part = first.data_ptr(), first[1]
    del first
    assert buffers.take((4, 3, 8, 8), "float32").ctypes.data not in (address, second.ctypes.data)
    assert (part == 1).all()
    del part
    smaller = buffers.take((2, 3, 8, 8), "float16")
    assert smaller.shape == (2, 3, 8, 8)
    del second
    buffers.take((8, 3, 64, 64), "float32")[:] = 3  # grows


def test_textures_survive_every_size() -> None:
    """A smooth picture, so that a shift by a pixel would be seen: against PIL's resize of the whole, cropped."""
    picture = textured_image(7, height=301, width=407)
    wanted = np.asarray(picture.resize((346, 256), Image.Resampling.BILINEAR).crop((61, 16, 285, 240)), int)
    factors = (301 / 256, 407 / 346)
    box = (16 * factors[0], 61 * factors[1], 240 * factors[0], 285 * factors[1])
    for kernel in kernels():
        got = resize(kernel, np.array(picture), (224, 224), box)
        assert np.abs(got.astype(int) - wanted).max() <= 1
