"""Copying a source file to a local one, decompressed where it is compressed, without holding it in memory."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import shutil
import zlib
from typing import BinaryIO, cast

from dalipipe.errors import IntegrityError
from dalipipe.storage.store import ObjectInfo, Store

_PIECE_BYTES = 8 * 2**20
_COPY_BYTES = 2**20
_COMPRESSED = (".gz", ".tgz", ".bz2", ".xz")


def is_compressed(name: str) -> bool:
    """Whether the name is one of a compressed tar."""
    return name.lower().endswith(_COMPRESSED)


class ObjectReader(io.RawIOBase):
    """An object as a file that is read from its beginning to its end, a piece at a time."""

    def __init__(self, store: Store, info: ObjectInfo) -> None:
        self._store = store
        self._info = info
        self._at = 0
        self._piece = memoryview(b"")

    def readable(self) -> bool:
        """Always."""
        return True

    def readinto(self, buffer: object) -> int:
        """Fills `buffer`; 0 at the end."""
        target = memoryview(cast(bytearray, buffer)).cast("B")
        if not self._piece and self._at < self._info.num_bytes:
            stop = min(self._at + _PIECE_BYTES, self._info.num_bytes)
            self._piece = self._store.read(self._info.key, self._at, stop)
            self._at = stop
        count = min(len(target), len(self._piece))
        target[:count] = self._piece[:count]
        self._piece = self._piece[count:]
        return count


def copy_input(store: Store, info: ObjectInfo, sink: BinaryIO, decompress: bool) -> None:
    """Copies an object into a file and flushes it; gzip, bzip2 and xz, known by their first bytes, are decompressed.

    Raises:
        IntegrityError: the compressed stream is damaged or cut short.
    """
    raw: BinaryIO = io.BufferedReader(ObjectReader(store, info), _COPY_BYTES)
    start = bytes(store.read(info.key, 0, min(6, info.num_bytes))) if decompress and info.num_bytes else b""
    stream: BinaryIO
    if start[:2] == b"\x1f\x8b":
        stream = cast(BinaryIO, gzip.GzipFile(fileobj=raw, mode="rb"))
    elif start[:3] == b"BZh":
        stream = cast(BinaryIO, bz2.BZ2File(raw))
    elif start == b"\xfd7zXZ\0":
        stream = cast(BinaryIO, lzma.LZMAFile(raw))  # noqa: SIM115 - closed below
    elif start[:4] == b"\x28\xb5\x2f\xfd":
        raise IntegrityError("zstd-compressed tars are not read; decompress it, or use gzip")
    else:
        stream = raw
    try:
        with stream:
            shutil.copyfileobj(stream, sink, _COPY_BYTES)
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise IntegrityError(f"its compressed stream is broken ({error})") from error
    sink.flush()


def copy_range(source: BinaryIO, start: int, num_bytes: int, sink: BinaryIO) -> None:
    """Appends a range of one file to another."""
    descriptor = source.fileno()
    stop = start + num_bytes
    while start < stop:
        data = os.pread(descriptor, min(_COPY_BYTES, stop - start), start)
        if not data:
            raise IntegrityError(f"bytes [{start}, {stop}) pass the end of a temporary file")
        sink.write(data)
        start += len(data)
