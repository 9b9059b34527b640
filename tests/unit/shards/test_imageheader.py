from __future__ import annotations

import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from dalipipe.errors import CorruptSampleError
from dalipipe.shards.imageheader import has_jpeg_end, parse_image_header
from tests.support.images import jpeg_bytes, textured_image


def encoded(fmt: str, mode: str = "RGB", *, orientation: int = 1, size=(90, 70), **options) -> bytes:
    exif = Image.Exif()
    if orientation != 1:
        exif[0x0112] = orientation
        options["exif"] = exif
    sink = io.BytesIO()
    textured_image(1, height=size[1], width=size[0]).convert(mode).save(sink, fmt, **options)
    return sink.getvalue()


CASES = [
    ("JPEG", "RGB", {}, "jpeg", 3),
    ("JPEG", "L", {}, "jpeg", 1),
    ("JPEG", "CMYK", {}, "jpeg", 4),
    ("JPEG", "RGB", {"progressive": True}, "jpeg", 3),
    ("PNG", "RGB", {}, "png", 3),
    ("PNG", "L", {}, "png", 1),
    ("PNG", "P", {}, "png", 3),
    ("PNG", "RGBA", {}, "png", 4),
    ("PNG", "LA", {}, "png", 2),
    ("WEBP", "RGB", {}, "webp", 3),
    ("WEBP", "RGB", {"lossless": True}, "webp", 3),
    ("BMP", "RGB", {}, "bmp", 3),
    ("BMP", "L", {}, "bmp", 3),
    ("GIF", "P", {}, "gif", 3),
    ("TIFF", "RGB", {}, "tiff", 3),
    ("TIFF", "L", {}, "tiff", 1),
    ("PPM", "RGB", {}, "ppm", 3),
    ("PPM", "L", {}, "ppm", 1),
    ("JPEG2000", "RGB", {}, "jp2", 3),
    ("JPEG2000", "RGB", {"no_jp2": True}, "jp2", 3),
]


@pytest.mark.parametrize(("fmt", "mode", "options", "codec", "channels"), CASES)
def test_every_format_states_its_size(fmt, mode, options, codec, channels):
    header = parse_image_header(encoded(fmt, mode, **options))
    assert (header.codec, header.height, header.width, header.channels) == (codec, 70, 90, channels)
    assert header.orientation == 1


@pytest.mark.parametrize("fmt", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_size_is_upright_as_a_viewer_shows_it(fmt, orientation):
    data = encoded(fmt, orientation=orientation)
    shown = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    header = parse_image_header(data)
    assert (header.width, header.height) == shown.size
    assert header.orientation == orientation


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", r"empty \(0 bytes\)"),
        (b"<html>404</html>", "not an image: unknown first bytes"),
        (b"\xff\xd8\xff", "jpeg header cut short at 3 bytes"),
        (jpeg_bytes(1)[:100], "jpeg header cut short at 100 bytes"),
        (b"\xff\xd8\xff\xe0\x00\x04ab\x00\x00", "jpeg has no marker at byte 8"),
        (b"\xff\xd8\xff\xd9", "jpeg has no frame header"),
        (b"\x89PNG\r\n\x1a\n" + bytes(30), "png does not start with a valid IHDR"),
        (b"RIFF\0\0\0\0WEBPXXXX" + bytes(20), "unknown first chunk"),
        (b"BM" + bytes(60), "bmp header states 0 x 0"),
        (b"P6 # only a comment\n", "ppm header has no size"),
        (b"II*\0\xff\xff\xff\x7f", "tiff header cut short"),
    ],
)
def test_bad_headers_say_why(data, reason):
    with pytest.raises(CorruptSampleError, match=reason):
        parse_image_header(data)
    with pytest.raises(ValueError, match=reason):
        parse_image_header(memoryview(data))


def test_a_jpeg_that_states_no_height_is_refused():
    data = bytearray(jpeg_bytes(1))
    at = data.index(b"\xff\xc0")
    data[at + 5 : at + 7] = b"\0\0"
    with pytest.raises(CorruptSampleError, match="jpeg header states 160 x 0 pixels"):
        parse_image_header(bytes(data))


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_damaged_bytes_give_a_header_or_the_typed_error(data):
    fmt, mode, options, *_ = data.draw(st.sampled_from(CASES))
    raw = bytearray(encoded(fmt, mode, **options))
    for at, value in data.draw(st.lists(st.tuples(st.integers(0, 120), st.integers(0, 255)), max_size=6)):
        raw[min(at, len(raw) - 1)] = value
    cut = bytes(raw[: data.draw(st.integers(0, len(raw)))])
    has_jpeg_end(cut)
    try:
        header = parse_image_header(cut)
    except CorruptSampleError:
        return
    assert header.height >= 1
    assert header.width >= 1


@pytest.mark.parametrize("progressive", [False, True])
def test_the_end_marker_of_a_jpeg(progressive):
    whole = encoded("JPEG", progressive=progressive)
    assert has_jpeg_end(whole)
    assert has_jpeg_end(whole + b"\0" * 50)
    assert has_jpeg_end(whole + b"trailing \xff\xd8 bytes")
    for num_bytes in range(0, len(whole) - 1, 37):
        assert not has_jpeg_end(whole[:num_bytes]), num_bytes
    assert not has_jpeg_end(whole[:-2])
    assert not has_jpeg_end(whole[:-2] + b"\0\0")


def test_the_end_marker_of_a_thumbnail_does_not_count():
    thumbnail = jpeg_bytes(2, height=32, width=32)
    whole = jpeg_bytes(1)
    body = b"Exif\0\0" + thumbnail
    with_thumbnail = whole[:2] + b"\xff\xe1" + (len(body) + 2).to_bytes(2, "big") + body + whole[2:]
    assert parse_image_header(with_thumbnail).width == 160
    assert has_jpeg_end(with_thumbnail)
    assert not has_jpeg_end(with_thumbnail[:-2])
    assert not has_jpeg_end(with_thumbnail[: 6 + len(body)])
