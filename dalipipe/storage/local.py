"""Plain files, read by pread: no client, no copy beyond the kernel's."""

from __future__ import annotations

import errno
import os
import secrets
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dalipipe.errors import DalipipeError, ObjectNotFoundError, StorageError, StorageTimeoutError
from dalipipe.storage.failures import presentable, translate
from dalipipe.storage.ranges import check_range, empty_range, flat_bytes, short_answer
from dalipipe.storage.store import ObjectInfo, StorageConfig
from dalipipe.storage.url import TEMPORARY_PREFIX, check_prefix, join_url, object_url, strip_slash

_COPY_BYTES = 8 << 20
_PAGE_BYTES = 4096
_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT)
_DONTNEED = os.POSIX_FADV_DONTNEED
# O_NONBLOCK has no effect on files, but a FIFO that lies in the lake must not hang its reader.
_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK


class LocalStore:
    """Files below one folder. `url` is the absolute path of the folder.

    Reads of plain files cannot be interrupted, so the deadline covers the wait for a free slot, not a hung mount.
    """

    def __init__(self, path: str | Path, config: StorageConfig) -> None:
        self._url = strip_slash(str(Path(path).expanduser().absolute()))
        self._config = config
        self._slots = threading.BoundedSemaphore(config.concurrency)

    def __reduce__(self) -> tuple[type[LocalStore], tuple[str, StorageConfig]]:
        return type(self), (self._url, self._config)

    @property
    def url(self) -> str:
        """The absolute path that keys are relative to."""
        return self._url

    def head(self, key: str) -> ObjectInfo:
        """Size and version; the version changes with every `put`."""
        path = object_url(self._url, key)
        with self._action(f"look up {path}"):
            return _info(key, path, Path(path).stat())

    def read(self, key: str, start: int = 0, stop: int | None = None, *, into: memoryview | None = None) -> memoryview:
        """Reads bytes [start, stop); see `Store.read`."""
        path = object_url(self._url, key)
        target = check_range(path, start, stop, into)
        with self._action(f"read {path}"):
            for _ in range(2):
                view, end = _read_once(path, start, stop, target, drop=self._config.page_cache == "drop")
                if start + len(view) == end:
                    return view
        raise short_answer(path, start, end, len(view))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """All files below the folder `prefix`, links followed, unfinished writes left out."""
        prefix = check_prefix(prefix)
        folder = join_url(self._url, prefix)
        try:
            yield from _walk(folder, prefix, ())
        except DalipipeError:
            raise
        except OSError as error:
            raise translate(error, f"list {error.filename or folder}") from presentable(error)

    def put(self, key: str, data: bytes | memoryview | Path, *, if_absent: bool = False) -> None:
        """Writes a temporary file beside the target, syncs it and renames it (`if_absent`: links it)."""
        path = Path(object_url(self._url, key))
        with self._action(f"write {path}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.parent / f"{TEMPORARY_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
            try:
                _write_new(temporary, data)
                if if_absent:
                    _publish_if_absent(temporary, path)
                else:
                    temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)
            _sync_folder(path.parent)

    def delete(self, key: str) -> None:
        """Removes the file; its folder stays."""
        path = object_url(self._url, key)
        with self._action(f"delete {path}"):
            try:
                Path(path).unlink()
            except (FileNotFoundError, NotADirectoryError):
                return

    def close(self) -> None:
        """Nothing is held open between calls."""

    @contextmanager
    def _action(self, action: str) -> Iterator[None]:
        """Takes a slot and turns system errors into typed ones."""
        if not self._slots.acquire(timeout=self._config.request_timeout_s):
            raise StorageTimeoutError(
                f"cannot {action}: {self._config.concurrency} other calls kept the store busy for "
                f"{self._config.request_timeout_s} s; raise storage.concurrency or look at the disk"
            )
        try:
            yield
        except DalipipeError:
            raise
        except OSError as error:
            raise translate(error, action) from presentable(error)
        finally:
            self._slots.release()


def _info(key: str, path: str, status: os.stat_result) -> ObjectInfo:
    if not stat.S_ISREG(status.st_mode):
        raise ObjectNotFoundError(f"cannot use {path} as an object: it is a folder or a device, not a file")
    etag = f"{status.st_mtime_ns:x}-{status.st_size:x}-{status.st_ino:x}"
    return ObjectInfo(key=key, num_bytes=status.st_size, etag=etag)


def _read_once(
    path: str, start: int, stop: int | None, target: memoryview | None, *, drop: bool
) -> tuple[memoryview, int]:
    """Returns what is there of [start, stop) and the end that was asked for; with `drop` and a target, the pages of a
    range that was read leave the page cache, so that a lake that passes through pushes nothing out of it."""
    descriptor = os.open(path, _READ_FLAGS)
    try:
        size_bytes = _info("", path, os.fstat(descriptor)).num_bytes
        end = size_bytes if stop is None else stop
        if end <= start:
            return empty_range(path, start, size_bytes), start
        if target is None:
            return memoryview(_read_bytes(descriptor, start, end - start)), end
        filled = 0
        while filled < len(target) and (count := os.preadv(descriptor, [target[filled:]], start + filled)):
            filled += count
        if drop:
            os.posix_fadvise(descriptor, start // _PAGE_BYTES * _PAGE_BYTES, end - start + _PAGE_BYTES, _DONTNEED)
        return target[:filled], end
    finally:
        os.close(descriptor)


def _read_bytes(descriptor: int, start: int, num_bytes: int) -> bytes:
    first = os.pread(descriptor, num_bytes, start)
    if len(first) == num_bytes:
        return first
    pieces, have = [first], len(first)  # Linux gives at most 2 GiB at once
    while have < num_bytes and (piece := os.pread(descriptor, num_bytes - have, start + have)):
        pieces.append(piece)
        have += len(piece)
    return b"".join(pieces)


def _walk(folder: str, prefix: str, above: tuple[tuple[int, int], ...]) -> Iterator[ObjectInfo]:
    """Streams the files below `folder`; `above` holds (device, inode) of its parents, so that links cannot loop."""
    try:
        status = Path(folder).stat()
        identity = (status.st_dev, status.st_ino)
        if identity in above or not stat.S_ISDIR(status.st_mode):
            return
        with os.scandir(folder) as found:
            entries = list(found)
    except FileNotFoundError:
        return
    for entry in entries:
        if entry.name.startswith(TEMPORARY_PREFIX):
            continue
        key = f"{prefix}/{entry.name}" if prefix else entry.name
        try:
            is_folder = entry.is_dir()
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            continue  # a link that leads to itself leads nowhere
        if is_folder:
            yield from _walk(entry.path, key, (*above, identity))
        elif entry.is_file():
            yield _listed(key, entry)


def _listed(key: str, entry: os.DirEntry[str]) -> ObjectInfo:
    try:
        key.encode()
    except UnicodeEncodeError as error:
        raise StorageError(
            f"cannot list {os.fsencode(entry.path)!r}: the file name is not UTF-8, as keys must be; rename it"
        ) from error
    return _info(key, entry.path, entry.stat())


def _write_new(path: Path, data: bytes | memoryview | Path) -> None:
    """Writes a new file, which has no name until it is whole, where the file system can do that: a killed writer then
    leaves nothing behind. A local file without a name on the same disk is not copied, it gets this one."""
    if isinstance(data, Path) and _adopt(data, path):
        return
    try:
        descriptor = os.open(path.parent, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno not in _NO_TMPFILE:
            raise
    else:
        try:
            _fill(descriptor, data)
            if _give_name(descriptor, path):
                return
        finally:
            os.close(descriptor)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        _fill(descriptor, data)
    finally:
        os.close(descriptor)


def _adopt(file: Path, path: Path) -> bool:
    """Gives `path` to a file that has no name (the /proc link of an O_TMPFILE descriptor) on the disk of `path`."""
    try:
        status = file.stat()
        if status.st_nlink or status.st_dev != path.parent.stat().st_dev:
            return False
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        os.fsync(descriptor)
        return _give_name(descriptor, path)
    finally:
        os.close(descriptor)


def _fill(descriptor: int, data: bytes | memoryview | Path) -> None:
    if isinstance(data, Path):
        _copy(data, descriptor)
    else:
        _write_all(descriptor, flat_bytes(data))
    os.fsync(descriptor)


def _give_name(descriptor: int, path: Path) -> bool:
    """Links a nameless file; False where the file system has no links, or /proc is not there."""
    # Python calls linkat, which follows the /proc link, only when it is given a folder.
    root = os.open("/", os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.link(f"/proc/self/fd/{descriptor}", path, src_dir_fd=root, follow_symlinks=True)
    except OSError:
        return False
    finally:
        os.close(root)
    return True


def _copy(source: Path, descriptor: int) -> None:
    """Copies a whole file. What its reading raises names the source, not the target."""
    try:
        file = source.open("rb", buffering=0)
    except OSError as error:
        raise translate(error, f"read {source}") from presentable(error)
    with file:
        while piece := file.read(_COPY_BYTES):
            _write_all(descriptor, memoryview(piece))


def _write_all(descriptor: int, view: memoryview) -> None:
    while view:
        view = view[os.write(descriptor, view) :]


def _publish_if_absent(temporary: Path, path: Path) -> None:
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError:
        # FUSE mounts of object stores have no links. The look before the rename leaves a window, but a small one.
        if path.exists():
            raise FileExistsError(errno.EEXIST, "File exists") from None
        temporary.replace(path)


def _sync_folder(folder: Path) -> None:
    """Makes the new name survive a power cut; file systems without folder handles are left alone."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    except OSError:
        return
    finally:
        os.close(descriptor)
