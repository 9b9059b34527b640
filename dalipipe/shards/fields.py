"""Which field of a sample a file extension belongs to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

IMAGE_EXTENSIONS = ("bmp", "jp2", "jpeg", "jpg", "png", "ppm", "tif", "tiff", "webp")
"""What the decoders of every backend read (GIF and AVIF are not among it)."""

_FIELD_OF = dict.fromkeys(IMAGE_EXTENSIONS, "image") | {"cls": "label", "json": "json", "txt": "text"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """A field of a sample and the file extensions it has in the shards (sorted, without a dot)."""

    name: str
    extensions: tuple[str, ...]


def field_of(extension: str) -> str:
    """The field of a file extension (without a dot, any case): `image`, `label`, `json`, `text`, else itself."""
    lower = extension.lower()
    return _FIELD_OF.get(lower, lower)


def fields_of(extensions: Iterable[str]) -> tuple[Field, ...]:
    """The fields that a set of extensions makes, sorted by name."""
    found: dict[str, set[str]] = {}
    for extension in extensions:
        found.setdefault(field_of(extension), set()).add(extension)
    return tuple(Field(name=name, extensions=tuple(sorted(found[name]))) for name in sorted(found))
