"""Every other scheme that fsspec knows: HDFS, WebHDFS, SFTP, SMB, memory …"""

from __future__ import annotations

import errno
import posixpath
import secrets
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from dalipipe.errors import ConfigError, DalipipeError, DependencyError, ObjectNotFoundError, StorageError
from dalipipe.masking import masked, secrets_in
from dalipipe.storage.failures import presentable, translate
from dalipipe.storage.ranges import check_range, empty_range, flat_bytes, short_answer
from dalipipe.storage.store import ObjectInfo, StorageConfig
from dalipipe.storage.transport import Record, Transport, discard
from dalipipe.storage.url import (
    ALLUXIO_SCHEMES,
    FILE_SCHEMES,
    OBJECT_OPTIONS,
    OBJECT_SCHEMES,
    SFTP_SCHEMES,
    SMB_SCHEMES,
    TEMPORARY_PREFIX,
    check_host,
    check_key,
    check_prefix,
    join_url,
    object_url,
    scheme_of,
    strip_slash,
)

R = TypeVar("R")

_DEADLINE_BYTES = 64 << 20
# Extras of this package, by the scheme that needs them.
_EXTRAS = {"sftp": "sftp", "ssh": "sftp", "smb": "smb", "alluxio": "alluxio", "alluxiofs": "alluxio"}


