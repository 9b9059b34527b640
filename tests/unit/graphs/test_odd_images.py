"""Every odd kind of image file: pixels as PIL gives them, or a reason, never a crash."""

from __future__ import annotations

import io
import resource
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from dalipipe.graphs.check import KINDS, kind_of, suspicion, undecodable
from dalipipe.graphs.config import GraphConfig
from tests.support.images import jpeg_bytes, textured_image
from tests.unit.graphs.steps import MemoryPrefetcher, open_memory

PICTURE = textured_image(5, height=93, width=131)
ALPHA = PICTURE.copy()
ALPHA.putalpha(Image.linear_gradient("L").resize(PICTURE.size))


def _saved(kind: str, picture: Image.Image = PICTURE, **options: object) -> bytes:
    sink = io.BytesIO()
    picture.save(sink, kind, **options)  # type: ignore[arg-type]
    return sink.getvalue()


def _flipped_bytes() -> bytes:
    data = bytearray(_saved("JPEG", quality=90))
    scan = data.index(b"\xff\xda") + 14
    for at in np.random.Generator(np.random.Philox(3)).integers(scan, len(data) - 2, 10).tolist():
        data[at] ^= 0x10
        if data[at] == 0xFF:  # no new marker
            data[at] = 0xFE
    return bytes(data)


GOOD: dict[str, Callable[[], bytes]] = {
    "jpeg 4:2:0": lambda: _saved("JPEG", subsampling=2),
    "jpeg 4:2:2": lambda: _saved("JPEG", subsampling=1),
    "jpeg 4:4:4": lambda: _saved("JPEG", subsampling=0),
    "jpeg gray": lambda: _saved("JPEG", PICTURE.convert("L")),
    "jpeg progressive": lambda: _saved("JPEG", progressive=True),
    "jpeg cmyk": lambda: _saved("JPEG", PICTURE.convert("CMYK")),
    "jpeg with flipped bytes": _flipped_bytes,
    "jpeg with trailing bytes": lambda: _saved("JPEG") + b"appended by a camera",
    "jpeg one pixel": lambda: _saved("JPEG", PICTURE.resize((1, 1))),
    "jpeg 8000 x 2": lambda: _saved("JPEG", PICTURE.resize((8000, 2))),
    **{f"jpeg exif {i}": (lambda i=i: jpeg_bytes(2, height=61, width=97, orientation=i)) for i in range(1, 9)},
    "bmp": lambda: _saved("BMP"),
    "tiff": lambda: _saved("TIFF"),
    "tiff lzw": lambda: _saved("TIFF", compression="tiff_lzw"),
    "ppm": lambda: _saved("PPM"),
    "jpeg 2000": lambda: _saved("JPEG2000"),
    "png": lambda: _saved("PNG"),
    "png rgba": lambda: _saved("PNG", ALPHA),
    "png palette": lambda: _saved("PNG", PICTURE.convert("P")),
    "png 1 bit": lambda: _saved("PNG", PICTURE.convert("1")),
    "png gray": lambda: _saved("PNG", PICTURE.convert("L")),
    "png gray and alpha": lambda: _saved("PNG", ALPHA.convert("LA")),
    "webp": lambda: _saved("WEBP"),
    "webp lossless": lambda: _saved("WEBP", lossless=True),
    "webp alpha": lambda: _saved("WEBP", ALPHA, lossless=True, exact=True),
    "webp animated": lambda: _saved(
        "WEBP", lossless=True, save_all=True, append_images=[PICTURE.transpose(Image.Transpose.ROTATE_180)]
    ),
}
BAD: dict[str, Callable[[], bytes]] = {
    "empty": lambda: b"",
    "one byte": lambda: b"\xff",
    "text": lambda: b"<html>404 not found</html>" * 9,
    "zeros": lambda: bytes(5000),
    "jpeg cut in half": lambda: _saved("JPEG")[:1500],
    "jpeg without its last two bytes": lambda: _saved("JPEG")[:-2],
    "jpeg cut in its header": lambda: _saved("JPEG")[:100],
    "jpeg without quantization": lambda: _saved("JPEG").replace(b"\xff\xdb", b"\xff\xfe"),
    "jpeg of height 0": lambda: _with_size(_saved("JPEG"), 0, 131),
    "jpeg that lies about its size": lambda: _with_size(_saved("JPEG"), 60_000, 60_000),
    "png cut in half": lambda: _saved("PNG")[:9000],
    "gif": lambda: _saved("GIF", PICTURE.convert("P")),
    "avif": lambda: b"\0\0\0\x20ftypavif\0\0\0\0avifmif1miafMA1B" + bytes(200),
}


