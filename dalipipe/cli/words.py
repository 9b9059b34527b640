"""Command-line words, before Hydra reads them: flags, bare words, and values that are text.

Hydra's grammar gives a meaning to `,`, `=`, `(`, `~` and refuses most of Unicode, so a path of an ordinary user would
have to be quoted twice, for the shell and for Hydra. Values of keys that are text are quoted here instead.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

_FLAGS_WITH_VALUE = frozenset(
    ("--cfg", "-c", "--package", "-p", "--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd")
)
# A flag that works without a value too takes one of these.
_INFO_FLAGS = ("--info", "-i")
_INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
_MULTIRUN = ("--multirun", "-m")


def is_multirun(words: Sequence[str]) -> bool:
    """Whether Hydra is to run several jobs."""
    return any(word in _MULTIRUN for word in words)


def wants_help(words: Sequence[str]) -> bool:
    """Whether to print what the verb does instead of doing it."""
    return any(word in ("--help", "-h") for word in words)


def flags_first(words: Sequence[str]) -> list[str]:
    """argparse takes overrides in one run only; people write flags between them."""
    flags, overrides = split_flags(words)
    return [*flags, *overrides]


def split_flags(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """(flags with their values, all other words)."""
    flags, others, rest = [], [], list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-"):
            others.append(word)
            continue
        flags.append(word)
        if rest and (word in _FLAGS_WITH_VALUE or (word in _INFO_FLAGS and rest[0] in _INFO)):
            flags.append(rest.pop(0))
        elif word in _INFO_FLAGS:
            flags.append(_INFO[0])  # or argparse would take the next word for its value
    return flags, others


def is_bare(word: str) -> bool:
    """Whether a word is a value without a key: a path, a URL, or anything without `=`."""
    if word.startswith(("/", "./", "../", "~/")) or "://" in word.split("=", 1)[0]:
        return True
    return "=" not in word and not word.startswith(("+", "~"))


def quote_texts(words: Sequence[str], text_keys: Collection[str], *, sweeps: bool = False) -> list[str]:
    """Quotes the values of overrides whose key is text.

    Left alone: values that are quoted already, null, interpolations (`${…}`), and lists of a sweep (`a,b`).
    """
    return [_quote(word, text_keys, sweeps) for word in words]


def _quote(word: str, text_keys: Collection[str], sweeps: bool) -> str:
    key, mark, value = word.partition("=")
    known = key.lstrip("+") in text_keys
    if not known or not mark or not value or value[0] in "'\"" or value == "null" or "${" in value:
        return word
    if sweeps and "," in value:
        return word
    return f"{key}={quoted(value)}"


def quoted(value: str) -> str:
    """A value in Hydra's single quotes; a backslash counts only before a quote."""
    inner = value.replace("\\'", "\\\\'").replace("'", "\\'")
    if inner.endswith("\\"):
        inner += "\\"
    return f"'{inner}'"
