"""Files behind Alluxio's workers, as `FsspecStore` needs them.

alluxiofs's own file system keeps sizes of files that were replaced, writes a log into the working folder and cannot
remove a file; this uses the client beneath it, and turns its untyped errors into builtin ones.
"""

from __future__ import annotations

import difflib
import errno
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

from alluxiofs.client import AlluxioClient
from alluxiofs.core import RMOption

from dalipipe.errors import ConfigError
from dalipipe.storage.ranges import split_range
from dalipipe.storage.store import StorageConfig
from dalipipe.storage.url import OBJECT_OPTIONS

R = TypeVar("R")

_OPTIONS = ("load_balance_domain", "target_protocol", "ufs", "worker_hosts", "worker_http_port")
_HTTP_PORT = 28080
_STATUS = re.compile(r"HTTP error: (\d{3})")
_CURL = re.compile(r"cURL error: \((\d+), '?([^')]*)")
_CURL_TIMED_OUT = 28

_log = logging.getLogger(__name__)


class WorkerError(Exception):
    """A worker's answer with an error status."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class AlluxioFileSystem:
    """The files of one under store, through the workers of an Alluxio cluster.

    The URL is `alluxio://HOST[:PORT][,HOST…]/FOLDER`; the option `ufs` is the under store that FOLDER lies in, as
    Alluxio has it (`s3://bucket`, `hdfs://name/`). In place of hosts in the URL: `worker_hosts`, `load_balance_domain`.
    Or as alluxiofs's own users write it: `alluxiofs://BUCKET/FOLDER` with `target_protocol` (`s3`) and `worker_hosts`.

    Errors are the builtins: FileNotFoundError, TimeoutError, ConnectionError, else `WorkerError` with a status.

    Raises:
        ConfigError: no `ufs`, no worker, or an unknown option.
    """

    async_impl = False

    def __init__(self, url: str, config: StorageConfig) -> None:
        self._ufs, options = _read_options(url, config.options)
        # One try: retries are `Transport`'s, and the client's print to stdout.
        limit_s = max(1, math.ceil(config.request_timeout_s))
        client = AlluxioClient(
            logger=_log, concurrency=config.concurrency, http_max_retries=1, http_timeouts=limit_s, **options
        )
        client.session.request = partial(
            client.session.request, timeout=(config.connect_timeout_s, config.read_timeout_s)
        )
        self._client = client

    def info(self, path: str) -> dict[str, Any]:
        """Name, type, size and time of change."""
        return _info(path, _call(lambda: self._client.get_file_status(self._full(path))))

    def exists(self, path: str) -> bool:
        """Whether there is anything at `path`."""
        try:
            self.info(path)
        except FileNotFoundError:
            return False
        return True

    def ls(self, path: str, *, detail: bool) -> list[dict[str, Any]]:  # noqa: ARG002 - as fsspec names it
        """What lies directly in a folder."""
        if self.info(path)["type"] != "directory":
            raise NotADirectoryError(errno.ENOTDIR, "Not a directory", path)
        found = _call(lambda: self._client.listdir(self._full(path)))
        return [_info(f"{path}/{status.name.rstrip('/').rpartition('/')[2]}", status) for status in found]

    def cat_file(self, path: str, *, start: int, end: int) -> bytes:
        """Bytes [start, end), fewer where the file ends before; the client takes at most 20 MiB at once."""
        status = _call(lambda: self._client.get_file_status(self._full(path)))
        if status.type.lower() == "directory":
            raise IsADirectoryError(errno.EISDIR, "Is a directory", path)
        name = quote(status.name)  # the client puts it into a URL as it is
        end = min(end, int(status.size))
        pieces: list[bytes] = []
        for low, high in split_range(start, max(start, end)):
            pieces.append(self._piece(path, name, low, high))
            if len(pieces[-1]) < high - low:
                break
        return b"".join(pieces)

    def pipe_file(self, path: str, value: bytes) -> None:
        """Writes a file."""
        if not _call(lambda: self._client.write_chunked(self._full(path), value)):
            raise OSError(errno.EIO, "the worker did not take the file", path)

    def put_file(self, source: str, path: str) -> None:
        """Copies a local file; the client wants it in memory."""
        self.pipe_file(path, Path(source).read_bytes())

    def mv(self, old: str, new: str) -> None:
        """Renames."""
        _call(lambda: self._client.mv(self._full(old), self._full(new)))

    def rm_file(self, path: str) -> None:
        """Removes a file, from the under store too."""
        if self.exists(path):
            _call(lambda: self._client.rm(self._full(path), RMOption(remove_alluxio_only=False)))

    def makedirs(self, path: str, *, exist_ok: bool) -> None:  # noqa: ARG002 - as fsspec names it
        """Makes a folder and those above it; one that is there is no error."""
        if not path.strip("/") or self.exists(path):
            return
        self.makedirs(path.rstrip("/").rpartition("/")[0], exist_ok=True)
        _call(lambda: self._client.mkdir(self._full(path)))

    def invalidate_cache(self, path: str) -> None:
        """Nothing is cached."""

    def close(self) -> None:
        """Ends connections and threads of the client. Idempotent."""
        self._client.session.close()
        self._client.async_persisting_pool.shutdown(wait=False)

    def _full(self, path: str) -> str:
        return f"{self._ufs}{path}"

    def _piece(self, path: str, name: str, start: int, stop: int) -> bytes:
        full = self._full(path)
        return bytes(_call(lambda: self._client.read_file_range(full, name, start, stop - start)))


def _read_options(url: str, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The under store, without a trailing slash, and what the client is told."""
    for name in options:
        if name not in _OPTIONS and not name.startswith(OBJECT_OPTIONS):
            near = difflib.get_close_matches(str(name), _OPTIONS, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(f"storage.options.{name} is no option of alluxio; {hint}There are: {', '.join(_OPTIONS)}")
    given = {name: value for name, value in options.items() if name in _OPTIONS and value is not None}
    netloc = urlsplit(url).netloc
    if "target_protocol" in given and "ufs" not in given:
        given["ufs"], netloc = f"{given['target_protocol']}://{netloc}", ""
    given.pop("target_protocol", None)
    if "://" not in str(given.get("ufs", "")):
        raise ConfigError(
            f"{url} needs the under store that its folder lies in, as Alluxio has it mounted; give "
            "+storage.options.ufs=s3://bucket (or hdfs://name, file:///root, …)"
        )
    named = [bool(netloc), "worker_hosts" in given, "load_balance_domain" in given]
    if sum(named) != 1:
        raise ConfigError(
            f"{url}: name Alluxio's workers once: in the URL (alluxio://host:28080,host:28080/folder), by "
            "+storage.options.worker_hosts, or by +storage.options.load_balance_domain"
        )
    port = given.get("worker_http_port", _HTTP_PORT)
    hosts = [host.strip() for host in str(given.get("worker_hosts") or netloc).split(",")]
    if "load_balance_domain" not in given:
        # The client dies of a host without a port.
        given["worker_hosts"] = ",".join(host if ":" in host else f"{host}:{port}" for host in hosts)
    return str(given.pop("ufs")).rstrip("/"), given


def _info(path: str, status: Any) -> dict[str, Any]:
    kind = "directory" if str(status.type).lower() == "directory" else "file"
    return {"name": path, "type": kind, "size": int(status.size), "mtime": status.mtime}


def _call(call: Callable[[], R]) -> R:
    """Makes a call of the client; what it raises as a bare `Exception`, or trips over itself, becomes what it was."""
    try:
        return call()
    except FileNotFoundError:
        raise
    except Exception as error:
        for link in _chain(error):
            told = _meaning(link)
            if told is not None:
                raise told from error
        raise


def _meaning(error: BaseException) -> BaseException | None:
    if type(error).__module__.startswith("requests."):
        answer = getattr(error, "response", None)
        where = urlsplit(getattr(getattr(error, "request", None), "url", None) or "").netloc or "that is named"
        if answer is None and "Timeout" in type(error).__name__:
            return TimeoutError(errno.ETIMEDOUT, f"the worker {where} did not answer in time")
        if answer is None:
            return ConnectionResetError(errno.ECONNRESET, f"no connection to the worker {where}")
        return WorkerError(answer.status_code, f"the worker answered {answer.status_code}: {answer.text[:200]}")
    text = str(error)
    if found := _STATUS.search(text):
        return WorkerError(int(found[1]), f"the worker answered {found[1]} to a read")
    if found := _CURL.search(text):
        if int(found[1]) == _CURL_TIMED_OUT:
            return TimeoutError(errno.ETIMEDOUT, f"the worker did not answer in time ({found[2]})")
        return ConnectionResetError(errno.ECONNRESET, f"the worker cannot be read from ({found[2]})")
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error and those before it, the first of them first: the later ones know less."""
    links: list[BaseException] = []
    while error is not None and error not in links:
        links.append(error)
        error = error.__cause__ or error.__context__
    return iter(links[::-1])
