"""Which encoded images cannot be decoded, and why.

Two depths: `suspicion` looks at the two ends of the bytes (microseconds, in the training path), `undecodable` decodes
each image on its own with the decoder that DALI uses, on the CPU (at packing, and to find the bad one of a batch).
"""

from __future__ import annotations

import functools
import operator
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from dalipipe.errors import CorruptSampleError
from dalipipe.order.step import Bytes
from dalipipe.shards.imageheader import parse_image_header

DEFAULT_MAX_PIXELS = 2**28

# Images decoded at once hold at most about this many pixels (3 bytes each), one large image excepted.
_CHUNK_PIXELS = 2**24
_CHUNK_IMAGES = 32
_GAVE_UP = "damaged or cut short: the decoder gave up"

_JPEG_START, _JPEG_END = b"\xff\xd8", b"\xff\xd9"
_PNG_START, _PNG_END = b"\x89PNG\r\n\x1a\n", b"IEND\xaeB`\x82"


def suspicion(data: Bytes) -> str | None:
    """What looks wrong at the ends of the bytes (uint8 [n]) and in a JPEG's tables, or None. A few µs.

    A hint, never a verdict: bytes after the end marker are legal. Formats without a start or end marker to look for
    are not suspected here.
    """
    head, tail = data[:12].tobytes(), data[-8:].tobytes()
    if head.startswith(_JPEG_START):
        if not tail.endswith(_JPEG_END):
            return "jpeg does not end with its end marker"
        return None if _has_sound_tables(data.data) else "jpeg header is damaged"
    if head.startswith(_PNG_START):
        return None if tail == _PNG_END else "png does not end with its IEND chunk"
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        stated_bytes = int.from_bytes(head[4:8], "little") + 8
        return None if stated_bytes <= len(data) else f"webp of {stated_bytes} bytes is cut short at {len(data)}"
    if head[:2] in (b"BM", b"II", b"MM", b"P5", b"P6") or head[4:8] in (b"jP  ", b"ftyp") or head[:2] == b"\xff\x4f":
        return None
    return "unknown format" if len(data) else "empty (0 bytes)"


def _has_sound_tables(view: memoryview) -> bool:
    """Whether the segments before the first scan follow each other, and what they say can be decoded (T.81, annex B.2):
    what else makes a decoder, and with it the whole batch, fail. Damage behind them makes none fail, it only shows."""
    at, is_progressive = 2, False
    tables: set[int] = set()  # as DHT names them, and 32 + a quantization table's number
    components: dict[int, int] = {}
    try:
        while True:
            marker = view[at + 1]
            if view[at] != 0xFF:
                return False
            if marker == 0xFF:  # fill
                at += 1
                continue
            stop = at + 2 + (view[at + 2] << 8 | view[at + 3])
            segment = view[at + 4 : stop]
            if marker == 0xDA:
                return _is_sound_scan(segment, components, tables, is_progressive)
            if marker == 0xC4:
                if not _take_codes(segment, tables):
                    return False
            elif marker == 0xDB:
                place = 0
                while place < len(segment):
                    tables.add(32 + (segment[place] & 15))
                    place += 129 if segment[place] >> 4 else 65
                if place != len(segment):
                    return False
            elif 0xC0 <= marker <= 0xC2:  # baseline, extended or progressive
                if components or not _is_sound_frame(segment):
                    return False
                is_progressive = marker == 0xC2
                components = dict(zip(segment[6::3], segment[8::3], strict=True))
            elif marker < 0xDD or 0xEF < marker < 0xFE:  # neither an interval, an application's nor a comment
                return False
            at = stop
    except IndexError:
        return False


def _is_sound_frame(segment: memoryview) -> bool:
    """Whether a frame has 8 bits a sample, pixels, and components that are a whole part of the largest."""
    if segment[0] != 8 or not 6 < len(segment) == 6 + 3 * segment[5] or not (any(segment[1:3]) and any(segment[3:5])):
        return False
    across, down = ([factors >> shift & 15 for factors in segment[7::3]] for shift in (4, 0))
    for factors in (across, down):
        largest = max(factors)
        if largest > 4 or 0 in factors or any(largest % factor for factor in factors):
            return False
    return True


def _is_sound_scan(segment: memoryview, components: dict[int, int], tables: set[int], is_progressive: bool) -> bool:
    """Whether the first scan is of components (identifier -> quantization table) of the frame, which have their
    tables."""
    chosen = set(segment[1:-3:2])
    if not len(segment) == 4 + 2 * segment[0] == 4 + 2 * len(chosen) > 4:
        return False
    if any(32 + components.get(one, 32) not in tables for one in chosen):
        return False
    if is_progressive and (segment[-3] or segment[-2] or segment[-1] > 13):  # DC alone, to any bit, comes first
        return False
    for codes in set(segment[2:-3:2]):
        if codes >> 4 not in tables or not (is_progressive or 16 | codes & 15 in tables):
            return False
    return True


# The share that a Huffman code of 1 to 16 bits takes of all, in 2**16ths.
_SHARES = tuple(1 << 16 - bits for bits in range(1, 17))


