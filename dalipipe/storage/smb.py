"""Files of a Windows or Samba share (SMB 2 and 3), as `FsspecStore` needs them.

fsspec's own system opens a file so that no second reader can, shares its connections among all users of a process,
waits for answers without a deadline, and cannot rename over an object. This keeps smbprotocol, the client behind it.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import logging
import random
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import smbclient
from smbprotocol.connection import Connection
from smbprotocol.exceptions import (
    EndOfFile,
    SMBAuthenticationError,
    SMBConnectionClosed,
    SMBException,
    SMBResponseException,
)
from smbprotocol.header import NtStatus
from smbprotocol.session import Session

from dalipipe.errors import ConfigError
from dalipipe.storage.ranges import PART_BYTES
from dalipipe.storage.store import StorageConfig
from dalipipe.storage.url import OBJECT_OPTIONS

_MAX_CALLS = 8  # on one connection: each wants credits of the server for what it moves
_OPTIONS = ("auth_protocol", "encrypt", "password", "port", "username")
_AUTH_PROTOCOLS = ("negotiate", "ntlm", "kerberos")
_SHARED = "rwd"  # others may read, replace and delete what is open here
_REPARSE_POINT = 0x400
_DIRECTORY = 0x10
# What a call meets whose connection another one found broken, and closed.
_SOCKET_GONE = {errno.EBADF, errno.ENOTCONN, errno.ESHUTDOWN}
# What SMB allows in no name, as Services for Mac, Samba's `fruit` and Linux's mounts (`mapposix`) write it.
_TO_SHARE = str.maketrans({'"': 0xF020, "*": 0xF021, ":": 0xF022, "<": 0xF023, ">": 0xF024, "?": 0xF025, "\\": 0xF026,
                           "|": 0xF027, **{chr(code): 0xF000 + code for code in range(1, 32)}})  # fmt: skip
_TO_SHARE_AT_END = {" ": "\uf028", ".": "\uf029"}
_FROM_SHARE = {code: char for char, code in _TO_SHARE.items()} | {0xF028: " ", 0xF029: "."}
# [MS-ERREF] 2.3.1; the codes without a name are missing in the client.
_MISSING = {
    NtStatus.STATUS_OBJECT_NAME_NOT_FOUND, NtStatus.STATUS_OBJECT_PATH_NOT_FOUND, NtStatus.STATUS_NO_SUCH_FILE,
    NtStatus.STATUS_DELETE_PENDING,
}  # fmt: skip
_NOT_LET_IN = {
    NtStatus.STATUS_LOGON_FAILURE, NtStatus.STATUS_WRONG_PASSWORD, NtStatus.STATUS_PASSWORD_EXPIRED,
    0xC000006E, 0xC0000072, 0xC0000193, 0xC0000224, 0xC0000234,
}  # fmt: skip
_SESSION_ENDED = {
    NtStatus.STATUS_USER_SESSION_DELETED, NtStatus.STATUS_NETWORK_NAME_DELETED, NtStatus.STATUS_FILE_CLOSED,
    NtStatus.STATUS_INVALID_HANDLE, 0xC000035C,
}  # fmt: skip
_BUSY = {
    NtStatus.STATUS_INSUFFICIENT_RESOURCES, NtStatus.STATUS_INSUFF_SERVER_RESOURCES,
    NtStatus.STATUS_REQUEST_NOT_ACCEPTED, NtStatus.STATUS_SERVER_UNAVAILABLE,
}  # fmt: skip


class SmbFileSystem:
    """The files of one share, over one connection that carries up to 8 calls at once.

    The URL is `smb://[DOMAIN;]user:password@host[:port]/share/folder`. Connects at the first call, and again after the
    connection broke. Without a user the client asks Kerberos. Names are looked up without regard to case, as SMB does;
    characters that SMB allows in no name are written as Linux's mounts of such shares write them.

    Errors are the builtins: PermissionError (login, file), FileNotFoundError, FileExistsError, IsADirectoryError,
    TimeoutError, ConnectionError, BlockingIOError (somebody has the file open for himself alone; try again).

    Raises:
        ConfigError: the URL names no host or no share, or an option is unknown.
    """

    async_impl = False

    def __init__(self, url: str, config: StorageConfig) -> None:
        parts = urlsplit(url)
        share = url.partition("://")[2].partition("/")[2].partition("/")[0]
        if not parts.hostname or not share:
            raise ConfigError(f"{url} names no host or no share; write it as smb://user@host/share/folder")
        self._options = _checked(config.options)
        for name, value in (("username", parts.username), ("password", parts.password)):
            if value is not None:
                self._options[name] = unquote(value)
        if ";" in (self._options.get("username") or ""):
            self._options["username"] = self._options["username"].replace(";", "\\", 1)
        self._host = parts.hostname
        self._port = int(self._options.pop("port", None) or parts.port or 445)
        self._encrypt = bool(self._options.pop("encrypt", False))
        self._connect_timeout_s, self._read_timeout_s = config.connect_timeout_s, config.read_timeout_s
        self._wait_s = config.request_timeout_s
        self._connections: dict[str, Connection] = {}  # by the client's own names; more than one behind a DFS root
        self._last: Connection | None = None
        self._connecting = threading.Lock()
        self._slots = threading.BoundedSemaphore(_MAX_CALLS)
        self._closed = threading.Event()

    def info(self, path: str) -> dict[str, Any]:
        """Name, type, size and time of change."""
        with self._session(path) as options:
            status = smbclient.stat(self._full(path), **options)
        return _info(path, status.st_file_attributes, status.st_size, status.st_mtime_ns // 1000)

    def exists(self, path: str) -> bool:
        """Whether there is anything at `path`."""
        try:
            self.info(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def ls(self, path: str, *, detail: bool) -> list[dict[str, Any]]:  # noqa: ARG002 - as fsspec names it
        """What lies directly in a folder; links are followed, those that lead nowhere left out."""
        found = []
        with self._session(path) as options, smbclient.scandir(self._full(path), **options) as entries:
            for entry in entries:
                name = f"{path.rstrip('/')}/{entry.name.translate(_FROM_SHARE)}"
                seen = entry.smb_info
                if seen.file_attributes & _REPARSE_POINT:
                    with contextlib.suppress(OSError, SMBException):
                        status = smbclient.stat(entry.path, **options)
                        found.append(_info(name, status.st_file_attributes, status.st_size, status.st_mtime_ns // 1000))
                else:
                    found.append(
                        _info(
                            name, seen.file_attributes, seen.end_of_file, round(seen.last_write_time.timestamp() * 1e6)
                        )
                    )
        return found

    def cat_file(self, path: str, *, start: int, end: int) -> bytes:
        """Bytes [start, end), fewer where the file ends before."""
        with self._session(path) as options, _opened(self._full(path), "rb", options) as file:
            data = bytearray(max(0, min(end, file.fd.end_of_file) - start))
            view, done = memoryview(data), 0
            file.seek(start)
            with contextlib.suppress(EndOfFile):  # it was cut short meanwhile
                while done < len(data):
                    done += _moved(file.readinto(view[done:]))
            return bytes(view[:done])

    def pipe_file(self, path: str, value: bytes) -> None:
        """Writes a new file, or over an old one."""
        with self._session(path) as options, _opened(self._full(path), "wb", options) as file:
            _write(file, memoryview(value))

    def put_file(self, source: str, path: str) -> None:
        """Copies a local file."""
        with (
            Path(source).open("rb") as local,
            self._session(path) as options,
            _opened(self._full(path), "wb", options) as file,
        ):
            while piece := local.read(PART_BYTES):
                _write(file, memoryview(piece))

    def replace(self, old: str, new: str) -> None:
        """Renames, over what may be there. Servers refuse that while a reader has it open: tried again for a while."""
        deadline_s = time.monotonic() + self._read_timeout_s
        while True:
            try:
                with self._session(new) as options:
                    smbclient.replace(self._full(old), self._full(new), **options)
                return
            except (PermissionError, BlockingIOError) as error:
                if not self.exists(new):
                    raise
                if time.monotonic() > deadline_s:
                    raise BlockingIOError(
                        errno.EAGAIN,
                        f"readers kept the object that is to be replaced open for {self._read_timeout_s:g} s, or the "
                        "user may not replace it",
                    ) from error
            self._closed.wait(random.uniform(0.001, 0.03))  # the gap between two reads may be short

    def claim(self, old: str, new: str) -> None:
        """Renames, unless there is something: the server refuses that."""
        try:
            with self._session(new) as options:
                smbclient.rename(self._full(old), self._full(new), **options)
        except (PermissionError, BlockingIOError) as error:
            if self.exists(new):  # and open: told as what it is
                raise FileExistsError(errno.EEXIST, "File exists", new) from error
            raise

    def rm_file(self, path: str) -> None:
        """Removes a file."""
        with self._session(path) as options:
            smbclient.remove(self._full(path), **options)

    def makedirs(self, path: str, *, exist_ok: bool) -> None:
        """Makes a folder and those above it."""
        with self._session(path) as options:
            smbclient.makedirs(self._full(path), exist_ok=exist_ok, **options)

    def invalidate_cache(self, path: str) -> None:
        """Nothing is cached."""

    def close(self) -> None:
        """Ends the connection; calls that wait for an answer fail. Idempotent."""
        self._closed.set()
        # Without the lock: it may be held by who waits for a server that never answers.
        for connection in (*self._connections.values(), *([self._last] if self._last else [])):
            _drop(connection)

    def _full(self, path: str) -> str:
        r"""`\\host\share\folder\name` of a path that begins with the share's name."""
        share, *names = path.strip("/").split("/")
        return "\\".join(["\\\\" + self._host, share, *(_to_share(name) for name in names if name)])

    @contextlib.contextmanager
    def _session(self, path: str) -> Iterator[dict[str, Any]]:
        """What the client's calls take to use this store's connection; its errors come out as the builtin ones."""
        if not self._slots.acquire(timeout=self._wait_s):
            raise TimeoutError(errno.ETIMEDOUT, f"{_MAX_CALLS} other calls kept the SMB connection busy")
        try:
            self._connect()
            yield {
                **self._options,
                "port": self._port,
                "encrypt": self._encrypt or None,
                "connection_timeout": self._connect_timeout_s,
                "connection_cache": self._connections,
            }
        except SMBException as error:
            raise self._meaning(error, path) from error
        except OSError as error:
            if error.errno in _SOCKET_GONE:
                raise ConnectionResetError(errno.ECONNRESET, "the SMB connection broke") from error
            raise
        except ValueError as error:
            if isinstance(error.__cause__, OSError):  # how the client tells that it cannot connect
                raise error.__cause__ from None
            raise
        finally:
            self._slots.release()

    def _connect(self) -> None:
        """Connects where there is no connection, or it broke."""
        name = f"{self._host.lower()}:{self._port}"  # as the client looks for it
        with self._connecting:
            known = self._connections.get(name)
            if known is not None and known.transport.connected:
                return
            self._connections.pop(name, None)
            self._last = connection = Connection(uuid.uuid4(), self._host, self._port)
            # After so long without a word the client asks whether the server is there, and a second time gives up.
            connection._receive_timeout = self._read_timeout_s
            try:
                try:
                    connection.connect(timeout=self._connect_timeout_s)
                except SMBException as error:
                    raise TimeoutError(
                        errno.ETIMEDOUT,
                        f"no SMB server answered within {max(1, self._connect_timeout_s):g} s ({error}); check host "
                        "and port, or raise storage.connect_timeout_s",
                    ) from error
                Session(
                    connection,
                    username=self._options.get("username"),
                    password=self._options.get("password"),
                    require_encryption=self._encrypt,
                    auth_protocol=self._options.get("auth_protocol", "negotiate"),
                ).connect()
            except BaseException:
                _drop(connection)
                raise
            self._connections[name] = connection
            if self._closed.is_set():
                _drop(connection)
                raise ConnectionAbortedError(errno.ECONNABORTED, "the store was closed meanwhile")

    def _meaning(self, error: SMBException, path: str) -> OSError:
        status = error.status if isinstance(error, SMBResponseException) else getattr(error, "ntstatus", None)
        user = self._options.get("username")
        # A server that takes strangers for guests cannot sign what it sends them.
        if isinstance(error, SMBAuthenticationError) or status in _NOT_LET_IN or "as a guest" in str(error):
            return PermissionError(
                errno.EACCES,
                f"the server does not let in {f'user {user!r}' if user else 'this user'} ({_shown(error, status)}): "
                "give the user in the URL (smb://DOMAIN;user@host/share) and +storage.options.password",
            )
        if status in _SESSION_ENDED:
            _drop(self._last)
            return ConnectionResetError(errno.ECONNRESET, f"the server ended the session ({_shown(error, status)})")
        if status is None and not isinstance(error, OSError):
            if "credits" in str(error):
                return BlockingIOError(errno.EAGAIN, "the server has no room for another request just now")
            if isinstance(error, SMBConnectionClosed):
                return ConnectionResetError(errno.ECONNRESET, f"the SMB connection broke ({error})")
        found = _builtin(status, path)
        if found is not None:
            return found
        if isinstance(error, OSError) and error.errno:
            return OSError(error.errno, error.strerror, path)  # of the kind that belongs to the number
        return OSError(errno.EIO, f"{type(error).__name__}: {_shown(error, status)}", path)


