"""One call for a block, wherever it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol


class BlockView(Protocol):
    """A held block. Its bytes stay valid and unchanged until `release`, whatever is evicted meanwhile."""

    @property
    def memory(self) -> memoryview:
        """The block's bytes, read-only."""

    @property
    def tier(self) -> str:
        """Where the bytes came from for this call: lake, pool, node or memory."""

    @property
    def held_bytes(self) -> int:
        """Memory or disk that this view alone may keep from being freed: 0 for a mapping of a file that stays."""

    def release(self) -> None:
        """Lets the block go. Idempotent. Arrays over `memory` must be dead by then."""

    def __enter__(self) -> BlockView: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Cache(Protocol):
    """Blocks of one data set, near. Thread-safe, and shared by all processes of the node through the file system."""

    def get(self, block: int) -> BlockView:
        """Returns the block from the nearest tier, bringing it near first when it is not; one fetch per node.

        Raises:
            IntegrityError: the bytes in the lake do not match the manifest, after reading them again.
            StorageError: the lake cannot be read.
            CacheTimeoutError: another process has been bringing the block for longer than the deadline.
        """

    def get_run(self, blocks: Sequence[int], deliver: Callable[[int, BlockView], None]) -> None:
        """As `get` of the first of `blocks`, with as many of those after it as one request of the lake brings along:
        they lie one behind the other in a shard, none is near, and nobody else is bringing it.

        Args:
            deliver: called in this thread with each block that came and its view, the first one first; must not raise.
                A block that it is not called with is left to a `get` of its own, which tells what was wrong with it.

        Raises as `get`, for the first; nothing was delivered then.
        """

    @property
    def request_bytes(self) -> int:
        """What one request of the lake for several blocks may bring at most; 0: each block has its own."""

    def together(self, blocks: Sequence[int]) -> Sequence[int]:
        """The first of `blocks`, and those after it that `get_run` would bring with it if nobody else came first. May
        read an index. Raises ManifestError or StorageError when that cannot be had."""

    def bring(self, blocks: Sequence[int]) -> Mapping[int, bool]:
        """Brings the first of `blocks`, and those that come with it, to where they are kept, if there is room without
        dropping others. Returns which were dealt with, the first in any case, and whether each is kept now. Raises as
        `get`."""

    def request(self, blocks: Sequence[int], need_by: Sequence[int]) -> None:
        """Announces blocks (in order of need; `need_by` = the step that reads each). A hint: it never blocks."""

    def contains(self, block: int) -> bool:
        """Whether `get` would be answered without the lake just now."""

    def close(self) -> None:
        """Frees what this process holds; other processes are untouched. Idempotent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A block that a tier keeps: its bytes, when it was used last (seconds since 1970) and how often."""

    block: int
    num_bytes: int
    last_use_s: float
    uses: int = 0


class EvictionPolicy(Protocol):
    """Decides which blocks a tier keeps. Pure: it answers, the tier acts."""

    @property
    def name(self) -> str:
        """pin, lru, lfu or stream."""

    def admits(self, block: int) -> bool:
        """Whether the tier keeps this block at all."""

    def victims(self, entries: Sequence[Entry], need_bytes: int, newcomer_uses: int | None = None) -> Sequence[int]:
        """Which blocks to drop so that `need_bytes` are freed; empty when the policy never evicts or cannot.

        Args:
            entries: what the set that is full holds.
            newcomer_uses: how often the block was used for which room is made, itself included; None where room must
                be had whatever comes.
        """
