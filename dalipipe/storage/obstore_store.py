"""Object stores through obstore: the least CPU of all clients at every request size."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from dalipipe.errors import ConfigError, DalipipeError, DependencyError, StorageError
from dalipipe.storage.calls import CallPool
from dalipipe.storage.failures import http_status, is_panic, reason, translate
from dalipipe.storage.ranges import PART_BYTES, check_range, empty_range, flat_bytes, short_answer, split_range
from dalipipe.storage.store import ObjectInfo, StorageConfig
from dalipipe.storage.url import (
    AZURE_SCHEMES,
    GCS_SCHEMES,
    HTTP_SCHEMES,
    TEMPORARY_PREFIX,
    check_http_url,
    check_prefix,
    join_url,
    object_url,
    redact,
    scheme_of,
    strip_slash,
)

R = TypeVar("R")

_MAX_PARTS = 9_000  # S3 takes 10,000 parts an object
_DEADLINE_BYTES = 64 << 20
_SHORT = re.compile(r"Requested \d+\.\.\d+, got (\d+)\.\.(\d+)")


class ObstoreStore:
    """Objects in S3, GCS, Azure or behind a plain web server (read-only, no listing).

    The client retries refused, reset and truncated answers itself; this class adds the deadline of the whole call,
    splits large ranges, and checks that an answer has the size that was asked for. Credentials come from the
    client's own environment variables (AWS_*, GOOGLE_*, AZURE_*).
    """

    def __init__(self, url: str, config: StorageConfig) -> None:
        self._url = strip_slash(url)
        self._shown = redact(self._url)
        self._config = config
        self._read_only = scheme_of(url) in HTTP_SCHEMES
        self._client = _open_client(self._url, config)
        self._calls = CallPool(url=self._shown, num_threads=config.concurrency)

    def __reduce__(self) -> tuple[type[ObstoreStore], tuple[str, StorageConfig]]:
        return type(self), (self._url, self._config)

    @property
    def url(self) -> str:
        """The URL that keys are relative to."""
        return self._url

    def head(self, key: str) -> ObjectInfo:
        """Size and ETag of one object."""
        import obstore

        shown = object_url(self._shown, key)
        return _info(key, self._call(partial(obstore.head, self._client, key), f"look up {shown}"))

    def read(self, key: str, start: int = 0, stop: int | None = None, *, into: memoryview | None = None) -> memoryview:
        """Reads bytes [start, stop); see `Store.read`. Ranges above 8 MiB become parallel requests."""
        shown = object_url(self._shown, key)
        target = check_range(shown, start, stop, into)
        if stop is None:
            return self._read_to_end(key, start)
        if start == stop:
            return empty_range(shown, start, self.head(key).num_bytes)
        if target is None and stop - start <= PART_BYTES:
            return self._part(key, start, stop, self._call(self._range(key, start, stop), f"read {shown}"))
        target = memoryview(bytearray(stop - start)) if target is None else target
        self._read_parts(key, start, stop, target)
        return target

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """All objects below the folder `prefix`, a page of 1,000 at a time."""
        import obstore

        prefix = check_prefix(prefix)
        shown = join_url(self._shown, prefix)
        if self._read_only:
            raise StorageError(f"cannot list {shown}: web servers have no listing; name a data set with a manifest")
        pages = self._call(lambda: obstore.list(self._client, prefix or None, chunk_size=1000), f"list {shown}")
        while page := self._call(lambda: next(pages, None), f"list {shown}"):
            for meta in page:
                key = str(meta["path"])
                if not any(segment.startswith(TEMPORARY_PREFIX) for segment in key.split("/")):
                    yield _info(key, meta)

    def put(self, key: str, data: bytes | memoryview | Path, *, if_absent: bool = False) -> None:
        """Writes the object; above 8 MiB in parts that appear together. `if_absent` is one conditional request."""
        import obstore

        shown = object_url(self._shown, key)
        self._refuse_read_only("write", shown)
        body, num_bytes = _body(data, in_memory=if_absent)
        put = partial(
            obstore.put,
            self._client,
            key,
            body,
            mode="create" if if_absent else "overwrite",
            use_multipart=num_bytes > PART_BYTES and not if_absent,
            chunk_size=max(PART_BYTES, -(-num_bytes // _MAX_PARTS)),
        )
        self._call(put, f"write {shown}", num_bytes=num_bytes)

    def delete(self, key: str) -> None:
        """Deletes the object."""
        import obstore

        shown = object_url(self._shown, key)
        self._refuse_read_only("delete", shown)
        try:
            self._call(partial(obstore.delete, self._client, key), f"delete {shown}")
        except FileNotFoundError:
            return

    def close(self) -> None:
        """Ends the threads; calls that wait raise ClosedError."""
        self._calls.close()

    def _refuse_read_only(self, verb: str, shown: str) -> None:
        if self._read_only:
            raise StorageError(f"cannot {verb} {shown}: http(s) stores are read-only; use the store's own URL (s3://…)")

    def _range(self, key: str, start: int, stop: int) -> Callable[[], Any]:
        return partial(_get_part, self._client, key, start, stop)

    def _read_parts(self, key: str, start: int, stop: int, target: memoryview) -> None:
        """Fills `target` with [start, stop), a few requests ahead."""
        shown = object_url(self._shown, key)
        parts = list(split_range(start, stop))
        calls = (self._range(key, low, high) for low, high in parts)
        timeout_s = self._config.request_timeout_s
        answers = self._calls.run_in_order(calls, timeout_s=timeout_s, action=f"read {shown}")
        for low, high in parts:
            answer = self._translated(lambda: next(answers), f"read {shown}")
            target[low - start : high - start] = self._part(key, low, high, answer)

    def _part(self, key: str, start: int, stop: int, answer: Any) -> memoryview:
        """The checked answer to [start, stop) as `_get_part` gave it; a short one is asked for once more."""
        shown = object_url(self._shown, key)
        if isinstance(answer, int):
            answer = self._call(self._range(key, start, stop), f"read {shown}")
        if isinstance(answer, int):
            raise short_answer(shown, start, stop, answer)
        return memoryview(answer).cast("B")

    def _read_to_end(self, key: str, start: int) -> memoryview:
        """One request for a small object; the first answer tells the size of a large one, and its version."""
        shown = object_url(self._shown, key)
        action = f"read {shown}"
        try:
            first, total_bytes, etag = self._call(partial(_get_first, self._client, key, start), action)
        except StorageError as error:
            if error.__cause__ is None or http_status(error.__cause__) != 416:
                raise
            return empty_range(shown, start, self.head(key).num_bytes)
        end = min(start + PART_BYTES, total_bytes)
        head = self._part(key, start, end, first if len(first) == end - start else len(first))
        if end == total_bytes:
            return head
        whole = memoryview(bytearray(total_bytes - start))
        whole[: len(head)] = head
        self._read_parts(key, end, total_bytes, whole[len(head) :])
        if self.head(key).etag != etag:
            raise StorageError(f"cannot {action}: the object was replaced while being read; read it again")
        return whole

    def _call(self, call: Callable[[], R], action: str, *, num_bytes: int = 0) -> R:
        timeout_s = self._config.request_timeout_s * (1 + num_bytes // _DEADLINE_BYTES)
        return self._translated(lambda: self._calls.run(call, timeout_s=timeout_s, action=action), action)

    def _translated(self, call: Callable[[], R], action: str) -> R:
        try:
            return call()
        except DalipipeError:
            raise
        except Exception as error:
            raise translate(error, action) from error
        except BaseException as error:
            if is_panic(error):
                raise translate(error, action) from error
            raise


def _body(data: bytes | memoryview | Path, *, in_memory: bool) -> tuple[memoryview | Path, int]:
    """What the client sends, and its size. A file is streamed by the client unless it must be one request."""
    if not isinstance(data, Path):
        view = flat_bytes(data)
        return view, len(view)
    try:
        if not in_memory:
            return data, data.stat().st_size
        view = memoryview(data.read_bytes())
    except OSError as error:
        raise translate(error, f"read {data}") from error
    return view, len(view)


def _get_part(client: Any, key: str, start: int, stop: int) -> Any:
    """The bytes of [start, stop), or only their number when the store answered fewer."""
    import obstore
    from obstore.exceptions import GenericError

    try:
        answer = obstore.get_range(client, key, start=start, end=stop)
    except GenericError as error:
        found = _SHORT.search(str(error))
        if found is None:
            raise
        return int(found[2]) - int(found[1])
    return answer if len(answer) == stop - start else len(answer)


def _get_first(client: Any, key: str, start: int) -> tuple[Any, int, str]:
    """(bytes of the first part from `start`, size of the whole object, ETag)."""
    import obstore

    answer = obstore.get(client, key, options={"range": (start, start + PART_BYTES)})
    meta = answer.meta
    return answer.bytes(), int(meta["size"]), str(meta["e_tag"] or "")


def _info(key: str, meta: Any) -> ObjectInfo:
    return ObjectInfo(key=key, num_bytes=int(meta["size"]), etag=str(meta["e_tag"] or ""))


def _open_client(url: str, config: StorageConfig) -> Any:
    try:
        from obstore import store as clients
    except ImportError as error:
        raise DependencyError(
            f"{redact(url)} needs the package obstore; install it with: pip install 'dalipipe[s3]'"
        ) from error
    scheme = scheme_of(url)
    options: dict[str, Any] = {
        "client_options": {
            "timeout": f"{config.request_timeout_s}s",
            "read_timeout": f"{config.read_timeout_s}s",
            "connect_timeout": f"{config.connect_timeout_s}s",
        },
        "retry_config": {
            "max_retries": config.retries,
            "retry_timeout": timedelta(seconds=config.request_timeout_s),
            "backoff": {
                "init_backoff": timedelta(milliseconds=50),
                "max_backoff": timedelta(seconds=1),
                "base": 2,
            },
        },
    }
    try:
        if scheme in HTTP_SCHEMES:
            check_http_url(url, "url")
            options["client_options"]["allow_http"] = scheme == "http"
            return clients.HTTPStore.from_url(url, **options)
        return _open_bucket(clients, url, config, options)
    except ConfigError:
        raise
    except BaseException as error:
        if isinstance(error, Exception) or is_panic(error):
            raise ConfigError(
                f"cannot open {redact(url)}: {reason(error)}; check the URL, endpoint and region"
            ) from error
        raise


def _open_bucket(clients: Any, url: str, config: StorageConfig, options: dict[str, Any]) -> Any:
    bucket, _, prefix = url.partition("://")[2].partition("/")
    if not bucket or any(character in bucket for character in " @?#:"):
        raise ConfigError(f"{redact(url)} names no valid bucket; write it as {scheme_of(url)}://bucket/folder")
    options["prefix"] = check_prefix(prefix) or None
    scheme = scheme_of(url)
    if scheme in GCS_SCHEMES:
        return clients.GCSStore(bucket, **options)
    if scheme in AZURE_SCHEMES:
        return clients.AzureStore(bucket, **options)
    if config.region is not None:
        options["region"] = config.region
    if config.endpoint_url is not None:
        endpoint = check_http_url(config.endpoint_url, "storage.endpoint_url")
        options["client_options"]["allow_http"] = urlsplit(endpoint).scheme == "http"
        options["endpoint"] = strip_slash(endpoint)
        options["virtual_hosted_style_request"] = False
    return clients.S3Store(bucket, **options)
