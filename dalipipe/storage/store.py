"""What the rest of the package may ask of a place that holds bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from dalipipe.masking import masked_settings


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """One object: `key` relative to the store's URL, size in bytes, and the store's version mark (may be empty)."""

    key: str
    num_bytes: int
    etag: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class StorageConfig:
    """How stores are reached (`storage.*`)."""

    concurrency: int = 64
    """Requests in flight at once in this process, at most; how many there are follows the store's latency."""
    connect_timeout_s: float = 5.0
    read_timeout_s: float = 10.0
    """Deadline of one read from the socket, not of the whole object."""
    request_timeout_s: float = 120.0
    """Deadline of one whole call, retries included."""
    retries: int = 10
    """Tries of one request after the first: about 6 s of broken connections or 503 are sat out."""
    hedge: bool = True
    """A read that takes longer than the running p95 is asked for again (at most 5 % of requests)."""
    bandwidth: int | float | str | None = None
    """What this node may move, bytes a second (`"1.2GB"`); unlimited without, the highest seen is then the measure."""
    io_class: str = "data"
    """Whose traffic this is: `data` goes first, `checkpoint` and `eval` take what it leaves, at least 5 and 10 %."""
    budget_dir: str = "/dev/shm"
    """Folder of the file by which the processes of this node share the bandwidth."""
    credential_process: str | None = None
    """A command that prints S3 credentials as JSON (as in AWS's configuration); run again before they expire."""
    credentials_file: str | None = None
    """An AWS credentials file that something else renews; read again before its credentials expire."""
    profile: str = "default"
    """The section of `credentials_file`."""
    options: dict[str, Any] = field(default_factory=dict)
    """What a client takes beyond its URL: an fsspec file system (`+storage.options.user=me`), or, by names that begin
    with `aws_`, `google_` or `azure_`, that of S3, GCS or Azure (`+storage.options.azure_storage_account_name=me`)."""
    endpoint_url: str | None = None
    """An S3-compatible endpoint; the shipped configuration takes it from AWS_ENDPOINT_URL or S3_ENDPOINT_URL."""
    gs_endpoint_url: str | None = None
    """A server that speaks GCS's XML API, in place of Google's; the shipped configuration takes it from
    GOOGLE_BASE_URL."""
    az_endpoint_url: str | None = None
    """A blob service in place of Azure's, the account in its path (`http://127.0.0.1:10000/devstoreaccount1`); the
    shipped configuration takes it from AZURE_ENDPOINT."""
    region: str | None = None
    page_cache: str = "drop"
    """Plain files: whether ranges that were read stay in the page cache: `drop` (a lake passes through; what is to be
    near is the node tier's to say), or `keep` (a small set that is streamed from a local disk every epoch)."""

    def __repr__(self) -> str:
        shown = masked_settings({name.name: getattr(self, name.name) for name in fields(self)})
        return f"StorageConfig({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


class Store(Protocol):
    """Objects under one URL. Keys are relative, `/`-separated, never absolute and never with `..`.

    Thread-safe; opened lazily per process and never used across a fork. Every call has a deadline and raises only the
    tree of `dalipipe.errors`: ObjectNotFoundError, AccessDeniedError, StorageTimeoutError, NoSpaceError,
    ObjectExistsError, else StorageError, each naming the full URL.
    """

    @property
    def url(self) -> str:
        """The URL that keys are relative to, without a trailing slash and without its secrets: for messages."""

    def head(self, key: str) -> ObjectInfo:
        """Size and version of one object."""

    def read(self, key: str, start: int = 0, stop: int | None = None, *, into: memoryview | None = None) -> memoryview:
        """Reads bytes [start, stop) of an object (to its end when `stop` is None).

        With `into` (writable, at least stop - start bytes; `stop` required) the bytes land there and the filled part
        is returned. A short answer is an error, never data.
        """

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """All objects whose key starts with the folder `prefix`, recursively, in no particular order, streamed."""

    def put(self, key: str, data: bytes | memoryview | Path, *, if_absent: bool = False) -> None:
        """Writes a whole object atomically: readers see the old one, or none, until it is complete.

        `data` may be a local file, which is streamed; one that has no name yet may become the object itself, so nothing
        may be written to it afterwards.
        """

    def delete(self, key: str) -> None:
        """Deletes an object; a missing one is no error."""

    def close(self) -> None:
        """Frees connections. Idempotent."""


@runtime_checkable
class ReadsMany(Protocol):
    """A store that also reads many ranges of one object at once, for less than it takes to ask for each."""

    def read_many(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """The bytes of each range [start, stop), none empty, in the order of `ranges`; see `Store.read`."""
