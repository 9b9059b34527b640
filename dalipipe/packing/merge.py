"""One data set of several, by manifest: their shards stay where they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace

from dalipipe.errors import ConfigError, TargetExistsError
from dalipipe.packing.index import has_manifest
from dalipipe.packing.verify import open_linked
from dalipipe.packing.written import Written, known_digests, publish, read_digests, rows_of
from dalipipe.shards.manifest import Manifest
from dalipipe.storage.store import StorageConfig, Store
from dalipipe.storage.url import is_link, link_from, link_target

Progress = Callable[[int, int], None]
"""(shards done, shards in all)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeReport:
    """What was merged. blocks_without_checksum: blocks that are cut anew, so that no manifest knew their digest."""

    samples: int
    shards: int
    blocks: int
    blocks_without_checksum: int
    bytes: int
    identity: str


def merge(
    sources: Sequence[str],
    target: str,
    storage: StorageConfig,
    *,
    checksums: bool = False,
    overwrite: bool = False,
    progress: Progress = lambda _done, _total: None,
) -> MergeReport:
    """Writes a manifest at the URL `target` over the data sets at `sources`, in that order.

    Shards are named by relative paths where they share a root with the target, else by whole URLs. Blocks are as large
    as the smallest of the sources' blocks. Memory is that of all indices, about 250 bytes a sample.

    Args:
        checksums: read the shards whose blocks are cut anew, so that every block has a checksum.

    Raises:
        ConfigError: fewer than two sources, one twice, or data sets that do not go together.
        ManifestError: a source is no data set. TargetExistsError: the target has a manifest already.
    """
    if len(sources) < 2:
        raise ConfigError(f"merge needs at least two data sets, sources=[URL,URL], got {list(sources)}")
    with ExitStack() as stack:
        place = stack.enter_context(closing(open_linked(target, storage)))
        stores = [stack.enter_context(closing(open_linked(url, storage))) for url in sources]
        urls = [store.url for store in stores]
        if len(set(urls)) < len(urls) or place.url in urls:
            raise ConfigError(f"merge: sources={urls} and target={place.url} must all differ")
        if not overwrite and has_manifest(place):
            raise TargetExistsError(f"{place.url} has a manifest already; choose another target, or set overwrite=true")
        manifests = [Manifest.open(store.read) for store in stores]
        _check_same_kind(urls, manifests)
        size = min(manifest.block_samples for manifest in manifests)
        total = sum(manifest.num_shards for manifest in manifests)
        shards: list[Written] = []
        for store, manifest in zip(stores, manifests, strict=True):
            for number in range(manifest.num_shards):
                shards.append(_written(place, store, manifest, number))
                progress(len(shards), total)
        if checksums:
            shards = _completed(place, shards, size, storage.concurrency)
        unknown = _count_unknown(shards, size)
        made_by = {"merged": " ".join(manifest.identity for manifest in manifests)}
        files = publish(
            place, shards, kind=manifests[0].kind, classes=manifests[0].classes, block_samples=size, made_by=made_by
        )
    return MergeReport(
        samples=files.num_samples,
        shards=len(shards),
        blocks=-(-files.num_samples // size),
        blocks_without_checksum=unknown,
        bytes=files.num_bytes,
        identity=files.identity,
    )


def _check_same_kind(urls: Sequence[str], manifests: Sequence[Manifest]) -> None:
    first = manifests[0]
    for url, manifest in zip(urls, manifests, strict=True):
        if manifest.kind != first.kind:
            raise ConfigError(f"{url} holds {manifest.kind}, {urls[0]} {first.kind}; only sets of one kind merge")
        if manifest.classes != first.classes:
            raise ConfigError(
                f"{url} has {len(manifest.classes)} classes, {urls[0]} {len(first.classes)}, or under other numbers: "
                "a label would mean two things. Pack them together, or mix them with data.mix"
            )


def _written(place: Store, store: Store, manifest: Manifest, number: int) -> Written:
    shard, index = manifest.shard(number), manifest.index(number)
    url = f"{store.url}/{shard.name}"
    if is_link(shard.name):
        url = "/".join(link_target(store.url, shard.name))
    present = {name for name, (offsets, _) in index.rows_fields.items() if (offsets >= 0).any()}
    return Written(
        name=link_from(place.url, url),
        num_bytes=shard.num_bytes,
        digest=shard.digest,
        rows=rows_of(index),
        extensions=tuple(e for field in manifest.fields if field.name in present for e in field.extensions),
        known=known_digests(index),
    )


def _completed(place: Store, shards: list[Written], size: int, concurrency: int) -> list[Written]:
    """The shards with the digests of all their block parts; those that lack some are read once."""
    firsts, first = [], 0
    for shard in shards:
        firsts.append(first)
        first += shard.rows.num_samples

    def complete(pair: tuple[Written, int]) -> Written:
        shard, at = pair
        extents = shard.extents(at, size)
        if all(extent in shard.known for extent in extents):
            return shard
        return replace(shard, known=read_digests(place, shard.name, shard.num_bytes, extents)[1])

    with ThreadPoolExecutor(concurrency, thread_name_prefix="merge") as pool:
        return list(pool.map(complete, zip(shards, firsts, strict=True)))


def _count_unknown(shards: Sequence[Written], size: int) -> int:
    blocks: set[int] = set()
    first = 0
    for shard in shards:
        for part, extent in enumerate(shard.extents(first, size)):
            if extent not in shard.known:
                blocks.add(first // size + part)
        first += shard.rows.num_samples
    return len(blocks)