def _builtin(status: int | None, path: str) -> OSError | None:
    """The builtin error that a status of the server stands for; None where there is none of its own."""
    if status in _MISSING:
        return FileNotFoundError(errno.ENOENT, "No such file or directory", path)
    if status in (NtStatus.STATUS_BAD_NETWORK_NAME, NtStatus.STATUS_NOT_FOUND):
        return FileNotFoundError(errno.ENOENT, f"the server has no share {path.strip('/').partition('/')[0]!r}", path)
    if status in (NtStatus.STATUS_ACCESS_DENIED, NtStatus.STATUS_CANNOT_DELETE):
        return PermissionError(errno.EACCES, "Permission denied", path)
    if status == NtStatus.STATUS_SHARING_VIOLATION:
        return BlockingIOError(errno.EAGAIN, "another process has the file open for itself alone", path)
    if status in _BUSY:
        return BlockingIOError(errno.EAGAIN, "the server has no room for another request just now", path)
    if status == NtStatus.STATUS_IO_TIMEOUT:
        return TimeoutError(errno.ETIMEDOUT, "the server's own storage did not answer in time", path)
    if status == NtStatus.STATUS_DISK_FULL:
        return OSError(errno.ENOSPC, "No space left on device", path)
    if status == NtStatus.STATUS_OBJECT_NAME_INVALID:
        return OSError(errno.EINVAL, "the server takes no file of that name", path)
    return None