def _take_codes(segment: memoryview, tables: set[int]) -> bool:
    """Notes the Huffman tables of a DHT segment; whether they can be codes and fill it."""
    place, stop = 0, len(segment)
    while place < stop:
        kind, counts = segment[place], segment[place + 1 : place + 17]
        num_codes = sum(counts)
        symbols = segment[place + 17 : place + 17 + num_codes]
        if not 0 < num_codes == len(symbols) <= 256 or sum(map(operator.mul, counts, _SHARES)) > 1 << 16:
            return False
        if kind & 0xEF > 3 or (kind < 16 and max(symbols) > 15):
            return False
        tables.add(kind)
        place += 17 + num_codes
    return place == stop


# Words of the reasons, and the few kinds that they are counted by.
_KINDS = (
    ("empty", "empty"),
    ("pixels are more than", "too_large"),
    ("the graph refuses", "refused"),
    ("damaged or cut short", "damaged"),
    ("cut short", "header"),
    ("header", "header"),
    ("format", "format"),
    ("not an image", "format"),
)
KINDS = ("empty", "too_large", "refused", "damaged", "header", "format", "other")
"""What reasons are counted by."""


def kind_of(reason: str) -> str:
    """The one of `KINDS` that a reason of this module or of `shards.imageheader` belongs to."""
    return next((kind for words, kind in _KINDS if words in reason), "other")


def upright_size(data: Bytes) -> tuple[int, int]:
    """Height and width in pixels after the EXIF rotation, from the header alone.

    Raises:
        CorruptSampleError: the header does not state them; the message is the reason alone.
    """
    header = parse_image_header(data.data)
    return header.height, header.width


def undecodable(
    samples: Sequence[bytes | Bytes], *, max_pixels: int = DEFAULT_MAX_PIXELS, num_threads: int = 1
) -> list[str | None]:
    """For each encoded image a short reason why it cannot be decoded, or None when it can.

    Images of more than `max_pixels` are refused by their header, without being decoded. Memory stays within the
    largest image plus about 50 MB.
    """
    arrays = [np.frombuffer(sample, np.uint8) if isinstance(sample, bytes) else sample for sample in samples]
    reasons: list[str | None] = [None] * len(arrays)
    chunk: list[int] = []
    chunk_pixels = 0
    for index, data in enumerate(arrays):
        num_pixels, reasons[index] = _pixels(data, max_pixels)
        if reasons[index] is not None:
            continue
        if chunk and (chunk_pixels + num_pixels > _CHUNK_PIXELS or len(chunk) == _CHUNK_IMAGES):
            _decode(arrays, chunk, reasons, num_threads)
            chunk, chunk_pixels = [], 0
        chunk.append(index)
        chunk_pixels += num_pixels
    if chunk:
        _decode(arrays, chunk, reasons, num_threads)
    return reasons


def failure(data: Bytes, *, max_pixels: int = DEFAULT_MAX_PIXELS) -> str:
    """The reason of `undecodable` for an image (uint8 [n]) that a decoder has given up already; decodes nothing."""
    reason = _pixels(data, max_pixels)[1]
    stream = None if reason else _stream(data)
    return reason or (stream if isinstance(stream, str) else _GAVE_UP)


def _pixels(data: Bytes, max_pixels: int) -> tuple[int, str | None]:
    try:
        header = parse_image_header(data.data)
    except CorruptSampleError as error:
        return 0, str(error)
    if header.codec == "gif":
        return 0, "gif is a format that no decoder here reads"
    if header.height * header.width > max_pixels:
        return 0, f"{header.width} x {header.height} pixels are more than quarantine.max_pixels={max_pixels}"
    return header.height * header.width, None


def _decode(arrays: Sequence[Bytes], chunk: Sequence[int], reasons: list[str | None], num_threads: int) -> None:
    streams, indices = [], []
    for index in chunk:
        stream = _stream(arrays[index])
        if isinstance(stream, str):
            reasons[index] = stream
        else:
            streams.append(stream)
            indices.append(index)
    if not streams:
        return
    # It would take one thread less than the CPUs anyway, and print a warning.
    decoder = _decoder(max(1, min(num_threads, len(os.sched_getaffinity(0)) - 1)))
    for index, image in zip(indices, decoder.decode(streams), strict=True):
        if image is None:
            reasons[index] = _GAVE_UP


def _stream(data: Bytes) -> Any:
    """nvImageCodec's view of the bytes, or the reason why it has none."""
    from nvidia import nvimgcodec

    try:
        return nvimgcodec.CodeStream(data)
    except RuntimeError as error:
        return f"the decoder does not know this format ({str(error).splitlines()[0][:80]})"


def open_decoder(num_threads: int) -> Any:
    """nvImageCodec's decoder on the CPU with that many threads; it gives None for an image that it cannot decode."""
    from nvidia import nvimgcodec

    return nvimgcodec.Decoder(
        device_id=nvimgcodec.NVIMGCODEC_DEVICE_CPU_ONLY,
        max_num_cpu_threads=num_threads,
        backends=[nvimgcodec.Backend(nvimgcodec.BackendKind.CPU_ONLY)],
    )


_decoder = functools.cache(open_decoder)
