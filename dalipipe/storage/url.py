"""URLs and keys: how they join, and which are refused before a client sees them."""

from __future__ import annotations

import re
from urllib.parse import quote, unquote, urlsplit

from dalipipe.errors import ConfigError
from dalipipe.masking import HIDDEN, masked

TEMPORARY_PREFIX = ".tmp-"
"""Objects whose name starts so are unfinished writes; `list` never shows them."""

FILE_SCHEMES = ("file", "local")
S3_SCHEMES = ("s3", "s3a")
GCS_SCHEMES = ("gs", "gcs")
AZURE_SCHEMES = ("az", "azure")
HTTP_SCHEMES = ("http", "https")
SFTP_SCHEMES = ("sftp", "ssh")
SMB_SCHEMES = ("smb",)
ALLUXIO_SCHEMES = ("alluxio", "alluxiofs")
OBJECT_OPTIONS = ("aws_", "google_", "azure_")
"""How the names of options of S3's, GCS's and Azure's clients begin; other stores leave those alone."""
OBJECT_SCHEMES = (*S3_SCHEMES, *GCS_SCHEMES, *AZURE_SCHEMES, *HTTP_SCHEMES)

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


def scheme_of(url: str) -> str:
    """The lower-case scheme of `url`; the empty string for a plain path.

    Raises:
        ConfigError: the URL is empty, holds a NUL byte, or chains file systems (`a::b://`).
    """
    if not url:
        raise ConfigError("a store URL is empty; give a path such as /data/set or a URL such as s3://bucket/set")
    if "\0" in url:
        raise ConfigError(f"the store URL {url!r} holds a NUL byte, which no store accepts")
    if "::" in url.partition("://")[0] and "://" in url:
        raise ConfigError(f"the store URL {url} chains file systems; give the innermost URL alone")
    match = _SCHEME.match(url)
    return match[1].lower() if match else ""


def check_key(key: str) -> str:
    """Returns `key` when it is a relative object key.

    Raises:
        ConfigError: it is empty, absolute, holds an empty, `.` or `..` segment, or a NUL byte.
    """
    if "\0" not in key and all(segment not in ("", ".", "..") for segment in key.split("/")):
        return key
    raise ConfigError(
        f"the object key {key!r} is not valid: keys are relative to the store, separated by single '/', "
        "without '.', '..' or empty segments"
    )


def check_prefix(prefix: str) -> str:
    """Returns a folder prefix without its trailing slash; the empty string is the whole store."""
    return check_key(prefix.removesuffix("/")) if prefix not in ("", "/") else ""


def is_link(key: str) -> bool:
    """Whether a shard's name leads out of its data set: a whole URL, or a path that starts with `../`."""
    return "://" in key or key.startswith("../")


def link_target(base: str, key: str) -> tuple[str, str]:
    """The store's URL and the key within it of a link in a data set at `base`.

    Raises:
        ConfigError: `../` leads past the host, bucket or root.
    """
    url = key
    if "://" not in key:
        scheme, separator, path = base.rpartition("://")
        parts = path.split("/")
        rest = key
        while rest.startswith("../"):
            rest = rest[3:]
            if len(parts) <= 1:
                raise ConfigError(f"the shard name {key!r} leads out of {base}")
            parts.pop()
        url = f"{scheme}{separator}{'/'.join([*parts, rest])}"
    folder, _, name = url.rpartition("/")
    return folder, check_key(name)


