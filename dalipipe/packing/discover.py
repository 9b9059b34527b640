"""Which images a source holds: class folders, or one flat folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from dalipipe.errors import ObjectNotFoundError, SourceError
from dalipipe.shards.digest import Digest128, digest64
from dalipipe.shards.fields import IMAGE_EXTENSIONS
from dalipipe.storage.store import ObjectInfo, Store

UNLABELLED = -1


@dataclass(frozen=True, slots=True)
class SourceImage:
    """One image: `path` relative to the source, `key` in the shards, bytes as listed, label (-1: no classes)."""

    path: str
    key: str
    num_bytes: int
    label: int

    @property
    def extension(self) -> str:
        """The file extension, lower case, without a dot."""
        return self.path.rpartition(".")[2].lower()


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """A source: its images sorted by path, the class names by label (empty: flat), what was skipped by kind, and a
    digest (32 hexadecimal digits) over paths, sizes and version marks."""

    images: list[SourceImage]
    classes: tuple[str, ...]
    skipped: dict[str, int]
    digest: str


def discover(store: Store) -> Listing:
    """Lists a source. The first folder of a path is the class; deeper folders only group.

    Raises:
        SourceError: the source is missing, holds no image, or holds images both beside and in folders.
    """
    skipped: Counter[str] = Counter()
    found: list[ObjectInfo] = []
    try:
        for info in store.list():
            reason = _why_skipped(info.key)
            if reason is None:
                found.append(info)
            else:
                skipped[reason] += 1
    except (ObjectNotFoundError, NotADirectoryError) as error:
        raise SourceError(f"the source {store.url} does not exist or is no folder: {error}; check source=") from error
    if not found:
        raise SourceError(
            f"the source {store.url} holds no image: looked for {', '.join(IMAGE_EXTENSIONS)} in it and its folders, "
            f"found {_counts(skipped) or 'nothing at all'}; check source="
        )
    found.sort(key=lambda info: info.key)
    classes = _classes(store.url, [info.key for info in found])
    label_of = {name: label for label, name in enumerate(classes)}
    images = [
        SourceImage(info.key, key, info.num_bytes, label_of.get(info.key.partition("/")[0], UNLABELLED))
        for info, key in zip(found, unique_keys(info.key for info in found), strict=True)
    ]
    return Listing(images=images, classes=classes, skipped=dict(sorted(skipped.items())), digest=_digest(found))


def unique_keys(paths: Iterable[str]) -> list[str]:
    """The sample keys of files: their path without the extension.

    Readers of WebDataset split a name at the first dot of its last part, so dots there become `_`; so do characters
    that cannot be written as UTF-8 text in a tar. Where two files would get one key, or such a character was
    replaced, all but the first get a hash of their path appended.
    """
    taken: set[str] = set()
    keys = []
    for path in paths:
        folder, slash, name = path.rpartition("/")
        plain = f"{folder}{slash}{name.rpartition('.')[0].replace('.', '_')}"
        key = "".join(c if c.isprintable() else "_" for c in plain)
        if key in taken or key != plain:
            key = f"{key}-{digest64(path.encode('utf-8', 'surrogatepass')):016x}"
        taken.add(key)
        keys.append(key)
    return keys


def _why_skipped(path: str) -> str | None:
    *folders, name = path.split("/")
    if name.startswith(".") or any(folder.startswith(".") for folder in folders):
        return "hidden"
    stem, dot, extension = name.rpartition(".")
    if not (stem and dot):
        return "no extension"
    return None if extension.lower() in IMAGE_EXTENSIONS else f".{extension.lower()}"


def _classes(url: str, paths: list[str]) -> tuple[str, ...]:
    flat = [path for path in paths if "/" not in path]
    if flat and len(flat) < len(paths):
        raise SourceError(
            f"the source {url} holds {len(flat)} images beside its class folders (such as {flat[0]!r}) and "
            f"{len(paths) - len(flat)} in them, so their class is unknown; move them into a class folder, or pack "
            "a folder that holds either images or class folders"
        )
    return () if flat else tuple(sorted({path.partition("/")[0] for path in paths}))


def _digest(found: list[ObjectInfo]) -> str:
    digest = Digest128()
    for info in found:
        digest.update(f"{info.key}\0{info.num_bytes}\0{info.etag}\n".encode("utf-8", "surrogatepass"))
    return digest.hex


def _counts(skipped: Counter[str]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in skipped.most_common(5))
