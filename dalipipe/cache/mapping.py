"""Read-only mappings of whole files that hold no file descriptor.

The standard `mmap` keeps a duplicate of the descriptor for as long as the mapping lives. A window of thousands of held
blocks would run into the usual limit of 1,024 open files, so the mapping is made through libc here.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import mmap
import os
import weakref
from pathlib import Path
from typing import Any

_MADV_POPULATE_READ = 22
_MADV_WILLNEED = 3
_MAP_FAILED = ctypes.c_void_p(-1).value
_EINVAL = 22

_log = logging.getLogger(__name__)


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
    libc.munmap.restype = ctypes.c_int
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.madvise.restype = ctypes.c_int
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.mincore.restype = ctypes.c_int
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    return libc


def map_file(descriptor: int, num_bytes: int) -> memoryview:
    """Maps the first `num_bytes` (> 0) of an open file, reads them into the page cache and returns them read-only.

    The mapping ends when the last view or array over it is dead; the descriptor may be closed at once, and the file
    unlinked.

    Raises:
        OSError: the kernel refused the mapping, or the pages cannot be read (EFAULT where the file is shorter, EIO
            where the disk failed): here, instead of a SIGBUS in whoever reads the bytes later.
    """
    libc = _libc()
    address = libc.mmap(None, num_bytes, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    if address is None or address == _MAP_FAILED:
        raise _last_error()
    buffer = (ctypes.c_ubyte * num_bytes).from_address(address)
    # Views keep `buffer` alive, and numpy arrays keep the views: unmapping before the last of them is impossible.
    weakref.finalize(buffer, libc.munmap, address, num_bytes).atexit = False
    _populate(address, num_bytes)
    return memoryview(buffer).cast("B").toreadonly()


def map_path(path: Path) -> memoryview:
    """Maps the whole file at `path` (not empty) as `map_file` does. Raises OSError, also when there is no such file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return map_file(descriptor, os.fstat(descriptor).st_size)
    finally:
        os.close(descriptor)


def resident_bytes(path: Path) -> int:
    """How much of a file lies in the page cache (whole pages). Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    libc = _libc()
    try:
        num_bytes = os.fstat(descriptor).st_size
        if not num_bytes:
            return 0
        address = libc.mmap(None, num_bytes, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
        if address is None or address == _MAP_FAILED:
            raise _last_error()
        try:
            pages = (ctypes.c_ubyte * -(-num_bytes // mmap.PAGESIZE))()
            if libc.mincore(address, num_bytes, pages):
                raise _last_error()
            return min(num_bytes, mmap.PAGESIZE * sum(page & 1 for page in bytes(pages)))
        finally:
            libc.munmap(address, num_bytes)
    finally:
        os.close(descriptor)


def _populate(address: int, num_bytes: int) -> None:
    libc = _libc()
    if libc.madvise(address, num_bytes, _MADV_POPULATE_READ) == 0:
        return
    error = _last_error()
    if error.errno != _EINVAL:
        raise error
    _say_no_populate()
    libc.madvise(address, num_bytes, _MADV_WILLNEED)


@functools.cache
def _say_no_populate() -> None:
    _log.warning("this kernel has no MADV_POPULATE_READ (Linux 5.14): decode threads may wait for pages of the cache")


def _last_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
