"""Many small ranges of one object in few requests."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from dalipipe.storage.ranges import PART_BYTES
from dalipipe.storage.store import ReadsMany, Store

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


def read_each(store: Store, key: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
    """Reads ranges [start, stop) of one object, none empty, each as it is; all at once where the store can.

    Raises:
        StorageError: as `Store.read`.
    """
    if len(ranges) > 1 and isinstance(store, ReadsMany):
        return store.read_many(key, ranges)
    return [store.read(key, start, stop) for start, stop in ranges]


def read_ranges(
    store: Store, key: str, ranges: Sequence[tuple[int, int]], *, gap_bytes: int = GAP_BYTES
) -> list[memoryview]:
    """Reads byte ranges of one object, neighbours together; views in the order of `ranges`.

    Raises:
        StorageError: as `Store.read`.
    """
    requests = coalesce([(start, stop) for start, stop in ranges if start < stop], gap_bytes=gap_bytes)
    pieces = read_each(store, key, requests)
    starts = [start for start, _ in requests]
    found = []
    for start, stop in ranges:
        if start >= stop:
            found.append(memoryview(b""))
            continue
        at = bisect_right(starts, start) - 1
        found.append(pieces[at][start - starts[at] : stop - starts[at]])
    return found
