"""A held block."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from dalipipe.errors import ClosedError


class HeldView:
    """Bytes of one block that stay as they are until `release`; see `BlockView`."""

    __slots__ = ("_held_bytes", "_memory", "_on_release", "_tier")

    def __init__(
        self, memory: memoryview, tier: str, *, held_bytes: int = 0, on_release: Callable[[], None] | None = None
    ) -> None:
        self._memory: memoryview | None = memory.toreadonly()
        self._tier = tier
        self._held_bytes = held_bytes
        self._on_release = on_release

    @property
    def memory(self) -> memoryview:
        """The block's bytes, read-only. Raises ClosedError after `release`."""
        if self._memory is None:
            raise ClosedError("the view of a block was released and is read again; read before `release`")
        return self._memory

    @property
    def tier(self) -> str:
        """Where the bytes came from: lake, node or memory."""
        return self._tier

    @property
    def held_bytes(self) -> int:
        """Memory or disk that this view alone may keep from being freed: 0 for a mapping of a file that stays."""
        return self._held_bytes

    def release(self) -> None:
        """Lets the block go. Idempotent; arrays that are still alive keep the bytes until they die."""
        self._memory = None
        on_release, self._on_release = self._on_release, None
        if on_release is not None:
            on_release()

    def __enter__(self) -> HeldView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
