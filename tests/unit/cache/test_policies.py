from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dalipipe.cache.contract import Entry
from dalipipe.cache.policies import (
    LfuPolicy,
    LruPolicy,
    PinPolicy,
    StreamPolicy,
    block_hash,
    block_hashes,
    pinned_share,
)
from tests.contracts.eviction import EvictionContract


class TestPin(EvictionContract):
    def make(self) -> PinPolicy:
        return PinPolicy(0.4)

    def test_it_never_evicts(self) -> None:
        assert list(self.make().victims([entry(1)], 5)) == []

    def test_ranges_that_follow_each_other_share_no_block(self) -> None:
        near, far = PinPolicy(0.3), PinPolicy(0.7, 0.3)
        kept = [(near.admits(block), far.admits(block)) for block in range(20_000)]
        assert (True, True) not in kept
        assert abs(kept.count((True, False)) / 20_000 - 0.3) < 0.012
        assert abs(kept.count((False, True)) / 20_000 - 0.4) < 0.012


class TestStream(EvictionContract):
    def make(self) -> StreamPolicy:
        return StreamPolicy()

    @given(block=st.integers(0, 2**40))
    def test_it_keeps_nothing(self, block: int) -> None:
        assert not self.make().admits(block)


class TestLru(EvictionContract):
    def make(self) -> LruPolicy:
        return LruPolicy()

    def test_the_longest_unused_go_first(self) -> None:
        assert list(self.make().victims([entry(1, 5.0), entry(2, 1.0), entry(3, 3.0)], 15)) == [2, 3]


class TestLfu(EvictionContract):
    def make(self) -> LfuPolicy:
        return LfuPolicy()

    def test_the_least_often_used_go_first_and_the_oldest_of_equals(self) -> None:
        entries = [entry(1, 1.0, uses=2), entry(2, 9.0, uses=1), entry(3, 0.0, uses=3), entry(4, 8.0, uses=1)]
        assert list(self.make().victims(entries, 30)) == [4, 2, 1]

    @pytest.mark.parametrize(("newcomer_uses", "victims"), [(1, []), (3, []), (4, [2]), (9, [2])])
    def test_only_a_newcomer_used_clearly_more_often_replaces(self, newcomer_uses: int, victims: list[int]) -> None:
        entries = [entry(1, uses=3), entry(2, uses=1)]
        assert list(self.make().victims(entries, 10, newcomer_uses)) == victims


def entry(block: int, last_use_s: float = 0.0, *, uses: int = 0) -> Entry:
    return Entry(block=block, num_bytes=10, last_use_s=last_use_s, uses=uses)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_hashes_are_even_over_any_run_of_blocks(share: float) -> None:
    for first in (0, 10**6):
        kept = sum(block_hash(block) < share for block in range(first, first + 20_000))
        assert abs(kept / 20_000 - share) < 0.012


def test_many_hashes_at_once_are_those_of_each_block() -> None:
    assert block_hashes(1000).tolist() == [block_hash(block) for block in range(1000)]


@given(capacity=st.integers(0, 10**12), total=st.integers(1, 10**12), num_blocks=st.integers(1, 3000))
def test_the_pinned_share_holds_as_many_whole_blocks_as_fit(capacity: int, total: int, num_blocks: int) -> None:
    policy = PinPolicy(pinned_share(capacity, total, num_blocks))
    num_kept = sum(policy.admits(block) for block in range(num_blocks))
    assert num_kept == min(num_blocks, int(capacity / total * num_blocks))


def test_the_share_of_a_huge_set_is_the_plain_one() -> None:
    assert pinned_share(250, 1000, 1 << 30) == 0.25
