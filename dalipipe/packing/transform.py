"""Shrinking and encoding images again while they are packed."""

from __future__ import annotations

import io
import struct
from dataclasses import dataclass
from typing import Any

from dalipipe.errors import CorruptSampleError
from dalipipe.packing.config import PackConfig
from dalipipe.shards.imageheader import parse_image_header

_EXTENSIONS = {"jpeg": "jpg", "webp": "webp", "png": "png"}
_SHRINK_GAP = 3.0
"""JPEGs are decoded at a half, a quarter or an eighth of their size where that stays this many times above the goal,
so that the filter still sees enough pixels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transform:
    """`pack.resize` (short side, 0: none), `pack.reencode` (empty: as it was), `pack.quality`, `pack.device`."""

    resize: int
    reencode: str
    quality: int
    device: str

    @classmethod
    def of(cls, config: PackConfig) -> Transform | None:
        """The transform that a configuration asks for, or None when bytes are kept as they are."""
        if not (config.resize or config.reencode):
            return None
        reencode = "jpeg" if config.reencode == "jpg" else config.reencode
        return cls(resize=config.resize, reencode=reencode, quality=config.quality, device=config.device)

    def apply(self, data: memoryview, extension: str) -> tuple[memoryview, str, int, int]:
        """(bytes, extension, height, width) of an image.

        Nothing is encoded again without need: an image that is small enough and keeps its format keeps its bytes.
        What is encoded again is upright and RGB (or grey), with its colour profile and without other metadata. Equal
        input gives equal bytes with the same Pillow.

        Raises:
            CorruptSampleError: Pillow cannot decode it; the message is the reason alone.
        """
        header = parse_image_header(data)
        short = min(header.height, header.width)
        shrinks = 0 < self.resize < short
        if not shrinks and self.reencode in ("", header.codec):
            return data, extension, header.height, header.width
        wanted = self.reencode or (header.codec if header.codec in _EXTENSIONS else "jpeg")
        if self.device != "cpu" and wanted == "jpeg":
            from dalipipe.graphs.encode import shrink

            encoded, height, width = shrink(
                data, short_side=self.resize if shrinks else 0, quality=self.quality, device=self.device
            )
        else:
            encoded, height, width = _on_cpu(data, self.resize if shrinks else 0, wanted, self.quality)
        return memoryview(encoded), _EXTENSIONS[wanted], height, width


def _on_cpu(data: memoryview, short_side: int, wanted: str, quality: int) -> tuple[bytes, int, int]:
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(data)) as opened:
            image: Any = opened
            profile = image.info.get("icc_profile")
            width, height = image.size
            goal = _shrunk(width, height, short_side) if short_side else (width, height)
            if short_side:
                image.draft("RGB", (int(goal[0] * _SHRINK_GAP), int(goal[1] * _SHRINK_GAP)))
            image = _plain(image)
            if image.size != goal:
                image = image.resize(goal, Image.Resampling.LANCZOS)
            image = _upright(image)
            sink = io.BytesIO()
            options: dict[str, Any] = {} if wanted == "png" else {"quality": quality}
            if profile and wanted == "jpeg" and image.mode == "RGB":
                options["icc_profile"] = profile
            _bare(image).save(sink, wanted.upper(), **options)
            return sink.getvalue(), image.height, image.width
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise CorruptSampleError(f"Pillow cannot decode it ({error})") from error


def _plain(image: Any) -> Any:
    """RGB or grey; transparency over white, as the decoders of training drop it."""
    if image.mode in ("RGB", "L"):
        image.load()
        return image
    exif = image.getexif()
    plain = image.convert("L" if image.mode in ("1", "I;16", "I", "F") else "RGB")
    plain.info = dict(plain.info)
    if exif:
        plain.info["exif"] = exif.tobytes()
    return plain


def _upright(image: Any) -> Any:
    """Turned as its EXIF says; as it is where the EXIF cannot be read, as decoders do."""
    from PIL import ImageOps

    try:
        return ImageOps.exif_transpose(image)
    except (SyntaxError, OSError, ValueError, KeyError, TypeError, struct.error):
        return image


def _bare(image: Any) -> Any:
    """The pixels without what would be saved beside them."""
    image.info = {}
    return image


def _shrunk(width: int, height: int, short_side: int) -> tuple[int, int]:
    scale = short_side / min(width, height)
    return max(short_side, round(width * scale)), max(short_side, round(height * scale))
