"""Decoded samples in shared memory: Arrow IPC files, one a block, mapped without a copy.

A decoded sample takes many times the bytes of its JPEG, so this pays where the same pixels are read again: by a second
job of the node, or in a later epoch of a set that fits. Cache encoded bytes first; decode is what is saved here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dalipipe.cache.blockstore import TRAILER_BYTES, BlockStore
from dalipipe.cache.config import CacheConfig
from dalipipe.cache.folders import free_bytes
from dalipipe.cache.locks import lock_set
from dalipipe.cache.tenancy import Tenancy
from dalipipe.cache.usage import USAGE_NAME
from dalipipe.errors import CacheError, ConfigError
from dalipipe.telemetry import Recorder
from dalipipe.units import format_bytes, parse_capacity

if TYPE_CHECKING:
    import pyarrow as pa

Pixels = npt.NDArray[np.uint8]
Decode = Callable[[], tuple[npt.NDArray[np.int64], Sequence[Pixels]]]

DECODED_KEY = "cache.tiers.memory.decoded"
_ACCOUNT_WAIT_S = 10.0

_log = logging.getLogger(__name__)


class DecodedBlock:
    """The decoded samples of one block: views that stay valid while any of them, or this object, is alive.

    `ids`: int64 [n]. `image(i)`: uint8 [height, width, channels], read-only. `tier`: memory, or decoded for samples
    that were decoded for this call and not kept.
    """

    def __init__(self, batch: pa.RecordBatch, tier: str) -> None:
        self.tier = tier
        self.ids: npt.NDArray[np.int64] = batch.column("id").to_numpy()
        sides = (batch.column(name).to_numpy().tolist() for name in ("height", "width", "channels"))
        self._shapes = list(zip(*sides, strict=True))
        _, offsets, pixels = batch.column("pixels").buffers()
        self._offsets = np.frombuffer(offsets, np.int64)
        self._pixels = np.frombuffer(pixels if pixels is not None else b"", np.uint8)

    def __len__(self) -> int:
        return len(self.ids)

    def image(self, i: int) -> Pixels:
        """The pixels of sample number `i` of the block; no copy."""
        image: Pixels = self._pixels[self._offsets[i] : self._offsets[i + 1]].reshape(self._shapes[i])
        return image


class DecodedBlocks:
    """The decoded samples of one data set under one recipe, for all processes of the node.

    A file appears whole or not at all and is checked as the blocks of other tiers are. The first that come stay, until
    the budget is used; nothing is evicted. The budget is that of this data set and recipe.

    Args:
        identity: of the data set.
        recipe: a short name of how samples were decoded; other recipes never meet.
        capacity: bytes, or a fraction of what memory is free. key: what messages call it.
        unit: what a file holds, for the counters: `blocks` or `samples`.
        keep: leave the files when the last process closes; else they are dropped then.
        probe: for tests, see `publish`.

    Raises:
        ConfigError: the recipe is no plain name, or the capacity no size.
        CacheError: the folder cannot be made.
    """

    def __init__(
        self,
        config: CacheConfig,
        identity: str,
        *,
        recipe: str,
        capacity: int | float | str,
        recorder: Recorder,
        key: str = "capacity",
        unit: str = "blocks",
        keep: bool = True,
        probe: Callable[[str], None] = lambda _point: None,
    ) -> None:
        if not recipe.replace("-", "").replace("_", "").isalnum():
            raise ConfigError(f"recipe={recipe!r} must be of letters, digits, '-' and '_': it names a folder")
        parse_capacity(capacity, 0, key)  # refused before anything is made
        try:
            self._tenancy = Tenancy(config, f"{identity}.{recipe}", keep=keep)
        except OSError as error:
            raise CacheError(
                f"the folder of decoded samples {error.filename} cannot be made: {error.strerror or error}; name "
                "another in cache.tiers.memory.dir"
            ) from error
        folder = self._tenancy.folder
        room_bytes = free_bytes(folder, "memory")
        self.budget_bytes = min(parse_capacity(capacity, room_bytes, key), room_bytes)
        self._blocks = BlockStore(folder, probe=probe)
        self._account = folder / USAGE_NAME
        self._wait_s = config.wait_s
        self._recorder = recorder
        self._unit = unit
        self._largest_bytes = 0
        self._warned = False

    @property
    def has_room(self) -> bool:
        """Whether another file as large as the largest so far would be kept."""
        return self._used_bytes() + self._largest_bytes < self.budget_bytes

    def contains(self, block: int) -> bool:
        """Whether the block's decoded samples are here."""
        return self._blocks.contains(block)

    def get(self, block: int, decode: Decode) -> DecodedBlock:
        """The decoded samples of a block; `decode` gives them where they are not here. One decode a node.

        Args:
            decode: returns ids (int64 [n]) and images (uint8 [h, w, c] each). What it raises goes through.

        Raises:
            CacheTimeoutError: another process has been decoding the block for longer than `cache.wait_s`.
        """
        while True:
            found = self.find(block)
            if found is not None:
                return found
            lock = self._blocks.lock(block, self._wait_s)
            if lock is None:
                continue
            try:
                found = self.find(block)
                if found is not None:
                    return found
                batch = _to_batch(*decode())
                self._recorder.add("blocks_decoded")
                self._keep(block, batch)
                return DecodedBlock(batch, "decoded")
            finally:
                lock.release()

    def close(self) -> None:
        """Ends this process's use; views stay valid. With `keep` the files stay until `cache clear`. Idempotent."""
        self._tenancy.leave()

    def keep(self, block: int, ids: npt.NDArray[np.int64], images: Sequence[Pixels]) -> None:
        """Puts decoded samples here as `get` does, as far as the budget goes."""
        if not self.contains(block):
            self._keep(block, _to_batch(ids, images))

    def find(self, block: int) -> DecodedBlock | None:
        """The block's decoded samples where they are here and sound."""
        import pyarrow as pa

        path = self._blocks.path(block)
        try:
            num_bytes = path.stat().st_size - TRAILER_BYTES
        except FileNotFoundError:
            return None
        memory = self._blocks.open(block, num_bytes)
        if memory is None:
            return None
        self._recorder.add(f"{self._unit}_hit.decoded")
        self._recorder.add("bytes_read.memory", num_bytes)
        return DecodedBlock(pa.ipc.open_file(pa.py_buffer(memory)).get_batch(0), "memory")

    def _keep(self, block: int, batch: pa.RecordBatch) -> None:
        import pyarrow as pa

        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, batch.schema) as writer:
            writer.write_batch(batch)
        data = memoryview(sink.getvalue()).cast("B")
        lock = lock_set(self._blocks.locks, 0, wait_s=_ACCOUNT_WAIT_S)
        if lock is None:
            return
        try:
            if self.contains(block):  # another process was faster
                return
            used_bytes, num_bytes = self._used_bytes(), len(data) + TRAILER_BYTES
            self._largest_bytes = max(self._largest_bytes, num_bytes)
            if used_bytes + num_bytes > self.budget_bytes:
                self._say_full()
                return
            # Before the file: a process killed between the two has counted too much, never too little.
            self._account.write_bytes((used_bytes + num_bytes).to_bytes(8, "little"))
            try:
                self._blocks.write(block, data)
                self._recorder.add(f"{self._unit}_kept.decoded")
            except OSError:
                self._account.write_bytes(used_bytes.to_bytes(8, "little"))
                raise
        except OSError as error:
            self._recorder.add("memory_write_failures")
            _log.warning("decoded samples of block %d were not kept in %s: %s", block, self._blocks.folder, error)
        finally:
            lock.release()

    def _used_bytes(self) -> int:
        try:
            return int.from_bytes(self._account.read_bytes(), "little")
        except FileNotFoundError:  # nothing was kept yet, or all of it was cleared
            return 0

    def _say_full(self) -> None:
        self._recorder.add("decoded_not_kept")
        if not self._warned:
            self._warned = True
            _log.warning(
                "decoded samples use their budget of %s in %s: further %s are decoded each time",
                format_bytes(self.budget_bytes),
                self._blocks.folder,
                self._unit,
            )


