"""Files over SFTP, as `FsspecStore` needs them.

fsspec's own system trusts any host key, waits without a deadline, shares one channel among all threads (whose answers
then reach the wrong ones) and reads 32 KiB a round trip. This one keeps paramiko, the client behind it.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import io
import logging
import queue
import stat
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import paramiko

from dalipipe.errors import ConfigError
from dalipipe.storage.ranges import split_range
from dalipipe.storage.store import StorageConfig
from dalipipe.storage.url import OBJECT_OPTIONS

_MAX_SESSIONS = 8  # sshd allows 10 on one connection
_POLICIES = ("reject", "auto_add")
# What of paramiko's `connect` a user may give, beside the two of our own.
_CONNECT_OPTIONS = (
    "allow_agent",
    "compress",
    "disabled_algorithms",
    "key_filename",
    "look_for_keys",
    "passphrase",
    "password",
    "port",
    "username",
)
_OWN_OPTIONS = ("host_key_policy", "known_hosts")
_LOG = "dalipipe.ssh"


class SftpFileSystem:
    """One SSH connection to the host of a URL, with up to 8 sessions, each used by one thread at a time.

    Connects at the first call, and again after the connection broke. The host key must be in `~/.ssh/known_hosts` or in
    the option `known_hosts`; `host_key_policy: auto_add` trusts whatever answers. Users are let in by the URL's or the
    option's password, by `key_filename` (with `passphrase`), ssh-agent, or the keys in `~/.ssh`.

    Errors are the builtins: PermissionError (host key, login, file), FileNotFoundError, FileExistsError, TimeoutError
    (no answer within `storage.read_timeout_s`), ConnectionError.

    Raises:
        ConfigError: the URL has no host, or an option is unknown.
    """

    async_impl = False

    def __init__(self, url: str, config: StorageConfig) -> None:
        parts = urlsplit(url)
        if not parts.hostname:
            raise ConfigError(f"{url} names no host; write it as sftp://user@host/absolute/folder")
        self._host, self._port = parts.hostname, parts.port or 22
        self._options = _connect_options(config.options)
        for name, value in (("username", parts.username), ("password", parts.password)):
            if value is not None:
                self._options[name] = unquote(value)
        self._port = int(self._options.pop("port", self._port))
        self._policy = config.options.get("host_key_policy") or "reject"
        self._known_hosts = config.options.get("known_hosts")
        self._connect_timeout_s, self._read_timeout_s = config.connect_timeout_s, config.read_timeout_s
        self._wait_s = config.request_timeout_s
        self._client: paramiko.SSHClient | None = None
        self._connecting = threading.Lock()
        self._closed = False
        self._idle: queue.SimpleQueue[paramiko.SFTPClient] = queue.SimpleQueue()
        self._slots = threading.BoundedSemaphore(_MAX_SESSIONS)

    def info(self, path: str) -> dict[str, Any]:
        """Name, type, size and time of change."""
        with self._session() as session:
            return _info(path, session.stat(path))

    def exists(self, path: str) -> bool:
        """Whether there is anything at `path`."""
        try:
            self.info(path)
        except FileNotFoundError:
            return False
        return True

    def ls(self, path: str, *, detail: bool) -> list[dict[str, Any]]:  # noqa: ARG002 - as fsspec names it
        """What lies directly in a folder; links are followed, those that lead nowhere left out."""
        with self._session() as session:
            found = []
            for entry in session.listdir_attr(path):
                name = f"{path.rstrip('/')}/{entry.filename}"
                with contextlib.suppress(FileNotFoundError):
                    found.append(_info(name, session.stat(name) if stat.S_ISLNK(entry.st_mode or 0) else entry))
            return found

    def cat_file(self, path: str, *, start: int, end: int) -> bytes:
        """Bytes [start, end), fewer where the file ends before; many requests are under way at once."""
        with self._session() as session, _open(session, path) as file:
            # Requests behind the end would never be answered.
            stop = min(end, file.stat().st_size or 0)
            # A part at a time: to keep to a number of requests paramiko has a thread that never ends if they fail.
            pieces = [
                bytes(next(file.readv([(low, high - low)]))) for low, high in split_range(start, max(start, stop))
            ]
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def pipe_file(self, path: str, value: bytes) -> None:
        """Writes a new file, or over an old one."""
        with self._session() as session:
            session.putfo(io.BytesIO(value), path, len(value))

    def put_file(self, source: str, path: str) -> None:
        """Copies a local file."""
        with Path(source).open("rb") as file, self._session() as session:
            session.putfo(file, path, Path(source).stat().st_size)

    def replace(self, old: str, new: str) -> None:
        """Renames, over what may be there."""
        with self._session() as session:
            session.posix_rename(old, new)

    def claim(self, old: str, new: str) -> None:
        """Renames, unless there is something: a server that follows the protocol's third version refuses that."""
        with self._session() as session:
            try:
                session.rename(old, new)
            except OSError as error:
                if error.errno is None and self.exists(new):
                    raise FileExistsError(errno.EEXIST, "File exists", new) from error
                raise

    def rm_file(self, path: str) -> None:
        """Removes a file."""
        with self._session() as session:
            session.remove(path)

    def makedirs(self, path: str, *, exist_ok: bool) -> None:  # noqa: ARG002 - as fsspec names it
        """Makes a folder and those above it; one that is there is no error."""
        if not path.strip("/") or self.exists(path):
            return
        self.makedirs(path.rstrip("/").rpartition("/")[0], exist_ok=True)
        try:
            with self._session() as session:
                session.mkdir(path)
        except OSError:
            if not self.exists(path):  # else another process was faster
                raise

    def invalidate_cache(self, path: str) -> None:
        """Nothing is cached."""

    def close(self) -> None:
        """Ends the connection; calls that wait for an answer fail. Idempotent."""
        self._closed = True
        client = self._client  # without the lock: it may be waiting for a server that never answers
        if client is not None:
            client.close()

    @contextlib.contextmanager
    def _session(self) -> Iterator[paramiko.SFTPClient]:
        """A session of this thread's own; one that failed is not used again."""
        if not self._slots.acquire(timeout=self._wait_s):
            raise TimeoutError(errno.ETIMEDOUT, f"{_MAX_SESSIONS} other calls kept the SSH connection busy")
        try:
            session = self._take()
            try:
                yield session
            except (EOFError, paramiko.SSHException) as error:
                _end(session)
                raise ConnectionResetError(errno.ECONNRESET, f"the SSH connection broke ({error})") from error
            except TimeoutError as error:  # the answer may still come, and would be taken for another one's
                _end(session)
                raise TimeoutError(errno.ETIMEDOUT, f"no answer within {self._read_timeout_s:g} s") from error
            except OSError as error:
                if error.errno is None and not _is_alive(session):
                    raise ConnectionResetError(errno.ECONNRESET, f"the SSH connection broke ({error})") from error
                self._idle.put(session)
                raise
            except BaseException:
                _end(session)
                raise
            self._idle.put(session)
        finally:
            self._slots.release()

    def _take(self) -> paramiko.SFTPClient:
        with contextlib.suppress(queue.Empty):
            while True:
                session = self._idle.get_nowait()
                if _is_alive(session):
                    return session
        transport = self._transport()
        try:
            channel = transport.open_session(timeout=self._connect_timeout_s)
            channel.settimeout(self._read_timeout_s)
            channel.invoke_subsystem("sftp")
            return paramiko.SFTPClient(channel)
        except (EOFError, paramiko.SSHException) as error:
            raise ConnectionResetError(errno.ECONNRESET, f"the server opens no SFTP session ({error})") from error

    def _transport(self) -> paramiko.Transport:
        """The connection, made anew where it broke."""
        with self._connecting:
            transport = self._client.get_transport() if self._client is not None else None
            if transport is None or not transport.is_active():
                if self._client is not None:
                    self._client.close()
                self._client = client = paramiko.SSHClient()
                self._connect(client)
                if self._closed:
                    client.close()
                transport = client.get_transport()
            if transport is None:
                raise ConnectionAbortedError(errno.ECONNABORTED, "the store was closed meanwhile")
            return transport

    def _connect(self, client: paramiko.SSHClient) -> None:
        client.set_log_channel(_LOG)
        client.set_missing_host_key_policy(_Refuse() if self._policy == "reject" else paramiko.AutoAddPolicy())
        client.load_system_host_keys()
        if self._known_hosts is not None:
            client.load_system_host_keys(str(Path(self._known_hosts).expanduser()))
        limit_s = self._connect_timeout_s
        limits = dict.fromkeys(("timeout", "banner_timeout", "auth_timeout", "channel_timeout"), limit_s)
        try:
            client.connect(self._host, self._port, **limits, **self._options)
        except BaseException as error:
            client.close()
            told = _login_error(error, self._options.get("username"))
            if told is not None:
                raise told from error
            if isinstance(error, (EOFError, paramiko.SSHException)):
                raise ConnectionResetError(
                    errno.ECONNRESET,
                    f"no SSH server answered within {limit_s:g} s ({error}); check host and port, or raise "
                    "storage.connect_timeout_s",
                ) from error
            raise


