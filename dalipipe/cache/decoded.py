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

from dalipipe.cache.blockstore import LOCKS_NAME, TRAILER_BYTES, BlockStore
from dalipipe.cache.config import CacheConfig
from dalipipe.cache.folders import free_bytes, memory_folder
from dalipipe.cache.locks import lock_set, stay_alive
from dalipipe.cache.usage import USAGE_NAME
from dalipipe.errors import CacheError, ConfigError
from dalipipe.telemetry import Recorder
from dalipipe.units import format_bytes, parse_capacity

if TYPE_CHECKING:
    import pyarrow as pa

Pixels = npt.NDArray[np.uint8]
Decode = Callable[[], tuple[npt.NDArray[np.int64], Sequence[Pixels]]]

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
        self._shapes = np.stack(
            [batch.column(name).to_numpy() for name in ("height", "width", "channels")], axis=1
        ).tolist()
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
        capacity: bytes, or a fraction of what memory is free.

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
    ) -> None:
        if not recipe.replace("-", "").replace("_", "").isalnum():
            raise ConfigError(f"recipe={recipe!r} must be of letters, digits, '-' and '_': it names a folder")
        folder = memory_folder(config) / f"{identity}.{recipe}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CacheError(
                f"the folder of decoded samples {folder} cannot be made: {error.strerror or error}; name another in "
                "cache.tiers.memory.dir"
            ) from error
        room_bytes = free_bytes(folder, "memory")
        self.budget_bytes = min(parse_capacity(capacity, room_bytes, "capacity"), room_bytes)
        self._blocks = BlockStore(folder)
        self._account = folder / USAGE_NAME
        self._wait_s = config.wait_s
        self._recorder = recorder
        self._lease = stay_alive(folder / LOCKS_NAME)
        self._warned = False

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
            found = self._open(block)
            if found is not None:
                return found
            lock = self._blocks.lock(block, self._wait_s)
            if lock is None:
                continue
            try:
                found = self._open(block)
                if found is not None:
                    return found
                batch = _to_batch(*decode())
                self._recorder.add("blocks_decoded")
                self._keep(block, batch)
                return DecodedBlock(batch, "decoded")
            finally:
                lock.release()

    def close(self) -> None:
        """Ends this process's use; views stay valid, and the samples here until `cache clear`. Idempotent."""
        if self._lease is not None:
            self._lease.release()

    def _open(self, block: int) -> DecodedBlock | None:
        import pyarrow as pa

        path = self._blocks.path(block)
        try:
            num_bytes = path.stat().st_size - TRAILER_BYTES
        except FileNotFoundError:
            return None
        memory = self._blocks.open(block, num_bytes)
        if memory is None:
            return None
        self._recorder.add("blocks_hit.decoded")
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
            used_bytes = self._used_bytes()
            if used_bytes + len(data) > self.budget_bytes:
                self._say_full()
                return
            self._blocks.write(block, data)
            self._account.write_bytes((used_bytes + len(data)).to_bytes(8, "little"))
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
                "decoded samples use their budget of %s in %s: further blocks are decoded each time",
                format_bytes(self.budget_bytes),
                self._blocks.folder,
            )


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
