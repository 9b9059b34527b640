"""Object stores through obstore: the least CPU of all clients at every request size."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from dalipipe.errors import AccessDeniedError, DalipipeError, StorageError
from dalipipe.masking import masked, secrets_in
from dalipipe.storage.calls import CallPool
from dalipipe.storage.failures import (
    has_stale_credentials,
    http_status,
    is_panic,
    is_throttling,
    is_transient,
    presentable,
    translate,
)
from dalipipe.storage.obstore_client import open_client, open_credentials
from dalipipe.storage.ranges import PART_BYTES, check_range, empty_range, flat_bytes, short_answer, split_range
from dalipipe.storage.store import ObjectInfo, StorageConfig
from dalipipe.storage.transport import Record, Transport, discard
from dalipipe.storage.url import (
    HTTP_SCHEMES,
    S3_SCHEMES,
    TEMPORARY_PREFIX,
    check_prefix,
    join_url,
    object_url,
    scheme_of,
    strip_slash,
)

R = TypeVar("R")

_MAX_PARTS = 9_000  # S3 takes 10,000 parts an object
_DEADLINE_BYTES = 64 << 20
_PUT_PARTS_AT_ONCE = 8
_SHORT = re.compile(r"Requested \d+\.\.\d+, got (\d+)\.\.(\d+)")


class ObstoreStore:
    """Objects in S3, GCS, Azure or behind a plain web server (read-only, no listing).

    Reads go through `Transport`, which retries, hedges and paces them; the client's own retries are left to writes in
    parts and to listings, which only it can go on with. This class splits large ranges and checks that an answer has
    the size and the version that were asked for. Credentials come from the client's own environment variables (AWS_*,
    GOOGLE_*, AZURE_*), or for S3 from `storage.credential_process` or `storage.credentials_file`.
    """

    def __init__(self, url: str, config: StorageConfig, *, record: Record = discard) -> None:
        self._url = strip_slash(url)
        self._shown = masked(self._url)
        self._secrets = secrets_in(self._url, config.options)
        self._config = config
        self._read_only = scheme_of(url) in HTTP_SCHEMES
        self._credentials = open_credentials(config) if scheme_of(url) in S3_SCHEMES else None
        self._client = open_client(self._url, config, self._credentials, retries=0)
        self._patient: Any = None
        self._reopening = threading.Lock()
        self._transport = Transport(self._shown, config, record)
        self._parts = CallPool(url=self._shown, num_threads=config.concurrency)

    def __reduce__(self) -> tuple[type[ObstoreStore], tuple[str, StorageConfig]]:
        return type(self), (self._url, self._config)

    @property
    def url(self) -> str:
        """The URL that keys are relative to, without its secrets."""
        return self._shown

    def head(self, key: str) -> ObjectInfo:
        """Size and ETag of one object."""
        import obstore

        shown = object_url(self._shown, key)
        return _info(key, self._ask(lambda client: obstore.head(client, key), f"look up {shown}"))

    def read(self, key: str, start: int = 0, stop: int | None = None, *, into: memoryview | None = None) -> memoryview:
        """Reads bytes [start, stop); see `Store.read`. Ranges above 8 MiB become parallel requests."""
        shown = object_url(self._shown, key)
        target = check_range(shown, start, stop, into)
        if stop is None:
            return self._read_to_end(key, start)
        if start == stop:
            return empty_range(shown, start, self.head(key).num_bytes)
        if target is None and stop - start <= PART_BYTES:
            return self._part(key, start, stop).data
        target = memoryview(bytearray(stop - start)) if target is None else target
        self._read_parts(key, start, stop, target)
        return target

    def read_many(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Ranges of one object by one call of the client, ten requests at once; see `ReadsMany.read_many`."""
        shown = object_url(self._shown, key)
        for start, stop in ranges:
            check_range(shown, start, stop, None)
        num_bytes = sum(stop - start for start, stop in ranges)
        return self._ask(
            lambda client: _get_many(client, key, ranges, shown), f"read {shown}", num_bytes=num_bytes, hedge=True
        )

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """All objects below the folder `prefix`, a page of 1,000 at a time."""
        import obstore

        prefix = check_prefix(prefix)
        shown = join_url(self._shown, prefix)
        if self._read_only:
            raise StorageError(f"cannot list {shown}: web servers have no listing; name a data set with a manifest")
        client = self._patient_client()
        pages = self._call(lambda: obstore.list(client, prefix or None, chunk_size=1000), f"list {shown}")
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
        client, action = self._patient_client(), f"write {shown}"
        timeout_s = self._config.request_timeout_s * (1 + num_bytes // _DEADLINE_BYTES)
        in_parts = num_bytes > PART_BYTES and not if_absent
        chunk_bytes = max(PART_BYTES, -(-num_bytes // _MAX_PARTS))

        def put() -> None:
            obstore.put(
                client,
                key,
                self._paced(body, chunk_bytes, action, timeout_s) if in_parts else body,
                mode="create" if if_absent else "overwrite",
                use_multipart=in_parts,
                chunk_size=chunk_bytes,
                max_concurrency=_PUT_PARTS_AT_ONCE,
            )

        if not in_parts:
            self._transport.pace(num_bytes, action, timeout_s)
        # After an answer that was lost nobody knows whether a conditional write won, so it is only sent again when the
        # store said that it did nothing.
        self._call(put, action, timeout_s=timeout_s, retryable=is_throttling if if_absent else is_transient)
        self._transport.moved(num_bytes)

    def delete(self, key: str) -> None:
        """Deletes the object."""
        import obstore

        shown = object_url(self._shown, key)
        self._refuse_read_only("delete", shown)
        try:
            self._ask(lambda client: obstore.delete(client, key), f"delete {shown}")
        except FileNotFoundError:
            return

    def close(self) -> None:
        """Ends the threads; calls that wait raise ClosedError."""
        self._transport.close()
        self._parts.close()

    def _refuse_read_only(self, verb: str, shown: str) -> None:
        if self._read_only:
            raise StorageError(f"cannot {verb} {shown}: http(s) stores are read-only; use the store's own URL (s3://…)")

    def _read_parts(self, key: str, start: int, stop: int, target: memoryview, etag: str = "") -> None:
        """Fills `target` with [start, stop), a few requests ahead; all must be of one version of the object."""
        shown = object_url(self._shown, key)
        parts = list(split_range(start, stop))
        if len(parts) == 1:
            answers = iter([self._part(key, start, stop)])
        else:
            calls = (partial(self._part, key, low, high) for low, high in parts)
            timeout_s = self._config.request_timeout_s + 1.0  # each part has a deadline of its own
            answers = self._parts.run_in_order(calls, timeout_s=timeout_s, action=f"read {shown}")
        for low, high in parts:
            answer = next(answers)
            if etag and answer.etag != etag:
                raise StorageError(
                    f"cannot read {shown} bytes [{low}, {high}): the object was replaced while being read "
                    f"(ETag {etag}, then {answer.etag}); read it again"
                )
            etag = answer.etag
            target[low - start : high - start] = answer.data

    def _part(self, key: str, start: int, stop: int) -> _Part:
        """The checked bytes of [start, stop), one request; a short answer is asked for once more."""
        shown = object_url(self._shown, key)
        action, found = f"read {shown}", 0
        for _ in range(2):
            answer = self._ask(
                lambda client: _get_part(client, key, start, stop), action, num_bytes=stop - start, hedge=True
            )
            if isinstance(answer, _Part):
                return answer
            found = answer
        raise short_answer(shown, start, stop, found)

    def _read_to_end(self, key: str, start: int) -> memoryview:
        """One request for a small object; the first answer tells the size of a large one, and its version."""
        shown = object_url(self._shown, key)
        action = f"read {shown}"
        try:
            first, total_bytes = self._ask(lambda client: _get_first(client, key, start), action, hedge=True)
        except StorageError as error:
            if error.__cause__ is None or not _is_behind_the_end(error.__cause__):
                raise
            return empty_range(shown, start, self.head(key).num_bytes)
        if total_bytes <= start:
            return empty_range(shown, start, total_bytes)
        end = min(start + PART_BYTES, total_bytes)
        head = first if len(first.data) == end - start else self._part(key, start, end)
        if end == total_bytes:
            return head.data
        whole = memoryview(bytearray(total_bytes - start))
        whole[: end - start] = head.data
        self._read_parts(key, end, total_bytes, whole[end - start :], head.etag)
        return whole

    def _ask(self, call: Callable[[Any], R], action: str, *, num_bytes: int = 0, hedge: bool = False) -> R:
        """Asks the impatient client; credentials that have run out are renewed once."""
        client = self._client
        try:
            return self._call(lambda: call(self._client), action, num_bytes=num_bytes, hedge=hedge)
        except AccessDeniedError as error:
            if self._credentials is None or error.__cause__ is None or not has_stale_credentials(error.__cause__):
                raise
            self._reopen(client)
        return self._call(lambda: call(self._client), action, num_bytes=num_bytes, hedge=hedge)

    def _call(
        self,
        call: Callable[[], R],
        action: str,
        *,
        num_bytes: int = 0,
        timeout_s: float | None = None,
        hedge: bool = False,
        retryable: Callable[[BaseException], bool] = is_transient,
    ) -> R:
        try:
            return self._transport.run(
                call, action, num_bytes=num_bytes, timeout_s=timeout_s, hedge=hedge, retryable=retryable
            )
        except DalipipeError:
            raise
        except Exception as error:  # noqa: BLE001 - told in our own words
            raise translate(error, action, self._secrets) from presentable(error, self._secrets)
        except BaseException as error:
            if is_panic(error):
                raise translate(error, action, self._secrets) from presentable(error, self._secrets)
            raise

    def _patient_client(self) -> Any:
        """A client that retries by itself, for what cannot be begun again from outside."""
        with self._reopening:
            if self._patient is None:
                self._patient = open_client(self._url, self._config, self._credentials, retries=self._config.retries)
            return self._patient

    def _reopen(self, stale: Any) -> None:
        assert self._credentials is not None
        with self._reopening:
            if self._client is stale:  # else another thread was here first
                self._credentials.forget()
                self._client = open_client(self._url, self._config, self._credentials, retries=0)
                self._patient = None

    def _paced(
        self, body: memoryview | Path, chunk_bytes: int, action: str, timeout_s: float
    ) -> Iterator[bytes | memoryview]:
        """The body in pieces, each as the node's budget has room for it."""
        if isinstance(body, Path):
            with body.open("rb", buffering=0) as file:
                while piece := file.read(chunk_bytes):
                    self._transport.pace(len(piece), action, timeout_s)
                    yield piece
            return
        for low, high in split_range(0, len(body), chunk_bytes):
            self._transport.pace(high - low, action, timeout_s)
            yield body[low:high]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Bytes of a range, and the version of the object that they are of."""

    data: memoryview
    etag: str


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
        raise translate(error, f"read {data}") from presentable(error)
    return view, len(view)


def _get_part(client: Any, key: str, start: int, stop: int) -> _Part | int:
    """The bytes of [start, stop), or only their number when the store answered fewer."""
    import obstore
    from obstore.exceptions import GenericError

    try:
        answer = obstore.get(client, key, options={"range": (start, stop)})
        data = memoryview(answer.bytes()).cast("B")
    except GenericError as error:
        found = _SHORT.search(str(error))
        if found is None:
            raise
        return int(found[2]) - int(found[1])
    return _Part(data=data, etag=str(answer.meta["e_tag"] or "")) if len(data) == stop - start else len(data)


def _get_many(client: Any, key: str, ranges: Sequence[tuple[int, int]], shown: str) -> list[memoryview]:
    """The bytes of each range; ranges are asked for as they are."""
    import obstore

    starts, ends = zip(*ranges, strict=True)
    answers = obstore.get_ranges(client, key, starts=starts, ends=ends, coalesce=0)
    pieces = [memoryview(answer).cast("B") for answer in answers]
    for (start, stop), piece in zip(ranges, pieces, strict=True):
        if len(piece) != stop - start:
            raise short_answer(shown, start, stop, len(piece))
    return pieces


def _get_first(client: Any, key: str, start: int) -> tuple[_Part, int]:
    """The first part from `start`, and the size of the whole object."""
    import obstore
    from obstore.exceptions import NotSupportedError

    try:
        answer = obstore.get(client, key, options={"range": (start, start + PART_BYTES)})
    except NotSupportedError:
        # Web servers answer a range of an empty file, and some that of any file, with the whole of it.
        answer = obstore.get(client, key)
        if int(answer.meta["size"]) > PART_BYTES:
            raise
    meta = answer.meta
    data = memoryview(answer.bytes()).cast("B")
    data = data[start:] if answer.range == (0, int(meta["size"])) and start else data
    return _Part(data=data, etag=str(meta["e_tag"] or "")), int(meta["size"])


def _is_behind_the_end(error: BaseException) -> bool:
    """Whether a range was refused because it starts at or behind the object's end; Azure answers it without a range."""
    return http_status(error) == 416 or "Wanted range starting at" in str(error)


def _info(key: str, meta: Any) -> ObjectInfo:
    return ObjectInfo(key=key, num_bytes=int(meta["size"]), etag=str(meta["e_tag"] or ""))
