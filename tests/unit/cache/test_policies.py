from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
        assert list(self.make().victims([(1, 10, 0.0)], 5)) == []


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
        assert list(self.make().victims([(1, 10, 5.0), (2, 10, 1.0), (3, 10, 3.0)], 15)) == [2, 3]


class TestLfu(EvictionContract):
    def make(self) -> LfuPolicy:
        return LfuPolicy()

    def test_the_least_often_used_go_first(self) -> None:
        policy = self.make()
        for block in (1, 1, 2, 3, 3, 3):
            policy.used(block)
        assert list(policy.victims([(1, 10, 0.0), (2, 10, 9.0), (3, 10, 0.0)], 20)) == [2, 1]


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
