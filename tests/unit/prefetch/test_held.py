from __future__ import annotations

import pytest

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
