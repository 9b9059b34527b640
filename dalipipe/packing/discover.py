"""What a source holds: images in class folders, flat, or with a table of labels; Parquet files; tars."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from dalipipe.errors import ObjectNotFoundError, SourceError
from dalipipe.packing.config import PackConfig
from dalipipe.packing.sample import Keys, Member, SourceSample, text_member
from dalipipe.packing.tables import Labels, read_labels
from dalipipe.shards.digest import Digest128
from dalipipe.shards.fields import IMAGE_EXTENSIONS
from dalipipe.storage.store import ObjectInfo, Store

TAR_ENDINGS = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
Listed = Callable[[int], None]
"""(names listed so far)."""
_LISTED_EVERY = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """A source. samples: sorted by name, known from the listing alone. inputs: files that hold samples and are still
    to be opened (tars, Parquet), sorted; one of the two is empty. classes: by label (empty: none, or not known yet).
    skipped: files left aside, by kind. digest: 32 hexadecimal digits over paths, sizes and version marks."""

    samples: list[SourceSample]
    inputs: list[ObjectInfo]
    classes: tuple[str, ...]
    skipped: dict[str, int]
    digest: str


def discover(
    store: Store,
    config: PackConfig | None = None,
    listed: Listed = lambda _count: None,
    *,
    found: Iterable[ObjectInfo] | None = None,
) -> Listing:
    """Lists a source, one name at a time.

    Class folders: the first folder of a path is the class; deeper folders only group. With `pack.labels` the table
    says which files there are. Parquet files are taken where there are no images.

    Args:
        found: what was listed already.

    Raises:
        SourceError: the source is missing, holds nothing to pack, or holds images both beside and in folders.
    """
    config = config or PackConfig()
    names, skipped = _list(store, listed, found)
    if config.kind == "tars":
        tars = _of_endings(names, skipped, TAR_ENDINGS)
        if not tars:
            raise SourceError(
                f"the source {store.url} holds no tar: looked for {', '.join(TAR_ENDINGS)}, found "
                f"{_counts(skipped) or 'nothing at all: is it a folder that exists?'}; check source=, or "
                "use pack=images"
            )
        return Listing(samples=[], inputs=tars, classes=(), skipped=_sorted(skipped), digest=_digest(tars))
    endings = tuple(f".{extension}" for extension in IMAGE_EXTENSIONS)
    parquet = [info for info in names if info.key.lower().endswith(".parquet") and info.key != config.labels]
    others = Counter(skipped)
    images = _of_endings(names, skipped, endings)
    if not images and parquet:
        _of_endings(names, others, (".parquet",))
        return Listing(samples=[], inputs=parquet, classes=(), skipped=_sorted(others), digest=_digest(parquet))
    if not images:
        tars = _of_endings(names, others, TAR_ENDINGS)
        remedy = "use pack=tars for the tars in it" if tars else "check source="
        raise SourceError(
            f"the source {store.url} holds no image: looked for {', '.join(IMAGE_EXTENSIONS)} in it and its folders, "
            f"found {_counts(skipped) or 'nothing at all: is it a folder that exists?'}; {remedy}"
        )
    if config.labels:
        return _with_table(store, images, skipped, read_labels(store, config.labels, config.columns))
    return _in_folders(store, images, skipped)


def unique_keys(paths: Iterable[str]) -> list[str]:
    """The sample keys of files: their path without the extension, see `Keys`."""
    keys = Keys()
    return [keys.key(_stem(path), path) for path in paths]


def _list(store: Store, listed: Listed, given: Iterable[ObjectInfo] | None) -> tuple[list[ObjectInfo], Counter[str]]:
    skipped: Counter[str] = Counter()
    found: list[ObjectInfo] = []
    try:
        for number, info in enumerate(store.list() if given is None else given):
            if number % _LISTED_EVERY == 0:
                listed(number)
            reason = _why_skipped(info.key)
            if reason is None:
                found.append(info)
            else:
                skipped[reason] += 1
    except (ObjectNotFoundError, NotADirectoryError) as error:
        raise SourceError(f"the source {store.url} does not exist or is no folder: {error}; check source=") from error
    found.sort(key=lambda info: info.key)
    return found, skipped


def _of_endings(found: list[ObjectInfo], skipped: Counter[str], endings: tuple[str, ...]) -> list[ObjectInfo]:
    """Those with one of the endings; the others are counted as skipped."""
    taken = []
    for info in found:
        if info.key.lower().endswith(endings):
            taken.append(info)
        else:
            skipped[f".{info.key.rpartition('.')[2].lower()}"] += 1
    return taken


def _in_folders(store: Store, images: list[ObjectInfo], skipped: Counter[str]) -> Listing:
    classes = _classes(store.url, [info.key for info in images])
    labels = {name: text_member("cls", str(label)) for label, name in enumerate(classes)}
    keys = Keys()
    samples = []
    for info in images:
        label = labels.get(info.key.partition("/")[0])
        members = (_image(info), label) if label is not None else (_image(info),)
        samples.append(SourceSample(info.key, keys.key(_stem(info.key), info.key), members))
    return Listing(samples=samples, inputs=[], classes=classes, skipped=_sorted(skipped), digest=_digest(images))


def _with_table(store: Store, images: list[ObjectInfo], skipped: Counter[str], labels: Labels) -> Listing:
    """The images that the table names; those it does not name are skipped."""
    by_path = {info.key: info for info in images}
    missing = [path for path in labels.rows if path not in by_path]
    if missing:
        raise SourceError(
            f"{labels.name} names {len(missing)} files that {store.url} does not hold, such as {missing[0]!r}; its "
            "paths must be relative to the source, with their extension"
        )
    named = [by_path[path] for path in sorted(labels.rows)]
    if len(named) < len(images):
        skipped["not in the table"] += len(images) - len(named)
    keys = Keys()
    samples = [
        SourceSample(info.key, keys.key(_stem(info.key), info.key), (_image(info), *labels.rows[info.key]))
        for info in named
    ]
    return Listing(
        samples=samples,
        inputs=[],
        classes=labels.classes,
        skipped=_sorted(skipped),
        digest=_digest([*named, labels.info]),
    )


def _image(info: ObjectInfo) -> Member:
    return Member(info.key.rpartition(".")[2].lower(), info.num_bytes, path=info.key)


def _stem(path: str) -> str:
    folder, slash, name = path.rpartition("/")
    return f"{folder}{slash}{name.rpartition('.')[0]}"


def _why_skipped(path: str) -> str | None:
    if path.startswith(".") or "/." in path:
        return "hidden"
    return None if path.rfind(".") > path.rfind("/") + 1 else "no extension"


def _classes(url: str, paths: list[str]) -> tuple[str, ...]:
    flat = [path for path in paths if "/" not in path]
    if flat and len(flat) < len(paths):
        raise SourceError(
            f"the source {url} holds {len(flat)} images beside its class folders (such as {flat[0]!r}) and "
            f"{len(paths) - len(flat)} in them, so their class is unknown; move them into a class folder, pack "
            "a folder that holds either images or class folders, or give pack.labels=FILE"
        )
    return () if flat else tuple(sorted({path.partition("/")[0] for path in paths}))


def _digest(found: list[ObjectInfo]) -> str:
    digest = Digest128()
    for info in found:
        digest.update(f"{info.key}\0{info.num_bytes}\0{info.etag}\n".encode("utf-8", "surrogatepass"))
    return digest.hex


def _sorted(skipped: Counter[str]) -> dict[str, int]:
    return dict(sorted(skipped.items()))


def _counts(skipped: Counter[str]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in skipped.most_common(5))