def _with_size(data: bytes, height: int, width: int) -> bytes:
    at = data.index(b"\xff\xc0") + 5
    return data[:at] + height.to_bytes(2, "big") + width.to_bytes(2, "big") + data[at + 4 :]


def _decoded(images: list[bytes], graph: GraphConfig) -> dict[str, torch.Tensor]:
    source = open_memory(MemoryPrefetcher(images, len(images), sizes_known=False), graph=graph)
    try:
        return next(source).tensors
    finally:
        source.close()


def test_good_files_are_pils_pixels_bit_for_bit() -> None:
    """Upright, as RGB; an alpha channel is dropped, an animation gives its first picture."""
    images = [make() for make in GOOD.values()]
    batch = _decoded(images, GraphConfig(name="image_raw", num_threads=2))
    assert batch["id"].tolist() == list(range(len(GOOD)))
    for name, data, got in zip(GOOD, images, batch["image"], strict=True):
        wanted = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"))
        assert np.array_equal(got.numpy(), wanted), name


def test_no_good_file_is_suspected_but_for_what_was_appended() -> None:
    """Suspicion costs a decode; a broken table is seen before it fails a batch."""
    suspected = {name for name, make in GOOD.items() if suspicion(np.frombuffer(make(), np.uint8)) is not None}
    assert suspected == {"jpeg with trailing bytes"}


def _patched(data: bytes, marker: bytes, at: int, value: int) -> bytes:
    """With one byte of the first segment of that marker changed; counted from behind its length."""
    place = data.index(marker) + 4 + at
    return data[:place] + bytes([value]) + data[place + 1 :]


def _without_components(data: bytes) -> bytes:
    at = data.index(b"\xff\xc0")
    return data[: at + 2] + b"\0\x08" + data[at + 4 : at + 9] + b"\0" + data[at + 19 :]


BROKEN_HEADERS: dict[str, Callable[[bytes], bytes]] = {
    "more codes than bits allow": lambda data: _patched(data, b"\xff\xc4", 1, 3),
    "more codes than there can be": lambda data: _patched(data, b"\xff\xc4", 16, 255),
    "a code table of a number too high": lambda data: _patched(data, b"\xff\xc4", 0, 0x41),
    "no table for the scan": lambda data: _patched(data, b"\xff\xda", 2, 0x33),
    "a scan of a component that is not there": lambda data: _patched(data, b"\xff\xda", 1, 77),
    "a scan of the same component twice": lambda data: _patched(data, b"\xff\xda", 3, 1),
    "no quantization tables": lambda data: data.replace(b"\xff\xdb", b"\xff\xfe"),
    "a quantization table short of bytes": lambda data: _patched(data, b"\xff\xdb", 0, 0x10),
    "a frame of 12 bits": lambda data: _patched(data, b"\xff\xc0", 0, 12),
    "a frame of samplings that cannot be": lambda data: _patched(data, b"\xff\xc0", 7, 0x51),
    "a frame of another length": lambda data: _patched(data, b"\xff\xc0", 5, 9),
    "a frame without components": _without_components,
    "two frames": lambda data: data[:2] + data[data.index(b"\xff\xc0") :][:19] + data[2:],
    "no frame": lambda data: data.replace(b"\xff\xc0", b"\xff\xfe"),
    "a process that is not supported": lambda data: data.replace(b"\xff\xc0", b"\xff\xc3"),
    "an unknown marker": lambda data: data.replace(b"\xff\xe0", b"\xff\x42"),
    "no marker": lambda data: data[:2] + b"\0" * 40 + data[42:],
    "nothing but fill": lambda _: b"\xff\xd8" + b"\xff" * 50 + b"\xff\xd9",
    "nothing between the ends": lambda _: b"\xff\xd8\xff\xd9",
}


