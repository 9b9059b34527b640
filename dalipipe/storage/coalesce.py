"""Many small ranges of one object in few requests."""

from __future__ import annotations

from collections.abc import Sequence

from dalipipe.storage.ranges import PART_BYTES
from dalipipe.storage.store import Store

GAP_BYTES = 64 << 10
"""Neighbours up to this far apart share a request: to read the gap costs less than a round trip."""


def coalesce(
    ranges: Sequence[tuple[int, int]], *, gap_bytes: int = GAP_BYTES, most_bytes: int = PART_BYTES
) -> list[tuple[int, int]]:
    """The requests that cover all `ranges` [start, stop): sorted, disjoint, at most `most_bytes` unless a range is."""
    requests: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if requests and start <= requests[-1][1] + gap_bytes:
            first, last = requests[-1]
            if start < last or max(stop, last) - first <= most_bytes:
                requests[-1] = (first, max(stop, last))
                continue
        requests.append((start, stop))
    return requests


def read_ranges(store: Store, key: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
    """Reads byte ranges of one object, neighbours together; views in the order of `ranges`.

    Raises:
        StorageError: as `Store.read`.
    """
    pieces = {start: store.read(key, start, stop) for start, stop in coalesce([r for r in ranges if r[0] < r[1]])}
    starts = sorted(pieces)
    found = []
    for start, stop in ranges:
        if start >= stop:
            found.append(memoryview(b""))
            continue
        base = max(first for first in starts if first <= start)
        found.append(pieces[base][start - base : stop - base])
    return found
