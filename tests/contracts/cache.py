"""What every `Cache` must do; an implementation's test inherits this class and provides `make`."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from dalipipe.cache.contract import Cache
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

    def test_contains_and_request_do_not_read(self, cache: Cache, lake: MemoryLake) -> None:
        assert not cache.contains(0)
        cache.request([0, 1], [0, 0])
        cache.get(0).release()

    def test_a_closed_cache_says_so(self, cache: Cache) -> None:
        cache.close()
        cache.close()
        with pytest.raises((ClosedError, DalipipeError)):
            cache.get(0)
