"""Memory that is used again, and never while anybody can see it."""

from __future__ import annotations

import threading

import numpy as np

from dalipipe.storage.buffers import BufferPool

SIZE_BYTES = 1 << 20


def test_memory_is_lent_again_only_when_the_last_view_of_it_is_dead() -> None:
    pool = BufferPool()
    one = pool.take(SIZE_BYTES)
    one[:] = b"1" * SIZE_BYTES
    part = np.frombuffer(one.toreadonly()[8:16], np.uint8)
    del one
    other = pool.take(SIZE_BYTES)
    other[:] = b"2" * SIZE_BYTES
    assert part.tobytes() == b"1" * 8
    assert pool.idle_bytes == 0
    del part
    assert pool.idle_bytes == SIZE_BYTES
    again = pool.take(SIZE_BYTES - 5)
    assert bytes(again[:8]) == b"1" * 8  # the first one's memory
    assert len(again) == SIZE_BYTES - 5
    assert pool.idle_bytes == 0


def test_no_more_memory_lies_idle_than_it_may() -> None:
    pool = BufferPool(idle_bytes=3 * SIZE_BYTES)
    held = [pool.take(SIZE_BYTES) for _ in range(8)]
    assert pool.idle_bytes == 0
    held.clear()
    assert pool.idle_bytes == 3 * SIZE_BYTES


def test_small_reads_are_not_worth_it_and_sizes_do_not_mix() -> None:
    pool = BufferPool()
    held = [pool.take(num_bytes) for num_bytes in (0, 1, 100, (256 << 10) - 1)]
    assert [len(view) for view in held] == [0, 1, 100, (256 << 10) - 1]
    held.clear()
    assert pool.idle_bytes == 0
    del held
    pool.take(256 << 10)
    assert pool.idle_bytes == 256 << 10
    large = pool.take(5 * SIZE_BYTES)
    assert len(large) == 5 * SIZE_BYTES
    assert pool.idle_bytes == 256 << 10


def test_threads_never_see_each_others_memory() -> None:
    pool = BufferPool()
    torn: list[int] = []

    def work(mark: int) -> None:
        for _ in range(200):
            view = pool.take(SIZE_BYTES // 2)
            view[::4096] = bytes([mark]) * len(view[::4096])
            if bytes(view[::4096]) != bytes([mark]) * len(view[::4096]):
                torn.append(mark)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not torn
    assert 0 < pool.idle_bytes <= 4 * (SIZE_BYTES // 2)