class _Refuse(paramiko.MissingHostKeyPolicy):  # type: ignore[misc]
    """No unknown host; paramiko's own says neither which key it was nor what to do."""

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:  # noqa: ARG002
        raise PermissionError(
            errno.EACCES,
            f"the host key of {hostname} ({_shown(key)}) is in no known_hosts file: compare it with the server's and "
            "add it there (ssh-keyscan), name that file by +storage.options.known_hosts=FILE, or trust the network by "
            "+storage.options.host_key_policy=auto_add",
        )


def _login_error(error: BaseException, user: str | None) -> OSError | None:
    """What a failed `connect` means as a builtin error; None: as it is."""
    if isinstance(error, paramiko.BadHostKeyException):
        return PermissionError(
            errno.EACCES,
            f"the server's host key ({_shown(error.key)}) is not the one that known_hosts has for it: it was set up "
            "anew, or somebody is in between; ask its owner before you replace the entry",
        )
    # paramiko has no type of its own for "nothing to try".
    if isinstance(error, paramiko.AuthenticationException) or "No authentication methods" in str(error):
        return PermissionError(
            errno.EACCES,
            f"the server does not let in {f'user {user!r}' if user else 'this user'} ({error}): give the user in the "
            "URL, and +storage.options.password or +storage.options.key_filename and .passphrase",
        )
    if isinstance(error, paramiko.ssh_exception.NoValidConnectionsError):
        return next(iter(error.errors.values()), None)
    return None