def link_from(base: str, url: str) -> str:
    """The name that an object at `url` has in a data set at `base`: relative where both have a root in common.

    A name is kept in the manifest for all to read: it never holds a password. Who opens a whole URL with a user gives
    the password by other means (`storage.options`, the client's own files and variables).
    """
    base, url = masked(base), masked(url)
    scheme, _, _ = base.rpartition("://")
    if scheme != url.rpartition("://")[0]:
        return _without_secrets(url) if "://" in url else f"file://{quote(url)}"
    ours, theirs = base.split("/"), url.split("/")
    common = 0
    while common < min(len(ours), len(theirs) - 1) and ours[common] == theirs[common]:
        common += 1
    if common == len(ours):
        return "/".join(theirs[common:])
    # The parts before any folder: the root of a path, or `scheme:`, an empty part and the host or bucket.
    if common < (3 if scheme else 2):
        return _without_secrets(url) if scheme else f"file://{quote(url)}"
    return "../" * (len(ours) - common) + "/".join(theirs[common:])


def join_url(base: str, key: str) -> str:
    """The full URL of `key` below `base`: `join_url("s3://b/set/", "a/0.jpg")` is `"s3://b/set/a/0.jpg"`.

    Below http(s) the key is percent-encoded; everywhere else a URL holds the key as it is.

    Raises:
        ConfigError: the key is not a valid relative key.
    """
    if not key:
        return strip_slash(base)
    check_key(key)
    if scheme_of(base) in ("http", "https"):
        key = quote(key)
    base = strip_slash(base)
    return base + key if base.endswith("/") else f"{base}/{key}"


def object_url(base: str, key: str) -> str:
    """The full URL of an object, as `join_url`, but the empty key (the folder itself) is refused.

    Raises:
        ConfigError: the key is not a valid relative key.
    """
    return join_url(base, check_key(key))


def strip_slash(url: str) -> str:
    """`url` without trailing slashes; a bare root (`/`, `memory://`) stays as it is."""
    stripped = url.rstrip("/")
    return url if not stripped or stripped.endswith(":") else stripped


def _without_secrets(url: str) -> str:
    """A masked URL without the marks that stand in place of its secrets."""
    return url.replace(f"://{HIDDEN}@", "://").replace(f":{HIDDEN}@", "@")


def check_host(url: str) -> str:
    """Returns `url` when its user, host and port can be told apart.

    Raises:
        ConfigError: they cannot, as when a password holds a `/`; parts of it would be taken for a port, and shown.
    """
    try:
        parts = urlsplit(url)
        sound = parts.port is not None or not parts.netloc.endswith(":")
    except ValueError:
        sound = False
    if not sound:
        raise ConfigError(
            f"{url} is not of the form scheme://user:password@host:port/path: what should be the port is no number "
            "from 0 to 65535. In a user or password write / as %2F, ? as %3F, # as %23, : as %3A, @ as %40"
        )
    return url


def file_path(url: str) -> str:
    """The path of a `file://` URL.

    Raises:
        ConfigError: the URL names another host, or a relative path.
    """
    rest = url.partition("://")[2]
    host, slash, path = rest.partition("/")
    if host not in ("", "localhost") or not slash:
        raise ConfigError(f"{url!r} names a host or a relative path; a local file URL is file:///absolute/path")
    return unquote(slash + path)


def check_http_url(url: str, key: str) -> str:
    """Returns `url` when it is a whole http(s) URL that a client can take (clients panic on some that are not).

    Raises:
        ConfigError: scheme, host, port or a character is wrong, or a query or fragment is given; names `key`.
    """
    reason = _http_fault(url)
    if reason is None:
        return url
    raise ConfigError(f"{key}={url!r} cannot be used: {reason}; write it as http://host:port or https://host")


def _http_fault(url: str) -> str | None:
    if re.search(r"[\s\x00-\x1f\x7f\\<>\"^`{|}]", url):
        return "it holds a space, a control character or a character that URLs must escape"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        return str(error)
    if parts.scheme not in ("http", "https"):
        return f"its scheme is {parts.scheme!r}, not http or https"
    host = parts.hostname
    if not host or not (":" in host or re.fullmatch(r"[\w.-]+", host)):
        return "it has no valid host"
    if port == 0:
        return "port 0 is not a port"
    if parts.query or parts.fragment:
        return "a query or fragment has no meaning here"
    return None
