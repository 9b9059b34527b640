"""A small lake of real JPEGs, cut from the photographs that the scikit-image package ships. No network."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable
from pathlib import Path

from PIL import Image, UnidentifiedImageError

from dalipipe.errors import CorruptSampleError, DependencyError, SourceError

# Colour photographs among that package's files; each becomes a class.
_PHOTOS = ("astronaut", "chelsea", "coffee", "hubble_deep_field", "ihc", "motorcycle_left", "retina", "rocket")
_SUFFIXES = (".jpg", ".jpeg", ".png")
_SIDE = (160, 360)  # pixels of a crop
_QUALITY = (82, 95)


def shipped_photos() -> list[Path]:
    """The photographs on this machine that the demo's lake is cut from.

    Raises:
        DependencyError: scikit-image is not installed, or its files moved.
    """
    spec = importlib.util.find_spec("skimage")  # finds the folder without the seconds that the import costs
    folders = list(spec.submodule_search_locations or []) if spec else []
    found = [path for folder in folders for name in _PHOTOS for path in sorted(Path(folder, "data").glob(f"{name}.*"))]
    if len(found) < 2:
        raise DependencyError(
            "the demo cuts its lake from the photographs of scikit-image, which is not installed: "
            "pip install 'dalipipe[demo]', or give a folder of photographs with photos=DIR"
        )
    return found


def photos_in(folder: Path) -> list[Path]:
    """The photographs in a folder of the user's.

    Raises:
        SourceError: the folder is missing or holds fewer than two photographs.
    """
    found = sorted(path for path in folder.glob("*") if path.suffix.lower() in _SUFFIXES)
    if len(found) < 2:
        raise SourceError(f"photos={folder} holds {len(found)} photographs (jpg, png); the demo needs at least 2")
    return found[:16]


def _open(path: Path) -> Image.Image:
    try:
        with Image.open(path) as photo:
            pixels: Image.Image = photo.convert("RGB")
            return pixels
    except UnidentifiedImageError as error:
        raise CorruptSampleError(f"{path} is no image that can be read; take it out of photos=") from error


def make_lake(
    photos: list[Path], target: Path, *, images: int, seed: int, progress: Callable[[int, int], None]
) -> None:
    """Writes `images` JPEGs as `target/<photo>/<number>.jpg`: crops at random places, sizes and qualities."""
    rng = random.Random(seed)
    pixels = [_open(path) for path in photos]
    for number in range(images):
        which = number % len(photos)
        photo = pixels[which]
        width, height = (min(rng.randint(*_SIDE), side) for side in photo.size)
        left, top = rng.randint(0, photo.width - width), rng.randint(0, photo.height - height)
        folder = target / photos[which].stem
        folder.mkdir(parents=True, exist_ok=True)
        crop = photo.crop((left, top, left + width, top + height))
        crop.save(folder / f"{number:06d}.jpg", quality=rng.randint(*_QUALITY))
        progress(number + 1, images)
