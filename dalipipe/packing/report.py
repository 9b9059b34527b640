"""What a pack says when it is done."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from dalipipe.packing.discover import Listing
from dalipipe.packing.target import PackedBefore, Target


@dataclass(frozen=True, slots=True, kw_only=True)
class PackReport:
    """What was packed. `bytes` of all shards; `skipped` files that are no images and members of tars that are no data,
    by kind in `skipped_kinds`; `truncated` tars without an end, which may have been cut between two members;
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
    truncated: int = 0
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
        passed=json.loads(manifest.made_by.get("passed", "{}")),
        truncated=int(manifest.made_by.get("truncated", "0")),
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
    passed: Mapping[str, int],
    truncated: int,
    already_packed: bool = False,
) -> PackReport:
    """counts: samples, shards, bytes. passed: members of tars that are no data, by reason."""
    samples, shards, num_bytes = counts
    skipped = Counter(listing.skipped) + Counter(passed)
    return PackReport(
        samples=samples,
        shards=shards,
        bytes=num_bytes,
        seconds=time.monotonic() - begin_s,
        quarantined=quarantined,
        duplicates=duplicates,
        skipped=skipped.total(),
        skipped_kinds=dict(sorted(skipped.items())),
        identity=identity,
        truncated=truncated,
        already_packed=already_packed,
    )