class DecodedSamples:
    """Whole decoded images by sample id, as `cache.tiers.memory.decoded` says; a file each, shared by the node.

    A step mixes samples of many blocks and needs none of them whole, so here a file holds one sample.

    Args:
        identity: of the data set.
        probe: for tests.

    Raises:
        ConfigError: the budget is no size.
        CacheError: the folder cannot be made.
    """

    def __init__(
        self,
        config: CacheConfig,
        identity: str,
        *,
        recorder: Recorder,
        probe: Callable[[str], None] = lambda _point: None,
    ) -> None:
        self._files = DecodedBlocks(
            config,
            identity,
            recipe="rgb8-samples",
            capacity=config.tiers.memory.decoded,
            recorder=recorder,
            key=DECODED_KEY,
            unit="samples",
            keep=config.tiers.memory.keep,
            probe=probe,
        )

    @property
    def has_room(self) -> bool:
        """Whether another image as large as the largest so far would be kept."""
        return self._files.has_room

    def find(self, sample_id: int) -> Pixels | None:
        """The image, uint8 [height, width, 3], upright and read-only, where it is here; no copy."""
        found = self._files.find(sample_id)
        return None if found is None else found.image(0)

    def keep(self, sample_id: int, image: Pixels) -> None:
        """Puts an image here as far as the budget goes. image: as `find` gives it."""
        self._files.keep(sample_id, np.array([sample_id], np.int64), [image])

    def close(self) -> None:
        """Ends this process's use; views stay valid. Idempotent."""
        self._files.close()


def wants_decoded(config: CacheConfig) -> bool:
    """Whether the configuration asks for decoded samples in memory.

    Raises:
        ConfigError: the budget is no size.
    """
    return parse_capacity(config.tiers.memory.decoded, 2**62, DECODED_KEY) > 0


def _to_batch(ids: npt.NDArray[np.int64], images: Sequence[Pixels]) -> Any:
    import pyarrow as pa

    offsets = np.zeros(len(images) + 1, np.int64)
    np.cumsum([image.size for image in images], out=offsets[1:])
    pixels = np.empty(int(offsets[-1]), np.uint8)
    for image, start, stop in zip(images, offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        pixels[start:stop] = np.ascontiguousarray(image).reshape(-1)
    shapes = np.array([image.shape for image in images], np.int32).reshape(-1, 3)
    column = pa.LargeBinaryArray.from_buffers(
        pa.large_binary(), len(images), [None, pa.py_buffer(offsets), pa.py_buffer(pixels)]
    )
    columns = [pa.array(np.asarray(ids, np.int64)), *(pa.array(shapes[:, i]) for i in range(3)), column]
    return pa.RecordBatch.from_arrays(columns, names=["id", "height", "width", "channels", "pixels"])