@contextlib.contextmanager
def _opened(full: str, mode: str, options: Mapping[str, Any]) -> Iterator[Any]:
    file = smbclient.open_file(full, mode, buffering=0, share_access=_SHARED, **options)
    try:
        yield file
    finally:
        try:
            file.close()
        finally:
            file.fd._connected = False  # where the connection broke it would stay open, and complain at its end


def _write(file: Any, data: memoryview) -> None:
    done = 0
    while done < len(data):
        done += _moved(file.write(data[done:]))


def _moved(num_bytes: int) -> int:
    if num_bytes == 0:  # the client sends an empty request when other calls took what the server allows
        raise BlockingIOError(errno.EAGAIN, "the server has no room for another request just now")
    return num_bytes


def _drop(connection: Connection | None) -> None:
    """Ends a connection without taking leave, which would wait for the server; who waits for an answer is told."""
    opened: socket.socket | None = getattr(getattr(connection, "transport", None), "_sock", None)
    if connection is None or opened is None:
        return
    with contextlib.suppress(OSError):
        opened.shutdown(socket.SHUT_RDWR)  # a `send` that hangs holds the lock that the client's `close` takes
    with contextlib.suppress(OSError, SMBException):
        connection.disconnect(close=False)


def _to_share(name: str) -> str:
    kept = name.translate(_TO_SHARE)
    return kept[:-1] + _TO_SHARE_AT_END.get(kept[-1], kept[-1])


