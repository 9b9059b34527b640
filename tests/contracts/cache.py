"""What every `Cache` must do; an implementation's test inherits this class and provides `make`."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from dalipipe.cache.contract import BlockView, Cache
from dalipipe.errors import ClosedError, DalipipeError, IntegrityError, StorageError
from dalipipe.shards.manifest import Manifest
from tests.support.lake import MemoryLake, image_set, open_folder
from tests.support.shards import Folder


class CacheContract:
    """Inherit and override `make`."""

    def make(self, manifest: Manifest, lake: MemoryLake) -> Cache:
        """A new cache of this data set, empty the first time in a test."""
        raise NotImplementedError

    @pytest.fixture
    def folder(self) -> Folder:
        return image_set()

    @pytest.fixture
    def manifest(self, folder: Folder) -> Manifest:
        return open_folder(folder)

    @pytest.fixture
    def lake(self, folder: Folder) -> MemoryLake:
        return MemoryLake(folder)

    @pytest.fixture
    def cache(self, manifest: Manifest, lake: MemoryLake) -> Iterator[Cache]:
        cache = self.make(manifest, lake)
        yield cache
        cache.close()

    def test_every_block_has_the_bytes_of_the_shards_first_and_again(
        self, cache: Cache, manifest: Manifest, folder: Folder
    ) -> None:
        for _ in range(2):
            for block in range(manifest.num_blocks):
                with cache.get(block) as view:
                    assert bytes(view.memory) == folder.block(manifest, block)
                    assert view.tier in ("lake", "pool", "node", "memory")

    def test_memory_is_read_only(self, cache: Cache) -> None:
        with cache.get(0) as view, pytest.raises(TypeError):
            view.memory[0] = 1

    def test_a_held_block_is_not_read_twice(self, cache: Cache, lake: MemoryLake) -> None:
        with cache.get(3) as first, cache.get(3) as second:
            assert first.memory == second.memory
            assert second.tier != "lake"
            assert cache.contains(3)
        assert max(lake.reads.values()) == 1

    def test_threads_that_ask_at_once_share_one_read(self, cache: Cache, lake: MemoryLake) -> None:
        barrier = threading.Barrier(4)
        lake.on_read = lambda key, start, stop: time.sleep(0.1)
        sums: list[int] = []

        def get() -> None:
            barrier.wait(10)
            with cache.get(5) as view:
                sums.append(sum(view.memory))
                barrier.wait(10)

        threads = [threading.Thread(target=get) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert len(set(sums)) == 1
        assert len(sums) == 4
        assert max(lake.reads.values()) == 1

    def test_arrays_stay_valid_after_release_and_close(self, cache: Cache, manifest: Manifest, folder: Folder) -> None:
        view = cache.get(2)
        array = np.frombuffer(view.memory, np.uint8)
        view.release()
        view.release()
        cache.close()
        assert array.tobytes() == folder.block(manifest, 2)

    def test_corrupt_lake_bytes_never_come_through(self, cache: Cache, manifest: Manifest, lake: MemoryLake) -> None:
        extent = manifest.extents(1)[0]
        data = bytearray(lake.files[extent.shard])
        data[extent.start + 1] ^= 0x40
        lake.files[extent.shard] = bytes(data)
        with pytest.raises(IntegrityError) as caught:
            cache.get(1)
        assert f"{lake.url}/{extent.shard}" in str(caught.value)
        assert f"[{extent.start}, {extent.stop})" in str(caught.value)
        assert lake.reads[extent.shard, extent.start, extent.stop] == 2

    def test_a_failing_lake_is_a_typed_error_and_no_state(self, cache: Cache, lake: MemoryLake) -> None:
        def fail(key: str, start: int, stop: int) -> None:
            raise StorageError(f"{lake.url}/{key}: the store is down")

        lake.on_read = fail
        with pytest.raises(StorageError, match="the store is down"):
            cache.get(4)
        assert not cache.contains(4)
        lake.on_read = lambda key, start, stop: None
        with cache.get(4) as view:
            assert len(view.memory)

    def test_a_run_brings_each_byte_once_whoever_is_delivered(
        self, cache: Cache, manifest: Manifest, folder: Folder, lake: MemoryLake
    ) -> None:
        left, views, num_runs = list(range(manifest.num_blocks)), [], 0
        while left:
            delivered: list[int] = []

            def deliver(block: int, view: BlockView) -> None:
                assert bytes(view.memory) == folder.block(manifest, block)
                assert view.tier == "lake"
                delivered.append(block)  # noqa: B023 - called before the next turn
                views.append(view)

            assert next(iter(cache.together(left))) == left[0]
            cache.get_run(left, deliver)
            assert delivered == left[: len(delivered)]
            assert delivered
            left, num_runs = left[len(delivered) :], num_runs + 1
        assert num_runs < manifest.num_blocks or not cache.request_bytes
        assert sum(lake.reads.values()) <= num_runs + manifest.num_shards  # a block that crosses shards takes two
        for block in range(manifest.num_blocks):
            assert {n for extent in manifest.extents(block) for n in lake.times_read(extent)} == {1}
        for view in views:
            view.release()

    def test_a_run_is_what_was_together(self, cache: Cache, manifest: Manifest) -> None:
        blocks = list(range(1, 7))
        views: dict[int, BlockView] = {}
        together = list(cache.together(blocks))
        cache.get_run(blocks, views.__setitem__)
        # What the tiers share out among them is known only when it is read.
        assert list(views) == together[: len(views)]
        with cache.get(0):
            assert list(cache.together([0, 1, 2])) == [0]  # near already
        for view in views.values():
            view.release()

    def test_a_held_block_ends_a_run(self, cache: Cache, lake: MemoryLake, manifest: Manifest) -> None:
        views: dict[int, BlockView] = {}
        with cache.get(3):
            assert set(cache.together(range(1, 7))) <= {1, 2}
            cache.get_run(range(1, 7), views.__setitem__)
            assert set(views) <= {1, 2}
            assert lake.times_read(manifest.extents(3)[0]) == {1}
        for view in views.values():
            view.release()

    def test_a_damaged_block_of_a_run_is_its_own_affair(
        self, cache: Cache, manifest: Manifest, folder: Folder, lake: MemoryLake
    ) -> None:
        extent = manifest.extents(3)[0]
        data = bytearray(lake.files[extent.shard])
        data[extent.start + 1] ^= 0x40
        lake.files[extent.shard] = bytes(data)
        views: dict[int, BlockView] = {}
        left = [1, 2, 3, 4, 5]
        while left:
            if left[0] == 3:
                with pytest.raises(IntegrityError, match=extent.shard):
                    cache.get_run(left, views.__setitem__)
                left.remove(3)
                continue
            cache.get_run(left, views.__setitem__)
            assert left[0] in views
            left = [block for block in left if block not in views]
        assert views.keys() == {1, 2, 4, 5}
        assert all(bytes(view.memory) == folder.block(manifest, block) for block, view in views.items())
        assert not cache.contains(3)
        for view in views.values():
            view.release()

    def test_a_run_that_fails_delivers_nothing_and_leaves_nothing(self, cache: Cache, lake: MemoryLake) -> None:
        def fail(key: str, start: int, stop: int) -> None:
            raise StorageError(f"{lake.url}/{key}: the store is down")

        lake.on_read = fail
        views: dict[int, BlockView] = {}
        with pytest.raises(StorageError, match="the store is down"):
            cache.get_run(range(1, 6), views.__setitem__)
        assert not views
        lake.on_read = lambda key, start, stop: None
        for block in range(1, 6):
            assert not cache.contains(block)
            cache.get(block).release()

    def test_threads_that_ask_for_runs_at_once_share_all_reads(
        self, cache: Cache, manifest: Manifest, folder: Folder, lake: MemoryLake
    ) -> None:
        barrier = threading.Barrier(4)
        lake.on_read = lambda key, start, stop: time.sleep(0.02)
        wrong: list[int] = []
        views: list[BlockView] = []
        lock = threading.Lock()

        def check(came: dict[int, BlockView]) -> None:
            with lock:
                views.extend(came.values())
                wrong.extend(b for b, view in came.items() if bytes(view.memory) != folder.block(manifest, b))

        def get(first: int) -> None:
            barrier.wait(10)
            left = list(range(first, 8))
            while left:
                came: dict[int, BlockView] = {}
                cache.get_run(left, came.__setitem__)
                assert left[0] in came
                check(came)
                left = [block for block in left if block not in came]

        threads = [threading.Thread(target=get, args=[first]) for first in (0, 0, 2, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert not wrong
        assert len(views) == 8 + 8 + 6 + 3
        for block in range(8):
            assert {n for extent in manifest.extents(block) for n in lake.times_read(extent)} == {1}
        for view in views:
            view.release()

    def test_contains_and_request_do_not_read(self, cache: Cache, lake: MemoryLake) -> None:
        assert not cache.contains(0)
        cache.request([0, 1], [0, 0])
        cache.get(0).release()

    def test_a_closed_cache_says_so(self, cache: Cache) -> None:
        cache.close()
        cache.close()
        with pytest.raises((ClosedError, DalipipeError)):
            cache.get(0)