def _shown(key: paramiko.PKey) -> str:
    return f"{key.get_name()} {key.fingerprint}"


def _end(session: paramiko.SFTPClient) -> None:
    """Closes a session; where its connection broke, paramiko fails to take leave."""
    with contextlib.suppress(EOFError, OSError, paramiko.SSHException):
        session.close()


def _open(session: paramiko.SFTPClient, path: str) -> paramiko.SFTPFile:
    """Opens a file for reading; what cannot be opened because it is a folder is called so."""
    try:
        file = session.open(path, "rb")
    except OSError as error:
        if error.errno is None and stat.S_ISDIR(session.stat(path).st_mode or 0):
            raise IsADirectoryError(errno.EISDIR, "Is a directory", path) from error
        raise
    send = file._prefetch_thread

    def send_quietly(*arguments: Any) -> None:
        # What ends the connection is raised where the answers are waited for; a thread of paramiko's would print it.
        with contextlib.suppress(EOFError, OSError, paramiko.SSHException):
            send(*arguments)

    file._prefetch_thread = send_quietly
    return file


def _connect_options(options: Mapping[str, Any]) -> dict[str, Any]:
    known = (*_CONNECT_OPTIONS, *_OWN_OPTIONS)
    for name in options:
        if name not in known and not name.startswith(OBJECT_OPTIONS):
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(f"storage.options.{name} is no option of sftp; {hint}There are: {', '.join(known)}")
    policy = options.get("host_key_policy") or "reject"
    if policy not in _POLICIES:
        raise ConfigError(f"storage.options.host_key_policy={policy!r} must be one of {', '.join(_POLICIES)}")
    hosts = options.get("known_hosts")
    if hosts is not None and not Path(hosts).expanduser().is_file():
        raise ConfigError(f"storage.options.known_hosts={hosts} is no file; make it with ssh-keyscan HOST")
    given = {name: value for name, value in options.items() if name in _CONNECT_OPTIONS and value is not None}
    if "key_filename" in given:
        given["key_filename"] = str(Path(given["key_filename"]).expanduser())
        if not Path(given["key_filename"]).is_file():
            raise ConfigError(f"storage.options.key_filename={given['key_filename']} is no file; name the private key")
    return given


def _is_alive(session: paramiko.SFTPClient) -> bool:
    channel = session.get_channel()
    return channel is not None and not channel.closed and channel.get_transport().is_active()


def _info(path: str, status: paramiko.SFTPAttributes) -> dict[str, Any]:
    kind = "directory" if stat.S_ISDIR(status.st_mode or 0) else "file"
    return {"name": path, "type": kind, "size": status.st_size, "mtime": status.st_mtime}


# What goes wrong is raised; paramiko would print it beside that, with a traceback.
logging.getLogger(_LOG).setLevel(logging.CRITICAL)
