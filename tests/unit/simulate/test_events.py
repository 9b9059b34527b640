"""Made-up time and shared links."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dalipipe.simulate.events import Events, Pipe


def run(rate: float | None, transfers: list[tuple[float, int]], crowd: float = 1.0) -> list[float]:
    """When each transfer (begin, bytes) ends."""
    events = Events()
    pipe = Pipe(events, rate, crowd)
    ends = [0.0] * len(transfers)

    def begin(number: int) -> None:
        pipe.serve(transfers[number][1], lambda: ends.__setitem__(number, events.now_s))

    for number, (at_s, _) in enumerate(transfers):
        events.at(at_s, lambda number=number: begin(number))
    while events.step():
        pass
    return ends


def test_transfers_under_way_share_a_link_equally() -> None:
    assert run(100.0, [(0.0, 100)]) == pytest.approx([1.0])
    assert run(100.0, [(0.0, 100), (0.0, 100)]) == pytest.approx([2.0, 2.0])
    # Alone for half a second; then both at half the rate.
    assert run(100.0, [(0.0, 100), (0.5, 25)]) == pytest.approx([1.25, 1.0])
    assert run(None, [(0.5, 10**12)]) == [0.5]


def test_a_crowd_takes_its_share_of_the_link() -> None:
    assert run(100.0, [(0.0, 100)], crowd=8.0) == pytest.approx([8.0])


@given(transfers=st.lists(st.tuples(st.floats(0, 10), st.integers(0, 10_000)), min_size=1, max_size=20))
def test_a_link_moves_what_its_rate_allows_and_stands_never_still(transfers: list[tuple[float, int]]) -> None:
    rate = 1000.0
    ends = run(rate, transfers)
    for (begin_s, num_bytes), end_s in zip(transfers, ends, strict=True):
        assert end_s >= begin_s + num_bytes / rate - 1e-6
    free_s = 0.0
    for begin_s, num_bytes in sorted(transfers):
        free_s = max(free_s, begin_s) + num_bytes / rate
    assert max(ends) == pytest.approx(free_s, abs=1e-6)
