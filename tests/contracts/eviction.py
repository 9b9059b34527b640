"""What every `EvictionPolicy` must do; a policy's test inherits this class and provides `make`."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dalipipe.cache.contract import Entry, EvictionPolicy

ENTRIES = st.lists(
    st.builds(
        Entry,
        block=st.integers(0, 10**6),
        num_bytes=st.integers(1, 10**7),
        last_use_s=st.floats(0, 1e9),
        uses=st.integers(0, 20),
    ),
    max_size=40,
    unique_by=lambda entry: entry.block,
)


class EvictionContract:
    """Inherit and override `make`."""

    def make(self) -> EvictionPolicy:
        raise NotImplementedError

    def test_the_name_is_known(self) -> None:
        assert self.make().name in ("pin", "lru", "lfu", "stream")

    # Properties are run inside the tests: hypothesis refuses decorated methods that several classes inherit.

    def test_admission_depends_on_the_block_alone(self) -> None:
        @given(block=st.integers(0, 2**40))
        def check(block: int) -> None:
            assert self.make().admits(block) == self.make().admits(block)

        check()

    def test_victims_free_enough_and_no_more(self) -> None:
        @given(entries=ENTRIES, need=st.integers(0, 10**8), uses=st.none() | st.integers(0, 30))
        def check(entries: list[Entry], need: int, uses: int | None) -> None:
            victims = list(self.make().victims(entries, need, uses))
            sizes = {entry.block: entry.num_bytes for entry in entries}
            assert len(set(victims)) == len(victims)
            assert set(victims) <= sizes.keys()
            if victims:
                assert sum(sizes[block] for block in victims) >= need
                assert sum(sizes[block] for block in victims[:-1]) < need

        check()
