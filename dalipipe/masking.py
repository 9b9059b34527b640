"""Secrets that travel in URLs: taken out of every text that a person, a log or a file gets to see.

One function, so that what counts as a secret is said once. Errors apply it to their own message; stores to their URL;
the command line to every log line; the run folder to its configuration.
"""

from __future__ import annotations

import re
import sys
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
# Where a secret lies and what is thought of a key is no secret: `key_filename`, `host_key_policy`.
_SECRET_NAME = re.compile(rf"^(?!.*(?:_policy|_filename|_file|_path)$).*(?:{_SECRET_WORDS})", re.IGNORECASE | re.DOTALL)
# An override as it was typed, in a line of a log or a list: to its end, or to the next word that begins with `key=`.
_OVERRIDE = re.compile(
    r"\boptions((?:\.[\w'\"-]+)*)=(\*\*\*(?![^\s,;:'\"])|'[^'\n]+'(?=[\s,]|$)|\"[^\"\n]+\"(?=[\s,]|$)"
    r"|.*?(?=[\s,][+~]*[\w./@-]+=|'*$))",
    re.MULTILINE,
)
# The same of a parent key: `storage={options: {password: …}}`.
_OVERRIDE_ABOVE = re.compile(r"=([{\[][^\n]{0,4000}?\boptions['\"]? *:[^\n]*)")
_OVERRIDE_ITEM = re.compile(r"( *(?:- )+)['\"]?([+~]*[\w./@][\w./@'\"-]*=)")
_YAML_NAME = re.compile(r"( *(?:- +)*)('[^']*'|\"[^\"]*\"|[^\s'\"#:-][^:]*):(?: +(.*))?$")
_YAML_PACKAGE = "# @package "
_YAML_FALSE = ("''", "null", "false", "0", "0.0", "{}", "[]")
# A whole user part of these is a token as often as a name.
_WEB = ("http", "https")


def masked(text: str, secrets: Sequence[str] = ()) -> str:
    """`text` with the passwords and the signed or secret query values of all URLs in it replaced by `***`.

    Of `scheme://user:password@host` the user stays, but not for http(s), where it may be a token. Of a query the values
    go whose name speaks of a signature, token, secret, password, credential, delegation or key (SAS, presigned URLs),
    and the same of a client's options, in overrides (`storage.options.password=…`) and in YAML below `options:`.
    A text without a secret comes back as it is; masking twice changes nothing.

    secrets: known ones, which are replaced wherever they stand: a client may repeat them without the URL around them.
    """
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    if "://" in text:
        text = _USER.sub(_hide_user, text)
    if "options" in text:
        text = "".join(_without_yaml_secrets(text.splitlines(keepends=True)))
        text = _without_override_secrets(text)
    return _QUERY.sub(rf"\1{HIDDEN}", text) if "=" in text else text


def is_secret_name(name: object) -> bool:
    """Whether what a client's option of this name holds is a secret."""
    return _SECRET_NAME.search(str(name)) is not None


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
        hides = is_secret or is_secret_name(name)
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
            if within == "options" and value and is_secret_name(name)
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


def _without_override_secrets(text: str) -> str:
    return _OVERRIDE_ABOVE.sub(_hide_override_above, _OVERRIDE.sub(_hide_override, text))


def _hide_override(match: re.Match[str]) -> str:
    names, value = match[1], match[2]
    nested = value.lstrip("'\"").startswith(("{", "["))
    if not any(map(is_secret_name, names.split("."))) and not (nested and is_secret_name(value)):
        return match[0]
    return f"options{names}={HIDDEN}"


def _hide_override_above(match: re.Match[str]) -> str:
    return f"={HIDDEN}" if is_secret_name(match[1].partition("options")[2]) else match[0]


def _without_yaml_secrets(lines: Sequence[str]) -> Iterator[str]:
    """The lines of a text in which the secrets of client options stand as YAML in block style, as OmegaConf prints it.

    What hangs below a hidden name (lists, mappings, folded texts) goes with it. `# @package` says below which key the
    text stands.
    """
    options_at = hidden_at = None
    is_list_hidden = False
    for at, line in enumerate(lines):
        bare, end = line.strip(), line[len(line.rstrip("\r\n")) :]
        column = _column(line)
        if hidden_at is not None:
            if not bare or column > hidden_at or (is_list_hidden and column == hidden_at and bare[:2] in ("- ", "-")):
                continue
            hidden_at = None
        if bare.startswith(_YAML_PACKAGE):
            options_at = -1 if "options" in bare.removeprefix(_YAML_PACKAGE).split(".") else None
        if options_at is not None and bare and column <= options_at:
            options_at = None
        if item := _OVERRIDE_ITEM.match(line):
            word = " ".join([line[item.start(2) :].strip(), *_folded(lines, at, column)])
            if _without_override_secrets(word) != word:
                hidden_at = column
                yield f"{item[1]}{item[2]}{HIDDEN}{end}"
                continue
        name = _YAML_NAME.match(line.rstrip("\r\n"))
        if name and options_at is not None and is_secret_name(name[2]):
            value = name[3] or ""
            if value not in _YAML_FALSE:
                hidden_at, is_list_hidden = len(name[1]), not value
                yield f"{name[1]}{name[2]}: '{HIDDEN}'{end}"
                continue
        if name and options_at is None and name[2] == "options" and not name[3]:
            options_at = len(name[1])
        yield line


def _folded(lines: Sequence[str], at: int, column: int) -> Iterator[str]:
    """The lines that go on with a text that began in `column` of line `at`."""
    for number in range(at + 1, len(lines)):
        if _column(lines[number]) <= column:
            return
        yield lines[number].strip()


def _column(line: str) -> int:
    """Where its text begins; beyond all others for an empty line, which is part of what it stands in."""
    return len(line) - len(line.lstrip(" ")) if line.strip() else sys.maxsize