class FsspecStore:
    """Objects in any fsspec file system. Listings are never cached; retries and deadlines are this class's own.

    How a `put` stays atomic depends on the system: one with a rename of its own (SFTP, HDFS, WebHDFS, SMB) gets a
    temporary file and a rename, the others write an object in one step. `if_absent` is checked by the system where
    it can (SFTP, SMB and those that write in one step), else by a look right before.
    """

    def __init__(self, url: str, config: StorageConfig, *, record: Record = discard) -> None:
        self._url = strip_slash(url)
        self._shown = masked(self._url)
        self._secrets = secrets_in(self._url, config.options)
        self._config = config
        self._fs, self._root = _open_file_system(url, config)
        self._transport = Transport(self._shown, config, record)

    def __reduce__(self) -> tuple[type[FsspecStore], tuple[str, StorageConfig]]:
        return type(self), (self._url, self._config)

    @property
    def url(self) -> str:
        """The URL that keys are relative to, without its secrets."""
        return self._shown

    def head(self, key: str) -> ObjectInfo:
        """Size of one object; the version mark is empty where the system has none."""
        shown = object_url(self._shown, key)
        info = self._call(lambda: self._fs.info(self._path(key)), f"look up {shown}")
        if info.get("type") == "directory":
            raise ObjectNotFoundError(f"cannot look up {shown}: it is a folder, not an object")
        return _info(key, info)

    def read(self, key: str, start: int = 0, stop: int | None = None, *, into: memoryview | None = None) -> memoryview:
        """Reads bytes [start, stop); see `Store.read`."""
        shown = object_url(self._shown, key)
        target = check_range(shown, start, stop, into)
        if stop is None or start == stop:
            size_bytes = self.head(key).num_bytes
            stop = size_bytes if stop is None else stop
            if stop <= start:
                return empty_range(shown, start, size_bytes)
        path, end = self._path(key), stop
        for _ in range(2):
            answer = self._call(
                lambda: self._fs.cat_file(path, start=start, end=end),
                f"read {shown}",
                num_bytes=end - start,
                hedge=True,
            )
            if len(answer) == end - start:
                break
        else:
            self.head(key)  # some systems read a folder as an empty file
            raise short_answer(shown, start, end, len(answer))
        if target is None:
            return memoryview(answer)
        target[:] = answer
        return target

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """All objects below the folder `prefix`, streamed a folder at a time."""
        prefix = check_prefix(prefix)
        folders = [prefix]
        while folders:
            folder = folders.pop()
            for name, info in self._entries(folder):
                if name.startswith(TEMPORARY_PREFIX):
                    continue
                key = f"{folder}/{name}" if folder else name
                if info.get("type") == "directory":
                    folders.append(key)
                else:
                    yield _info(key, info)

    def put(self, key: str, data: bytes | memoryview | Path, *, if_absent: bool = False) -> None:
        """Writes the object so that it appears at once, complete."""
        path, shown = self._path(key), object_url(self._shown, key)
        write = self._put_renamed if _renames(self._fs) else self._put_direct
        try:
            num_bytes = data.stat().st_size if isinstance(data, Path) else memoryview(data).nbytes
        except OSError as error:
            raise translate(error, f"read {data!s}") from presentable(error)
        self._call(
            lambda: write(path, data, if_absent),
            f"write {shown}",
            num_bytes=num_bytes,
            retries=0 if if_absent else None,
        )

    def delete(self, key: str) -> None:
        """Deletes the object."""
        try:
            self._call(lambda: self._fs.rm_file(self._path(key)), f"delete {object_url(self._shown, key)}")
        except FileNotFoundError:
            return

    def close(self) -> None:
        """Ends the threads; calls that wait raise ClosedError."""
        self._transport.close()
        close = getattr(self._fs, "close", None)
        if close is not None:
            close()

    def _path(self, key: str) -> str:
        return f"{self._root}/{check_key(key)}"

    def _entries(self, folder: str) -> Sequence[tuple[str, dict[str, Any]]]:
        """(name, info) of what lies directly in `folder`; nothing where it does not exist."""
        path = f"{self._root}/{folder}" if folder else self._root or "/"

        def look() -> Sequence[dict[str, Any]]:
            self._fs.invalidate_cache(path)
            found: Sequence[dict[str, Any]] = self._fs.ls(path, detail=True)
            return found

        try:
            found = self._call(look, f"list {join_url(self._shown, folder)}")
        except (FileNotFoundError, NotADirectoryError):
            return []
        own = path.strip("/")
        # Some systems answer `ls` of a file, or of a folder with a marker object, with the name itself.
        infos = [(str(info["name"]).rstrip("/"), info) for info in found]
        return [(posixpath.basename(name), info) for name, info in infos if name.strip("/") != own]

    def _put_direct(self, path: str, data: bytes | memoryview | Path, if_absent: bool) -> None:
        if isinstance(data, Path) and self._fs.async_impl and not if_absent:
            self._fs.put_file(str(data), path)
            return
        self._fs.makedirs(posixpath.dirname(path), exist_ok=True)
        value = data.read_bytes() if isinstance(data, Path) else bytes(flat_bytes(data))
        if not if_absent:
            self._fs.pipe_file(path, value)
            return
        try:
            self._fs.pipe_file(path, value, mode="create")
        except (TypeError, NotImplementedError, ValueError):
            self._refuse_existing(path)
            self._fs.pipe_file(path, value)

    def _put_renamed(self, path: str, data: bytes | memoryview | Path, if_absent: bool) -> None:
        folder = posixpath.dirname(path)
        temporary = f"{folder}/{TEMPORARY_PREFIX}{secrets.token_hex(8)}"
        self._fs.makedirs(folder, exist_ok=True)
        try:
            if isinstance(data, Path):
                self._fs.put_file(str(data), temporary)
            else:
                self._fs.pipe_file(temporary, bytes(flat_bytes(data)))
            self._publish(temporary, path, if_absent)
        except BaseException:
            if self._fs.exists(temporary):
                self._fs.rm_file(temporary)
            raise

    def _publish(self, temporary: str, path: str, if_absent: bool) -> None:
        rename = getattr(self._fs, "claim" if if_absent else "replace", None)
        if rename is not None:
            rename(temporary, path)
            return
        folder = posixpath.dirname(path)
        self._fs.invalidate_cache(folder)
        if if_absent:
            self._refuse_existing(path)
        elif self._fs.exists(path):
            # Renames of HDFS do not replace; readers see no object for a moment, never a torn one.
            self._fs.rm_file(path)
        self._fs.mv(temporary, path)
        self._fs.invalidate_cache(folder)
        if self._fs.exists(temporary):
            # HDFS refuses to rename onto an object that is there, and WebHDFS tells so in an answer nobody reads.
            raise FileExistsError(errno.EEXIST, "File exists", path)

    def _refuse_existing(self, path: str) -> None:
        if self._fs.exists(path):
            raise FileExistsError(errno.EEXIST, "File exists", path)

    def _call(
        self,
        call: Callable[[], R],
        action: str,
        *,
        num_bytes: int = 0,
        retries: int | None = None,
        hedge: bool = False,
    ) -> R:
        timeout_s = self._config.request_timeout_s * (1 + num_bytes // _DEADLINE_BYTES)
        try:
            return self._transport.run(
                call, action, num_bytes=num_bytes, timeout_s=timeout_s, retries=retries, hedge=hedge
            )
        except DalipipeError:
            raise
        except Exception as error:  # noqa: BLE001 - told in our own words
            raise translate(error, action, self._secrets) from presentable(error, self._secrets)


def _info(key: str, info: dict[str, Any]) -> ObjectInfo:
    etag = next((str(info[name]) for name in ("ETag", "etag", "md5Hash", "mtime", "created") if info.get(name)), "")
    size = info.get("size")
    if size is None:
        raise StorageError(f"cannot use the object {key!r}: its file system does not tell the size")
    return ObjectInfo(key=key, num_bytes=int(size), etag=etag)


def _renames(file_system: Any) -> bool:
    """Whether the system has a rename of its own (fsspec's default `mv` is copy and delete)."""
    from fsspec import AbstractFileSystem

    if not isinstance(file_system, AbstractFileSystem):
        return True  # one of our own
    return not file_system.async_impl and type(file_system).mv is not AbstractFileSystem.mv


def _open_file_system(url: str, config: StorageConfig) -> tuple[Any, str]:
    """The file system and the path of `url` in it, without a trailing slash.

    Raises:
        ConfigError: fsspec knows no such scheme, or refuses the URL.
        DependencyError: the scheme needs a package that is missing.
    """
    import fsspec

    scheme = scheme_of(url)
    options = {name: value for name, value in config.options.items() if not name.startswith(OBJECT_OPTIONS)}
    others = {*fsspec.available_protocols(), *ALLUXIO_SCHEMES}
    if scheme not in others:
        known = ", ".join(sorted({*FILE_SCHEMES, *OBJECT_SCHEMES} | others))
        raise ConfigError(f"{url} has the unknown scheme {scheme!r}; give a path, or one of: {known}")
    folder = f"/{url.partition('://')[2].partition('/')[2]}".rstrip("/")
    try:
        if scheme in ALLUXIO_SCHEMES:
            from dalipipe.storage.alluxio import AlluxioFileSystem

            return AlluxioFileSystem(url, config), folder
        check_host(url)
        if scheme in SFTP_SCHEMES:
            from dalipipe.storage.sftp import SftpFileSystem

            return SftpFileSystem(url, config), folder
        if scheme in SMB_SCHEMES:
            from dalipipe.storage.smb import SmbFileSystem

            return SmbFileSystem(url, config), folder
        file_system, path = fsspec.core.url_to_fs(url, use_listings_cache=False, **options)
    except ImportError as error:
        extra = _EXTRAS.get(scheme)
        remedy = f"; install it with: pip install 'dalipipe[{extra}]'" if extra else ""
        raise DependencyError(f"{url} needs a package that is missing: {error}{remedy}") from error
    except ConfigError:
        raise
    except (ValueError, TypeError) as error:
        secrets = secrets_in(url, options)
        raise ConfigError(f"cannot open {url}: {masked(str(error), secrets)}") from presentable(error, secrets)
    except OSError as error:
        secrets = secrets_in(url, options)
        raise translate(error, f"open {url}", secrets) from presentable(error, secrets)
    return file_system, str(path).rstrip("/")
