"""Blocks that no tier keeps, shared by the processes of a node while any of them holds them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from dalipipe.cache.blockstore import BlockStore
from dalipipe.cache.lake import Fetched
from dalipipe.cache.locks import Holds, lock_another, unlock_block
from dalipipe.errors import ClosedError
from dalipipe.filelocks import FileLock
from dalipipe.telemetry import Recorder

_PAUSE_S = 0.001


class PassingBlocks:
    """Streamed blocks in shared memory: the first that asks reads the block, the last that lets go drops it.

    So ranks whose samples lie in the same blocks, or two jobs in step with each other, cost the lake one read. A block
    that does not fit into shared memory is simply not shared.

    Args:
        blocks: a store in a folder of its own in shared memory.
    """

    def __init__(self, blocks: BlockStore, wait_s: float, recorder: Recorder) -> None:
        self._blocks = blocks
        self._wait_s = wait_s
        self._recorder = recorder
        self._holds = Holds(blocks.locks)
        self._closed = False

    def contains(self, block: int) -> bool:
        """Whether some process of the node holds the block just now."""
        return self._blocks.contains(block)

    def get(self, block: int, num_bytes: int, read: Callable[[FileLock], Fetched]) -> Fetched:
        """The block, read by whoever on the node is first; `read` gets the block's lock. Each block that was got needs
        one `release`."""
        self._hold(block)
        try:
            while True:
                shared = self._blocks.open(block, num_bytes)
                if shared is not None:
                    return Fetched(shared, "memory")
                lock = self._blocks.lock(block, self._wait_s)
                if lock is None:
                    continue
                try:
                    shared = self._blocks.open(block, num_bytes)
                    if shared is not None:
                        return Fetched(shared, "memory")
                    return self._put(block, read(lock))
                finally:
                    lock.release()
        except BaseException:
            self.release(block)
            raise

    def begin(self, block: int, lock: FileLock) -> bool:
        """Whether a block is to be read with the one whose lock is held, since nobody else on the node reads or holds
        it. Its own lock is taken without waiting and ends with the other; it needs `finish` or `release`."""
        if self._closed or not self._holds.add(block):
            return False
        if lock_another(lock, block):
            if not self._blocks.contains(block):
                return True
            unlock_block(lock, block)
        self.release(block)
        return False

    def finish(self, block: int, fetched: Fetched) -> Fetched:
        """Shares a block that was begun."""
        return self._put(block, fetched)

    def offer(self, block: int, fetched: Fetched) -> Fetched:
        """Shares a block that was just read under the block's lock. It needs one `release`, as after `get`."""
        self._hold(block)
        try:
            return self._put(block, fetched)
        except BaseException:
            self.release(block)
            raise

    def release(self, block: int) -> None:
        """Ends this process's hold; the last one on the node drops the block."""
        if self._closed:
            return
        lock = self._holds.remove(block)
        if lock is not None:
            self._blocks.drop(block)
            lock.release()

    def sweep(self) -> None:
        """Drops what killed processes left."""
        for group in _numbers(self._blocks):
            for block, _ in self._blocks.sizes(group):
                lock = self._holds.lock_unheld(block)
                if lock is not None:
                    self._blocks.drop(block)
                    lock.release()

    def close(self) -> None:
        """Ends all holds; what nobody else holds is dropped. Idempotent, after the last `get`."""
        if not self._closed:
            self._closed = True
            self._holds.close()
            self._holds = Holds(self._blocks.locks)
            self.sweep()
            self._holds.close()

    def _hold(self, block: int) -> None:
        if self._closed:
            raise ClosedError(f"block {block} was asked of a closed cache")
        deadline_s = time.monotonic() + self._wait_s
        # Another process drops the block just now, which takes it one system call.
        while not self._holds.add(block) and time.monotonic() < deadline_s:
            time.sleep(_PAUSE_S)

    def _put(self, block: int, fetched: Fetched) -> Fetched:
        with contextlib.suppress(OSError):
            self._blocks.write(block, fetched.data)
            shared = self._blocks.open(block, len(fetched.data))
            if shared is not None:
                return Fetched(shared, fetched.tier)
        self._recorder.add("passing_write_failures")
        return fetched.apart()


def _numbers(blocks: BlockStore) -> list[int]:
    with contextlib.suppress(FileNotFoundError):
        return [int(path.name) for path in blocks.folder.iterdir() if path.name.isdigit()]
    return []
