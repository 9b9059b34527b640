"""What went wrong, in our own words: client and system errors become the tree of `dalipipe.errors`."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator, Sequence

from dalipipe.errors import (
    AccessDeniedError,
    DalipipeError,
    DependencyError,
    NoSpaceError,
    ObjectExistsError,
    ObjectNotFoundError,
    StorageError,
    StorageTimeoutError,
)
from dalipipe.masking import masked

_TRANSIENT_ERRNO = frozenset(
    {
        errno.EAGAIN,
        errno.ECONNABORTED,
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.EHOSTUNREACH,
        errno.EINTR,
        errno.ENETRESET,
        errno.ENETUNREACH,
        errno.EPIPE,
        errno.ETIMEDOUT,
    }
)
_TRANSIENT_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
_TRANSIENT_NAMES = frozenset(
    # Client libraries have their own trees; these are the names that mean "the connection broke".
    {
        "ChunkedEncodingError",
        "ClientConnectionError",
        "ClientConnectorError",
        "ClientOSError",
        "ClientPayloadError",
        "ConnectTimeout",
        "ConnectionError",
        "EndpointConnectionError",
        "IncompleteRead",
        "IncompleteReadError",
        "ReadTimeout",
        "ServerDisconnectedError",
        "SSHException",
    }
)
# A client that wraps broken connections in its own words.
_TRANSIENT_WORDS = (
    "error sending request",
    "request or response body error",
    "operation timed out",
    "connection closed",
)
# How clients tell that they gave up waiting; the last two stand in what obstore appends to a message that speaks of a
# broken body.
_TIMED_OUT_WORDS = ("timed out", "timeouterror", "timedout", "kind: timeout")
_THROTTLE_STATUS = frozenset({429, 503})
_STALE_CODES = frozenset({"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "InvalidToken"})
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_MAX_REASON_CHARS = 240


def is_transient(error: BaseException) -> bool:
    """Whether the same request may well succeed a moment later.

    Transient are: broken or refused connections, timeouts of the client, and the HTTP states 408, 425, 429, 500,
    502, 503 and 504. Everything else (missing, denied, full, misused) would only fail again.
    """
    if isinstance(error, DalipipeError):
        return False
    if isinstance(error, (ConnectionError, TimeoutError)):
        return True
    status = http_status(error)
    if status is not None:
        return status in _TRANSIENT_STATUS
    if isinstance(error, OSError) and error.errno in _TRANSIENT_ERRNO:
        return True
    if any(kind.__name__ in _TRANSIENT_NAMES for kind in type(error).__mro__):
        return True
    return type(error).__name__ == "GenericError" and any(words in str(error) for words in _TRANSIENT_WORDS)


def is_throttling(error: BaseException) -> bool:
    """Whether the store asked to slow down (429 or 503): it took the request and did nothing."""
    return not isinstance(error, DalipipeError) and http_status(error) in _THROTTLE_STATUS


def has_stale_credentials(error: BaseException) -> bool:
    """Whether the store refused the request because the session's credentials have run out."""
    return error_code(error) in _STALE_CODES


def error_code(error: BaseException) -> str:
    """The code in an S3 error body, such as `ExpiredToken`; empty without one."""
    found = _CODE.search(str(error))
    return found[1] if found else ""


def is_panic(error: BaseException) -> bool:
    """Whether a Rust client crashed: its exception derives from BaseException, so `except Exception` misses it."""
    return type(error).__name__ == "PanicException"


def http_status(error: BaseException) -> int | None:
    """The HTTP status behind an error of obstore, aiohttp, requests or botocore, where there is one."""
    for holder in (error, getattr(error, "response", None)):
        for name in ("status", "status_code"):
            value = getattr(holder, name, None)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    match = _STATUS.search(str(error))
    return int(match[1]) if match else None