@pytest.mark.parametrize("make", BROKEN_HEADERS.values(), ids=BROKEN_HEADERS)
def test_a_header_that_no_decoder_takes_is_suspected(make: Callable[[bytes], bytes]) -> None:
    """So that it fails no batch."""
    data = np.frombuffer(make(_saved("JPEG")), np.uint8)
    assert suspicion(data) == "jpeg header is damaged"
    assert undecodable([data]) != [None]


@pytest.mark.parametrize("progressive", [False, True])
def test_a_header_with_one_flipped_bit_fails_no_decoder_unnoticed(progressive: bool) -> None:
    """Every bit of the header of a small picture."""
    data = _saved("JPEG", PICTURE.resize((24, 16)), progressive=progressive)
    header = data.index(b"\xff\xda") + 14
    flipped = [
        data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :]
        for place in range(2, header)
        for bit in range(8)
    ]
    unnoticed = [one for one in flipped if suspicion(np.frombuffer(one, np.uint8)) is None]
    assert 300 < len(unnoticed) < len(flipped) - 100
    reasons = undecodable(unnoticed)
    assert [reason for reason in reasons if reason and "pixels are more than" not in reason] == []


def test_a_header_that_is_cut_anywhere_is_suspected() -> None:
    """And the look at it never fails itself."""
    data = _saved("JPEG", PICTURE.resize((24, 16)))
    for stop in range(2, data.index(b"\xff\xda") + 12):
        assert suspicion(np.frombuffer(data[:stop] + b"\xff\xd9", np.uint8)) is not None, stop


def test_damage_behind_the_header_of_a_baseline_jpeg_fails_no_decoder() -> None:
    """Pages that are gone, noise, markers out of place: it only shows, so there is no use in a scan for it."""
    data, random = _saved("JPEG", quality=95), np.random.Generator(np.random.Philox(8))
    scan = data.index(b"\xff\xda") + 14
    damaged = []
    for marker in range(1, 255):
        at = int(random.integers(scan, len(data) - 4))
        damaged.append(data[:at] + bytes([0xFF, marker]) + data[at + 2 :])
    for _ in range(40):
        at, page = int(random.integers(scan, len(data) - 600)), random.bytes(512)
        damaged += [data[:at] + filling + data[at + 512 :] for filling in (page, bytes(512))]
    assert undecodable(damaged) == [None] * len(damaged)


