"""Byte ranges and buffers, checked once for every store."""

from __future__ import annotations

from collections.abc import Iterator

from dalipipe.errors import ConfigError, StorageError

PART_BYTES = 8 << 20
"""Larger reads and writes are cut into requests of this size: the smallest at which object stores run at full rate."""


def check_range(url: str, start: int, stop: int | None, into: memoryview | None) -> memoryview | None:
    """Returns `into` as a flat byte view cut to the range, or None without one.

    Raises:
        ConfigError: the range is negative or backwards, or `into` is read-only, too small or given without `stop`.
    """
    if start < 0 or (stop is not None and stop < start):
        raise ConfigError(f"cannot read {url}: bytes [{start}, {stop}) is not a range; 0 <= start <= stop is needed")
    if into is None:
        return None
    if stop is None:
        raise ConfigError(f"cannot read {url} into a buffer without `stop`: the size must be known beforehand")
    if into.readonly or not into.c_contiguous:
        raise ConfigError(f"cannot read {url} into a buffer that is read-only or has gaps; give a writable flat one")
    if into.nbytes < stop - start:
        raise ConfigError(f"cannot read {stop - start} bytes of {url} into a buffer of {into.nbytes} bytes")
    return into.cast("B")[: stop - start]


def split_range(start: int, stop: int, part_bytes: int = PART_BYTES) -> Iterator[tuple[int, int]]:
    """Cuts [start, stop) into consecutive parts of at most `part_bytes`."""
    for low in range(start, stop, part_bytes):
        yield low, min(low + part_bytes, stop)


def flat_bytes(data: bytes | memoryview) -> memoryview:
    """`data` as a contiguous view of bytes; copies only where it has gaps."""
    view = memoryview(data)
    return view.cast("B") if view.c_contiguous else memoryview(view.tobytes())


def short_answer(url: str, start: int, stop: int, num_bytes: int) -> StorageError:
    """The error for an answer that holds fewer bytes than were asked for, twice in a row."""
    return StorageError(
        f"cannot read {url} bytes [{start}, {stop}): the store answered {num_bytes} of {stop - start} bytes, twice. "
        "The object is shorter than its index says, or was replaced while being read; verify the data set"
    )


def empty_range(url: str, start: int, size_bytes: int) -> memoryview:
    """The answer to an empty range that starts at `start` of an object of `size_bytes`.

    Raises:
        StorageError: the range starts behind the end of the object.
    """
    if start > size_bytes:
        raise StorageError(
            f"cannot read {url} from byte {start}: the object has only {size_bytes} bytes; verify the data set"
        )
    return memoryview(b"")