def translate(error: BaseException, action: str, secrets: Sequence[str] = ()) -> DalipipeError:
    """The typed error for `error`, raised while doing `action` (a verb with the full URL: `read s3://b/k`).

    The caller chains it: `raise translate(error, action) from presentable(error)`. Both take the `secrets` that a
    client may repeat in its own words.
    """
    kind, remedy = _classify(error)
    if isinstance(error, (IsADirectoryError, NotADirectoryError)) and not action.startswith("write"):
        # To an object store a folder, or a key below a file, is simply no object.
        kind, remedy = ObjectNotFoundError, "; check the URL"
    return kind(f"cannot {action}: {reason(error, secrets)}{remedy}")


class ClientError(Exception):
    """A client's error as it may be shown: its type and words, without the secrets of the URLs that it repeats."""

    status: int | None = None
    """The HTTP status that came with it, where there was one."""


def presentable(error: BaseException, secrets: Sequence[str] = ()) -> BaseException:
    """`error` itself; where a traceback of it would show a secret of a URL, a `ClientError` in its place.

    Clients repeat whole URLs, passwords and signatures included, in their own message and in those of the errors that
    caused it, all of which Python prints.
    """
    if all(masked(text, secrets) == text for link in _chain(error) for text in (str(link), repr(link))):
        return error
    shown = ClientError(f"{type(error).__name__}: {masked(str(error), secrets)}").with_traceback(error.__traceback__)
    shown.status = http_status(error)
    cause = next((link for link in _chain(error) if link is not error), None)
    shown.__cause__ = None if cause is None else presentable(cause, secrets)
    return shown


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and what Python prints before it."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _classify(error: BaseException) -> tuple[type[DalipipeError], str]:
    name = type(error).__name__
    status = http_status(error)
    number = error.errno if isinstance(error, OSError) else None
    text = str(error).lower()
    if isinstance(error, ImportError):
        return DependencyError, "; install the package that it names"
    if isinstance(error, FileExistsError) or name in ("AlreadyExistsError", "PreconditionError"):
        return ObjectExistsError, ""
    if isinstance(error, FileNotFoundError) or status == 404:
        return ObjectNotFoundError, "; check the URL and the endpoint"
    if error_code(error) in _STALE_CODES:
        return AccessDeniedError, (
            "; the session's credentials have run out: give storage.credential_process or storage.credentials_file, "
            "which are asked again in time"
        )
    if error_code(error) == "RequestTimeTooSkewed":
        return AccessDeniedError, "; this host's clock is wrong: set it (NTP), signatures are valid for 15 minutes"
    if isinstance(error, PermissionError) or name in ("PermissionDeniedError", "UnauthenticatedError"):
        return AccessDeniedError, "; check credentials and permissions"
    if status in (401, 403):
        return AccessDeniedError, "; check credentials and permissions"
    if number in (errno.ENOSPC, errno.EDQUOT) or status == 507:
        return NoSpaceError, "; free some space or raise the quota"
    if isinstance(error, TimeoutError) or any(words in text for words in _TIMED_OUT_WORDS):
        return StorageTimeoutError, "; raise storage.request_timeout_s or storage.read_timeout_s if the store is slow"
    if status in _TRANSIENT_STATUS:
        return StorageError, "; it was asked storage.retries times more: raise that where the store needs longer"
    if is_transient(error):
        return StorageError, "; it was tried storage.retries times more: check host, port and network, or raise that"
    return StorageError, ""


def reason(error: BaseException, secrets: Sequence[str] = ()) -> str:
    """One short line: the system's words, or the first line of a client's message without its debug dump."""
    if isinstance(error, OSError) and error.errno is not None and error.strerror:
        return error.strerror
    text = masked(str(error), secrets)
    code = error_code(error)
    first = text.strip().partition("\n")[0].partition("<?xml")[0].strip().rstrip(":")
    if code:
        first = f"{code}: {first}"
    if len(first) > _MAX_REASON_CHARS:
        first = first[: _MAX_REASON_CHARS - 1] + "…"
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
