"""A lake in memory that counts, waits, breaks and cuts off on demand."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np

from dalipipe.errors import ObjectNotFoundError, StorageError
from dalipipe.shards.manifest import Extent, Manifest
from dalipipe.storage.store import ObjectInfo
from tests.support.shards import Folder, write_dataset


class MemoryLake:
    """A `Store` over a dict of files. `on_read(key, start, stop)` runs before each read and may wait or raise."""

    url = "memory://lake"

    def __init__(
        self, folder: Folder, on_read: Callable[[str, int, int], None] = lambda key, start, stop: None
    ) -> None:
        self.files = folder.files
        self.on_read = on_read
        self.reads: Counter[tuple[str, int, int]] = Counter()
        self._lock = threading.Lock()

    def head(self, key: str) -> ObjectInfo:
        if key not in self.files:
            raise ObjectNotFoundError(f"{self.url}/{key} does not exist")
        return ObjectInfo(key=key, num_bytes=len(self.files[key]))

    def read(self, key: str, start: int = 0, stop: int | None = None, *, into: memoryview | None = None) -> memoryview:
        stop = self.head(key).num_bytes if stop is None else stop
        with self._lock:
            self.reads[key, start, stop] += 1
        self.on_read(key, start, stop)
        data = self.files[key][start:stop]
        if len(data) < stop - start:
            raise StorageError(f"{self.url}/{key} answered {len(data)} of {stop - start} bytes")
        if into is None:
            return memoryview(data)
        into[: len(data)] = data
        return into[: len(data)]

    def times_read(self, extent: Extent) -> set[int]:
        """How often the bytes of a part were read: one number where all were read equally often."""
        asked = [(start, stop, n) for (key, start, stop), n in self.reads.items() if key == extent.shard]
        cuts = {extent.start, *(cut for start, stop, _ in asked for cut in (start, stop))}
        places = [cut for cut in cuts if extent.start <= cut < extent.stop]
        return {sum(n for start, stop, n in asked if start <= place < stop) for place in places}

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return (self.head(key) for key in self.files if key.startswith(prefix))

    def put(self, key: str, data: object, *, if_absent: bool = False) -> None:
        raise AssertionError("a pipeline that reads wrote to the lake")

    def delete(self, key: str) -> None:
        raise AssertionError("a pipeline that reads deleted from the lake")

    def close(self) -> None:
        pass


def image_set(num_samples: int = 200, *, block_samples: int = 8, num_shards: int = 3, num_bytes: int = 300) -> Folder:
    """A data set of `num_samples` whose image i is `image_bytes(i, num_bytes)` and whose label is i mod 7."""
    cuts = np.linspace(0, num_samples, num_shards + 1).astype(int).tolist()
    shards = [
        [(f"{i:06d}", {"jpg": image_bytes(i, num_bytes), "cls": str(i % 7).encode()}) for i in range(start, stop)]
        for start, stop in pairwise(cuts)
    ]
    return write_dataset(shards, block_samples=block_samples, classes=[str(i) for i in range(7)])


def image_bytes(sample: int, num_bytes: int = 300) -> bytes:
    """The bytes that stand for image `sample`: its number, repeated; lengths differ."""
    return sample.to_bytes(4, "little") * (num_bytes // 4 + sample % 5)


def open_folder(folder: Folder) -> Manifest:
    return Manifest.open(folder.read)
