"""Size and format of an encoded image from its first bytes, without a decoder: microseconds an image.

Sources: ITU-T T.81 (JPEG), Exif 2.3 (orientation), the PNG, WebP, BMP, GIF, TIFF 6.0, Netpbm and JPEG 2000 formats.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dalipipe.errors import CorruptSampleError

if TYPE_CHECKING:
    from typing_extensions import Buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageHeader:
    """What an image's header says.

    height, width: pixels, upright (EXIF orientation applied). channels: as stored (1 to 4; 0 = unknown; a palette
    counts as 3). orientation: EXIF, 1 to 8; 5 to 8 are stored lying on their side.
    """

    codec: str
    height: int
    width: int
    channels: int
    orientation: int = 1


def parse_image_header(data: Buffer) -> ImageHeader:
    """Reads the header of a JPEG, PNG, WebP, BMP, GIF, TIFF, PPM or JPEG 2000 image.

    Raises:
        CorruptSampleError: (a ValueError) no such image, cut short, or without a size; the message is the reason
            alone, the caller knows which sample it is.
    """
    view = memoryview(data).cast("B")
    if len(view) == 0:
        raise CorruptSampleError("empty (0 bytes)")
    codec = _codec(view)
    if codec is None:
        raise CorruptSampleError(f"not an image: unknown first bytes {bytes(view[:8])!r}")
    try:
        height, width, channels, orientation = _PARSERS[codec](view)
    except (IndexError, struct.error) as error:
        raise CorruptSampleError(f"{codec} header cut short at {len(view)} bytes") from error
    if height < 1 or width < 1:
        raise CorruptSampleError(f"{codec} header states {width} x {height} pixels")
    if orientation >= 5:
        height, width = width, height
    return ImageHeader(codec=codec, height=height, width=width, channels=channels, orientation=orientation)


def has_jpeg_end(data: Buffer) -> bool:
    """Whether a JPEG has its end marker after the last scan. Bytes after it are legal; one in a thumbnail is not it.

    Exact but for one case: a file that was cut inside a segment between two scans, after bytes that look like the
    marker, passes. (Cheap, for it only routes: decoding has the last word.)
    """
    view = memoryview(data).cast("B")
    try:
        position = _first_scan(view)
    except (IndexError, struct.error, CorruptSampleError):
        return False
    if view[-2:] == _END:
        return True
    while (match := _MARKER.search(view, position)) is not None:
        marker = view[match.start() + 1]
        if marker == 0xD9:
            return True
        if match.start() + 4 > len(view):
            return False
        position = match.start() + 2 + _u16(view, match.start() + 2)
    return False


_Found = tuple[int, int, int, int]
_END = b"\xff\xd9"
# Inside a scan 0xFF is followed by 0 (stuffing), a restart marker, or more fill bytes; all else is a marker.
_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]", re.DOTALL)
_FRAME_MARKERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_BARE_MARKERS = frozenset({0x01, *range(0xD0, 0xD9)})
_PNG_CHANNELS = {0: 1, 2: 3, 3: 3, 4: 2, 6: 4}


def _codec(view: memoryview) -> str | None:
    start = bytes(view[:12])
    if start[:3] == b"\xff\xd8\xff":
        return "jpeg"
    if start[:8] == b"\x89PNG\r\n\x1a\n":
        return "png"
    if start[:4] == b"RIFF" and start[8:12] == b"WEBP":
        return "webp"
    if start[:6] in (b"GIF87a", b"GIF89a"):
        return "gif"
    if start[:4] in (b"II*\0", b"MM\0*"):
        return "tiff"
    if start[:2] == b"BM":
        return "bmp"
    if start[:1] == b"P" and start[1:2] in b"123456" and start[2:3].isspace():
        return "ppm"
    if start[:4] == b"\xff\x4f\xff\x51" or start == b"\0\0\0\x0cjP  \r\n\x87\n":
        return "jp2"
    return None


def _u16(view: memoryview, at: int) -> int:
    return (view[at] << 8) | view[at + 1]


def _segments_until(view: memoryview, stop_markers: frozenset[int]) -> tuple[int, int, int]:
    """(marker, position of its payload, EXIF orientation met before) of the first segment in `stop_markers`."""
    position, orientation = 2, 1
    while True:
        if view[position] != 0xFF:
            raise CorruptSampleError(f"jpeg has no marker at byte {position}")
        marker = view[position + 1]
        if marker == 0xFF:
            position += 1
        elif marker in _BARE_MARKERS:
            position += 2
        elif marker in stop_markers:
            return marker, position + 2, orientation
        elif marker in (0xD9, 0xDA):
            raise CorruptSampleError("jpeg has no frame header before its scan or end")
        else:
            length = _u16(view, position + 2)
            if marker == 0xE1 and bytes(view[position + 4 : position + 10]) == b"Exif\0\0":
                orientation = _exif_orientation(view[position + 10 : position + 2 + length])
            position += 2 + length


def _jpeg(view: memoryview) -> _Found:
    _, at, orientation = _segments_until(view, _FRAME_MARKERS)
    return _u16(view, at + 3), _u16(view, at + 5), view[at + 7], orientation


def _first_scan(view: memoryview) -> int:
    """Where the entropy-coded bytes of the first scan start."""
    _, at, _ = _segments_until(view, frozenset({0xDA}))
    return at + _u16(view, at)


def _exif_orientation(tiff: memoryview) -> int:
    """The orientation tag of a TIFF structure; 1 when it is absent or damaged (decoders ignore it then too)."""
    try:
        value = _tiff_tags(tiff).get(274, 1)
    except (IndexError, struct.error, CorruptSampleError):
        return 1
    return value if 1 <= value <= 8 else 1


def _tiff_tags(tiff: memoryview) -> dict[int, int]:
    """The tags of the first directory that hold an integer, or the count of values where they hold several."""
    order = {b"II": "<", b"MM": ">"}.get(bytes(tiff[:2]))
    if order is None:
        raise CorruptSampleError("tiff has no byte order")
    (directory,) = struct.unpack_from(f"{order}I", tiff, 4)
    (count,) = struct.unpack_from(f"{order}H", tiff, directory)
    tags = {}
    for at in range(directory + 2, directory + 2 + 12 * count, 12):
        tag, kind, num_values = struct.unpack_from(f"{order}HHI", tiff, at)
        letter = {1: "B", 3: "H", 4: "I"}.get(kind)
        if letter is not None:
            tags[tag] = struct.unpack_from(f"{order}{letter}", tiff, at + 8)[0] if num_values == 1 else num_values
    return tags


def _tiff(view: memoryview) -> _Found:
    tags = _tiff_tags(view)
    channels = 3 if tags.get(262) == 3 else tags.get(277, 1)
    orientation = tags.get(274, 1)
    return tags.get(257, 0), tags.get(256, 0), channels, orientation if 1 <= orientation <= 8 else 1


def _png(view: memoryview) -> _Found:
    width, height, _, kind = struct.unpack_from(">IIBB", view, 16)
    if bytes(view[12:16]) != b"IHDR" or kind not in _PNG_CHANNELS:
        raise CorruptSampleError("png does not start with a valid IHDR chunk")
    orientation, at = 1, 33
    while at + 8 <= len(view):
        length, name = struct.unpack_from(">I4s", view, at)
        if name == b"eXIf":
            orientation = _exif_orientation(view[at + 8 : at + 8 + length])
        if name in (b"eXIf", b"IDAT", b"IEND"):
            break
        at += 12 + length
    return height, width, _PNG_CHANNELS[kind], orientation


def _webp(view: memoryview) -> _Found:
    kind = bytes(view[12:16])
    if kind == b"VP8 ":
        if bytes(view[23:26]) != b"\x9d\x01\x2a":
            raise CorruptSampleError("webp has no key frame")
        width, height = struct.unpack_from("<HH", view, 26)
        return height & 0x3FFF, width & 0x3FFF, 3, 1
    if kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", view, 21)
        return ((bits >> 14) & 0x3FFF) + 1, (bits & 0x3FFF) + 1, 4 if bits >> 28 & 1 else 3, 1
    if kind != b"VP8X":
        raise CorruptSampleError(f"webp has an unknown first chunk {kind!r}")
    flags = view[20]
    width = int.from_bytes(view[24:27], "little") + 1
    height = int.from_bytes(view[27:30], "little") + 1
    orientation, at = 1, 30
    while flags & 0x08 and at + 8 <= len(view):
        name, length = struct.unpack_from("<4sI", view, at)
        if name == b"EXIF":
            body = view[at + 8 : at + 8 + length]
            orientation = _exif_orientation(body[6:] if bytes(body[:6]) == b"Exif\0\0" else body)
            break
        at += 8 + length + (length & 1)
    return height, width, 4 if flags & 0x10 else 3, orientation


def _bmp(view: memoryview) -> _Found:
    (header_bytes,) = struct.unpack_from("<I", view, 14)
    if header_bytes == 12:
        width, height, _, bits = struct.unpack_from("<HHHH", view, 18)
    else:
        width, height, _, bits = struct.unpack_from("<iiHH", view, 18)
    return abs(height), width, 4 if bits == 32 else 3, 1


def _gif(view: memoryview) -> _Found:
    width, height = struct.unpack_from("<HH", view, 6)
    return height, width, 3, 1


def _ppm(view: memoryview) -> _Found:
    text = re.sub(rb"#[^\n]*", b"", bytes(view[2:512])).split(None, 2)
    if len(text) < 2 or not (text[0].isdigit() and text[1].isdigit()):
        raise CorruptSampleError("ppm header has no size")
    return int(text[1]), int(text[0]), 3 if view[1] in b"36" else 1, 1


def _jp2(view: memoryview) -> _Found:
    if bytes(view[:2]) == b"\xff\x4f":
        width, height, left, top = struct.unpack_from(">IIII", view, 8)
        (channels,) = struct.unpack_from(">H", view, 40)
        return height - top, width - left, channels, 1
    at = bytes(view[:512]).find(b"ihdr")
    if at < 0:
        raise CorruptSampleError("jp2 has no image header box")
    height, width, channels = struct.unpack_from(">IIH", view, at + 4)
    return height, width, channels, 1


_PARSERS = {
    "jpeg": _jpeg,
    "png": _png,
    "webp": _webp,
    "bmp": _bmp,
    "gif": _gif,
    "tiff": _tiff,
    "ppm": _ppm,
    "jp2": _jp2,
}