def _info(path: str, attributes: int, num_bytes: int, mtime_us: int) -> dict[str, Any]:
    kind = "directory" if attributes & _DIRECTORY else "file"
    return {"name": path, "type": kind, "size": int(num_bytes), "mtime": mtime_us}


def _shown(error: BaseException, status: int | None) -> str:
    names = (name for name, value in vars(NtStatus).items() if value == status and name.startswith("STATUS_"))
    return next(names, str(error) if status is None else f"status {status:#x}")


def _checked(options: Mapping[str, Any]) -> dict[str, Any]:
    for name in options:
        if name not in _OPTIONS and not name.startswith(OBJECT_OPTIONS):
            near = difflib.get_close_matches(str(name), _OPTIONS, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(f"storage.options.{name} is no option of smb; {hint}There are: {', '.join(_OPTIONS)}")
    given = {name: value for name, value in options.items() if name in _OPTIONS and value is not None}
    protocol = given.get("auth_protocol", "negotiate")
    if protocol not in _AUTH_PROTOCOLS:
        raise ConfigError(f"storage.options.auth_protocol={protocol!r} must be one of {', '.join(_AUTH_PROTOCOLS)}")
    if not isinstance(given.get("encrypt", True), bool):
        raise ConfigError(f"storage.options.encrypt={given['encrypt']!r} must be true or false")
    return given


# What goes wrong is raised; the client would log it beside that, with a traceback.
for _name in ("smbprotocol", "smbclient", "spnego"):
    logging.getLogger(_name).setLevel(logging.CRITICAL)
