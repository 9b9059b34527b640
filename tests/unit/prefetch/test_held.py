from __future__ import annotations

from collections import deque
from time import process_time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dalipipe.cache.view import HeldView
from dalipipe.prefetch.held import HeldBlocks


class Released(list[int]):
    """The blocks that were let go, in order."""

    def view(self, block: int, held_bytes: int = 0) -> HeldView:
        return HeldView(memoryview(b"x"), "lake", held_bytes=held_bytes, on_release=lambda: self.append(block))


def eight(_block: int) -> int:
    """All blocks have eight samples."""
    return 8


@pytest.fixture
def released() -> Released:
    return Released()


def test_a_mapped_block_goes_with_its_last_user_unless_a_use_is_planned(released: Released) -> None:
    held = HeldBlocks(eight)
    held.announce(0, [1, 2])
    held.announce(1, [2])
    held.use({1: 1, 2: 1})
    for block in (1, 2):
        held.put(block, released.view(block))
    held.leave([1, 2])
    assert released == [1]
    held.use({2: 1})
    held.leave([2])
    assert released == [1, 2]


def test_a_block_of_two_steps_in_the_window_goes_with_the_second(released: Released) -> None:
    held = HeldBlocks(eight)
    held.announce(0, [1])
    held.announce(1, [1])
    held.use({1: 3})
    held.use({1: 3})
    held.put(1, released.view(1))
    held.leave([1])
    assert released == []
    held.leave([1])
    assert released == [1]


def test_a_block_in_memory_stays_until_all_its_samples_were_used(released: Released) -> None:
    held = HeldBlocks(eight)
    for number in range(2):
        held.announce(number, [1])
        held.use({1: 4})
        if number == 0:
            held.put(1, released.view(1, 100))
        held.leave([1])
        assert released == ([] if number == 0 else [1])
    assert held.resident_bytes == 0


def test_a_block_of_a_mixed_in_set_goes_when_its_own_samples_were_used(released: Released) -> None:
    """Sets that are mixed have blocks of different sizes: the largest size must not keep the small ones."""
    held = HeldBlocks(lambda block: 8 if block == 1 else 3)
    for number in range(3):
        held.announce(number, [1, 2])
        held.use({1: 1, 2: 1})
        for block in (1, 2) if number == 0 else ():
            held.put(block, released.view(block, 100))
        held.leave([1, 2])
    assert released == [2]
    assert held.resident_bytes == 100


def test_room_is_made_by_the_use_that_is_farthest(released: Released) -> None:
    held = HeldBlocks(eight)
    held.announce(0, [1, 2, 3, 4])
    held.use({1: 1, 2: 1, 3: 1, 4: 1})
    held.announce(1, [2])
    held.announce(2, [1])
    for block in (1, 2, 3, 4):
        held.put(block, released.view(block, 100))
    held.leave([1, 2, 3])
    assert held.make_room(100, 500)
    assert released == []
    assert held.make_room(200, 500)
    assert released == [3]
    assert held.make_room(300, 500)
    assert released == [3, 1]
    assert not held.make_room(600, 500)
    assert 4 in held, "a block in use never goes"
    assert held.resident_bytes == 100


def test_the_end_of_an_epoch_lets_go_what_is_not_planned(released: Released) -> None:
    held = HeldBlocks(eight)
    held.announce(0, [1, 2, 3])
    held.use({1: 1, 2: 1, 3: 1})
    held.announce(1, [2])
    for block in (1, 2, 3):
        held.put(block, released.view(block, 100))
    held.leave([1, 2])
    held.end_epoch()
    assert released == [1]
    held.leave([3])
    assert released == [1, 3]
    held.clear()
    assert sorted(released) == [1, 2, 3]
    assert held.resident_bytes == 0


class SortingBlocks(HeldBlocks):
    """The plain version: all that is held is sorted whenever room is asked for."""

    def make_room(self, num_bytes: int, cap_bytes: int) -> bool:
        if self.resident_bytes + num_bytes <= cap_bytes:
            return True
        idle = [block for block, held in self._held.items() if held.users == 0 and held.view.held_bytes]
        idle.sort(key=lambda block: self._upcoming.get(block, [float("inf")])[0], reverse=True)
        for block in idle:
            self._drop(block)
            if self.resident_bytes + num_bytes <= cap_bytes:
                return True
        return False


class Driver:
    """Steps that are announced, used and left in order, over blocks that come when they like."""

    def __init__(self, kind: type[HeldBlocks]) -> None:
        self.released = Released()
        self.answers: list[bool] = []
        self._held = kind(eight)
        self._announced: deque[list[int]] = deque()
        self._used: deque[list[int]] = deque()
        self._number = 0

    def do(self, action: str, blocks: list[int], num_bytes: int) -> None:
        held = self._held
        if action == "announce":
            held.announce(self._number, blocks)
            self._number += 1
            self._announced.append(blocks)
        elif action == "use" and self._announced:
            self._used.append(self._announced.popleft())
            held.use(dict.fromkeys(self._used[-1], 2))
        elif action == "put" and blocks[0] not in held:
            # One in four lies in a file, and takes no memory.
            held.put(blocks[0], self.released.view(blocks[0], blocks[0] % 4 * 10))
        elif action == "leave" and self._used:
            held.leave(self._used.popleft())
        elif action == "make_room":
            self.answers.append(held.make_room(num_bytes, 100))
        elif action == "end_epoch":
            held.end_epoch()

    def seen(self) -> tuple[list[int], list[bool], int, int]:
        return self.released, self.answers, self._held.resident_bytes, self._held.busy_bytes


ACTIONS = ["announce", "announce", "use", "use", "put", "put", "put", "leave", "leave", "make_room", "end_epoch"]


@settings(deadline=None, max_examples=300)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(ACTIONS),
            st.lists(st.integers(0, 11), min_size=1, max_size=4, unique=True),
            st.integers(0, 110),
        ),
        max_size=120,
    )
)
def test_the_same_blocks_make_room_as_when_all_are_sorted(actions: list[tuple[str, list[int], int]]) -> None:
    plain, quick = Driver(SortingBlocks), Driver(HeldBlocks)
    for action in actions:
        plain.do(*action)
        quick.do(*action)
        assert quick.seen() == plain.seen()


def test_room_is_cheap_however_many_blocks_are_held() -> None:
    """Each block that comes asks for room: with a sort for each this took minutes."""
    num_blocks, rounds = 20_000, 8_000
    held, released = HeldBlocks(eight), Released()
    for block in range(num_blocks + rounds):
        if block == num_blocks:
            begun_s = process_time()
        held.announce(block, [block])
        held.use({block: 1})
        held.make_room(10, 10 * num_blocks)
        held.put(block, released.view(block, 10))
        held.leave([block])
    assert process_time() - begun_s < 5
    assert released == list(range(rounds))
    assert len(held) == num_blocks


def test_uses_that_are_over_leave_nothing_behind(released: Released) -> None:
    """Blocks that are used again and again while nothing asks for room."""
    held = HeldBlocks(lambda _block: 1 << 40)
    for number in range(5_000):
        held.announce(number, [1, 2])
        held.use({1: 1, 2: 1})
        if not number:
            for block in (1, 2):
                held.put(block, released.view(block, 10))
        held.leave([1, 2])
    assert len(held._idle) < 100
    assert held.make_room(10, 20)
    assert released == [1]
