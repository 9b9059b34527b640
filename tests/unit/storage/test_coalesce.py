from __future__ import annotations

import itertools
import uuid

from hypothesis import given
from hypothesis import strategies as st

from dalipipe.storage import open_store
from dalipipe.storage.coalesce import coalesce, read_ranges

RANGES = st.lists(
    st.tuples(st.integers(0, 10_000), st.integers(0, 500)).map(lambda pair: (pair[0], sum(pair))), max_size=30
)


@given(RANGES, st.integers(0, 300), st.integers(500, 3000))
def test_requests_cover_all_are_disjoint_and_bounded(
    ranges: list[tuple[int, int]], gap_bytes: int, most_bytes: int
) -> None:
    requests = coalesce(ranges, gap_bytes=gap_bytes, most_bytes=most_bytes)
    assert requests == sorted(requests)
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(requests))
    for start, stop in ranges:
        assert any(first <= start and stop <= last for first, last in requests)
    assert len(requests) <= max(1, len(ranges)) or not ranges


def test_neighbours_share_a_request_and_strangers_do_not() -> None:
    assert coalesce([(100, 200), (0, 50), (250, 300), (10_000, 10_001)], gap_bytes=50) == [(0, 300), (10_000, 10_001)]
    assert coalesce([(0, 6), (6, 12)], gap_bytes=0, most_bytes=8) == [(0, 6), (6, 12)]


@given(RANGES)
def test_what_is_read_is_what_lies_there(ranges: list[tuple[int, int]]) -> None:
    data = bytes(i * 7 % 251 for i in range(11_000))
    store = open_store(f"memory://{uuid.uuid4().hex}")
    store.put("x", data)
    try:
        assert [bytes(piece) for piece in read_ranges(store, "x", ranges)] == [data[a:b] for a, b in ranges]
    finally:
        store.close()
