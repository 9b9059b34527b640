"""Secrets that travel in URLs: taken out of every text that a person, a log or a file gets to see.

One function, so that what counts as a secret is said once. Errors apply it to their own message; stores to their URL;
the command line to every log line; the run folder to its configuration.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

HIDDEN = "***"
"""What stands in place of a secret."""

# RFC 3986 ends the user part at the first `/`, `?` or `#`. People forget to escape those in a password, so the second
# form looks behind them, unless what follows the colon is a port.
_USER = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(?:([^\s/?#]*)|([^\s/?#:@\[]+:(?!\d+(?:[/?#\s]|$))[^\s@]*))@")
_SECRET_WORDS = r"sig|signature|token|secret|pass|pwd|credential|delegation|auth|key|sas|jwt"
# Some servers take `;` between values; `#` begins what OAuth hands back.
_QUERY = re.compile(rf"([?&;#][\w.%-]*(?:{_SECRET_WORDS})[\w.%-]*=)[^&\s\"'<>#)]+", re.IGNORECASE)
_SECRET_NAME = re.compile(_SECRET_WORDS, re.IGNORECASE)
# A whole user part of these is a token as often as a name.
_WEB = ("http", "https")


def masked(text: str, secrets: Sequence[str] = ()) -> str:
    """`text` with the passwords and the signed or secret query values of all URLs in it replaced by `***`.

    Of `scheme://user:password@host` the user stays, but not for http(s), where it may be a token. Of a query the values
    go whose name speaks of a signature, token, secret, password, credential, delegation or key (SAS, presigned URLs).
    A text without a secret comes back as it is; masking twice changes nothing.

    secrets: known ones, which are replaced wherever they stand: a client may repeat them without the URL around them.
    """
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    if "://" in text:
        text = _USER.sub(_hide_user, text)
    return _QUERY.sub(rf"\1{HIDDEN}", text) if "=" in text else text


def secrets_in(url: str, options: Mapping[str, Any]) -> tuple[str, ...]:
    """What `masked` hides of `url`, raw and decoded, and the secret values of a client's `options`; longest first.

    What has fewer than four characters is left out: to replace it everywhere would only garble messages.
    """
    found = list(_secret_options(options))
    for match in _USER.finditer(url):
        user, colon, password = (match[2] if match[2] is not None else match[3]).partition(":")
        found.append(password if colon else user if match[1].lower() in _WEB else "")
    found += [match[0].partition("=")[2] for match in _QUERY.finditer(url)]
    return tuple(sorted({form for value in found for form in (value, unquote(value)) if len(form) > 3}, key=_by_length))


def _secret_options(options: Mapping[str, Any], *, is_secret: bool = False) -> Iterator[str]:
    """The texts under a name of a secret; clients nest their options (`client_kwargs.headers.Authorization`)."""
    for name, value in options.items():
        hides = is_secret or _SECRET_NAME.search(str(name)) is not None
        if isinstance(value, Mapping):
            yield from _secret_options(value, is_secret=hides)
        elif isinstance(value, str) and hides:
            yield value


def _by_length(secret: str) -> tuple[int, str]:
    return -len(secret), secret


def masked_settings(settings: Any, *, within: str = "") -> Any:
    """Nested plain values as they may be kept: URLs are masked, and secret options of a client are hidden by name.

    within: the name under which the values stand; below `options`, at any depth, the names are a client's own
    (`password`, `sas_key`, `client_kwargs.token`).
    """
    if isinstance(settings, Mapping):
        return {
            masked(name) if isinstance(name, str) else name: HIDDEN
            if within == "options" and value and _SECRET_NAME.search(str(name))
            else masked_settings(value, within=within if within == "options" else str(name))
            for name, value in settings.items()
        }
    if isinstance(settings, (list, tuple)):
        return [masked_settings(value, within=within) for value in settings]
    return masked(settings) if isinstance(settings, str) else settings


def _hide_user(match: re.Match[str]) -> str:
    scheme, user = match[1], match[2] if match[2] is not None else match[3]
    if scheme.lower() in _WEB:
        return f"{scheme}://{HIDDEN}@"
    name, colon, _ = user.partition(":")
    return f"{scheme}://{name}{colon and ':' + HIDDEN}@"
