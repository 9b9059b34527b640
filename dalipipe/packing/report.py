"""What a pack says when it is done."""

from __future__ import annotations

import time
from dataclasses import dataclass

from dalipipe.packing.discover import Listing
from dalipipe.packing.target import PackedBefore, Target


@dataclass(frozen=True, slots=True, kw_only=True)
class PackReport:
    """What was packed. `bytes` of all shards; `skipped` files that are no images, by kind in `skipped_kinds`;
    `already_packed`: the target held this very data set, and nothing was done."""

    samples: int
    shards: int
    bytes: int
    seconds: float
    quarantined: int
    duplicates: int
    skipped: int
    skipped_kinds: dict[str, int]
    identity: str
    already_packed: bool = False


def report_found(place: Target, before: PackedBefore, listing: Listing, begin_s: float) -> PackReport:
    """The report when the target holds this very data set already."""
    manifest = before.manifest
    place.finish({manifest.shard(i).name for i in range(manifest.num_shards)})
    return report_of(
        listing,
        (manifest.num_samples, manifest.num_shards, manifest.num_bytes),
        manifest.identity,
        begin_s,
        quarantined=before.num_quarantined,
        duplicates=int(manifest.made_by.get("duplicates", "0")),
        already_packed=True,
    )


def report_of(
    listing: Listing,
    counts: tuple[int, int, int],
    identity: str,
    begin_s: float,
    *,
    quarantined: int,
    duplicates: int,
    already_packed: bool = False,
) -> PackReport:
    """counts: samples, shards, bytes."""
    samples, shards, num_bytes = counts
    return PackReport(
        samples=samples,
        shards=shards,
        bytes=num_bytes,
        seconds=time.monotonic() - begin_s,
        quarantined=quarantined,
        duplicates=duplicates,
        skipped=sum(listing.skipped.values()),
        skipped_kinds=listing.skipped,
        identity=identity,
        already_packed=already_packed,
    )