@pytest.mark.parametrize("kernel", ["auto", "torch"])
def test_good_files_through_crop_and_resize(kernel: str) -> None:
    """None of them fails in the training graph, and evaluation is within a level of PIL."""
    names = [name for name in GOOD if "one pixel" not in name and "8000" not in name]
    images = [GOOD[name]() for name in names]
    for codec in ("off", "auto"):
        graph = GraphConfig(size=24, num_threads=2, dtype="uint8", jpeg_scale=codec, resize_kernel=kernel)
        assert _decoded(images, graph)["id"].tolist() == list(range(len(names)))
    graph = GraphConfig(
        name="image_eval", size=48, resize_shorter=56, dtype="uint8", num_threads=2, resize_kernel=kernel
    )
    batch = _decoded(images, graph)
    for name, data, got in zip(names, images, batch["image"], strict=True):
        picture = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
        width, height = (side * 56 // min(picture.size) for side in picture.size)
        left, top = round((width - 48) / 2), round((height - 48) / 2)
        wanted = picture.resize((width, height), Image.Resampling.BILINEAR).crop((left, top, left + 48, top + 48))
        assert np.abs(got.permute(1, 2, 0).numpy().astype(int) - np.asarray(wanted, int)).max() <= 1, name


def test_sixteen_bit_gray_is_scaled_where_pil_clips() -> None:
    """The stated difference: the high byte, rounded."""
    deep = np.random.Generator(np.random.Philox(1)).integers(0, 2**16, (40, 60), dtype=np.uint16)
    batch = _decoded([_saved("PNG", Image.fromarray(deep))], GraphConfig(name="image_raw", num_threads=1))
    got = batch["image"][0].numpy()
    assert np.abs(got.astype(float) - deep[:, :, None] / 257).max() <= 1


def test_bad_files_are_replaced_and_say_why() -> None:
    """Each alone among good ones, in the training graph; each has a kind."""
    images = [data for make in BAD.values() for data in (make(), *[jpeg_bytes(i) for i in range(7)])]
    source = open_memory(
        MemoryPrefetcher(images, 16, sizes_known=False, tail="partial"), graph=GraphConfig(size=32, num_threads=2)
    )
    ids = [sample for _ in range(-(-len(images) // 16)) for sample in next(source).tensors["id"].tolist()]
    source.close()
    assert len(ids) == len(images)
    assert all(sample % 8 for sample in ids)
    reasons = undecodable([make() for make in BAD.values()])
    kinds = dict(zip(BAD, (kind_of(reason or "") for reason in reasons), strict=True))
    assert all(reasons)
    assert set(kinds.values()) <= set(KINDS) - {"other"}, dict(zip(BAD, reasons, strict=True))
    assert kinds["empty"] == "empty"
    assert kinds["text"] == kinds["zeros"] == kinds["gif"] == "format"
    assert kinds["jpeg cut in half"] == kinds["png cut in half"] == "damaged"
    assert kinds["jpeg cut in its header"] == kinds["jpeg of height 0"] == "header"
    assert kinds["jpeg that lies about its size"] == "too_large"


def _png_bomb(side: int) -> bytes:
    """A gray square of zeros: a few hundred KB that decode to side * side * 3 bytes."""
    packer, rows = zlib.compressobj(1), bytes(64 * (side + 1))
    body = b"".join(packer.compress(rows) for _ in range(side // 64)) + packer.compress(bytes(side % 64 * (side + 1)))

    def chunk(name: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + name + data + zlib.crc32(name + data).to_bytes(4, "big")

    header = side.to_bytes(4, "big") * 2 + b"\x08\x00\x00\x00\x00"
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body + packer.flush()) + chunk(b"IEND", b"")


_FEED_BOMB = """
import resource, sys
from pathlib import Path
from dalipipe.graphs.config import GraphConfig, QuarantineConfig
from tests.support.images import jpeg_bytes
from tests.unit.graphs.steps import MemoryPrefetcher, open_memory
images = [jpeg_bytes(i) for i in range(8)]
def peak(images):
    source = open_memory(MemoryPrefetcher(images, 8, sizes_known=False), graph=GraphConfig(size=32, num_threads=2))
    ids = next(source).tensors["id"].tolist()
    source.close()
    return ids, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
_, before = peak(images)
images[3] = Path(sys.argv[1]).read_bytes()
ids, after = peak(images)
print(ids[3], after - before)
"""


def test_a_decompression_bomb_never_takes_memory(tmp_path: Path) -> None:
    """280 million pixels, above the default cap of 2**28: 800 MB if it were decoded. In a process of its own."""
    bomb = _png_bomb(16_800)
    assert len(bomb) < 2_000_000
    (tmp_path / "bomb.png").write_bytes(bomb)
    done = subprocess.run(
        [sys.executable, "-c", _FEED_BOMB, str(tmp_path / "bomb.png")],
        capture_output=True, text=True, check=True, timeout=100, cwd=Path(__file__).parents[3],
    )  # fmt: skip
    taken, grown_kb = map(int, done.stdout.split())
    assert taken == 4
    assert grown_kb < 64 * 1024
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 2 * 1024 * 1024
