"""Names with braces, as WebDataset users write them: `part-{000..127}.tar`, `{train,val}-0.tar`."""

from __future__ import annotations

import re

from dalipipe.errors import ConfigError

_GROUP = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_MAX_NAMES = 10**7


def expand_braces(name: str) -> list[str]:
    """All names that the pattern stands for, in order; ranges keep their leading zeros, and include both ends.

    Raises:
        ConfigError: a brace is not closed, or holds neither a range `A..B` with A <= B nor a list `a,b`.
    """
    match = _GROUP.search(name)
    if match is None:
        if "{" in name or "}" in name:
            raise ConfigError(f"{name!r} has a brace without its other half; write part-{{000..127}}.tar")
        return [name]
    span = _RANGE.fullmatch(match[1])
    if span is not None and int(span[1]) <= int(span[2]) < int(span[1]) + _MAX_NAMES:
        values = [str(number).zfill(len(span[1])) for number in range(int(span[1]), int(span[2]) + 1)]
    elif span is None and "," in match[1]:
        values = match[1].split(",")
    else:
        raise ConfigError(f"{match[0]} in {name!r} is neither a range such as {{000..127}} nor a list such as {{a,b}}")
    rest = expand_braces(name[match.end() :])
    return [f"{name[: match.start()]}{value}{end}" for value in values for end in rest]
