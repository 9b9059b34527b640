"""Sizes as people write them.

Decimal suffixes are powers of 1000 (`"100G"` = 10**11 bytes), binary ones powers of 1024 (`"64MiB"`), as in
Kubernetes and in the data sheets of disks.
"""

from __future__ import annotations

import re

from dalipipe.errors import ConfigError

_FACTORS = {"": 1}
_FACTORS |= {letter: 1000**power for power, letter in enumerate("KMGTP", 1)}
_FACTORS |= {f"{letter}I": 1024**power for power, letter in enumerate("KMGTP", 1)}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGTP]?I?)B?", re.IGNORECASE)


def parse_bytes(value: int | float | str, key: str = "size") -> int:
    """Reads a size in bytes from `1048576`, `"64MiB"` or `"100G"`.

    Raises:
        ConfigError: the value is negative, not finite or not a size; names `key`.
    """
    if isinstance(value, bool):
        raise ConfigError(f"{key}={value!r} is not a size; write bytes or a string such as '64MiB' or '100G'")
    if isinstance(value, (int, float)):
        if not 0 <= value < float("inf"):
            raise ConfigError(f"{key}={value!r} is not a size: it must be finite and at least 0")
        return int(value)
    match = _SIZE.fullmatch(value.strip())
    if match is None or match[2].upper() not in _FACTORS:
        raise ConfigError(f"{key}={value!r} is not a size; write bytes or a string such as '64MiB' or '100G'")
    return int(float(match[1]) * _FACTORS[match[2].upper()])


def parse_capacity(value: int | float | str, total_bytes: int, key: str = "capacity") -> int:
    """Reads a budget in bytes: a size as in `parse_bytes`, or a fraction in (0, 1] of `total_bytes`.

    A float of at most 1 (also as the string `"0.8"`) is a fraction; 0 is nothing; an int is bytes.

    Raises:
        ConfigError: neither a size nor a fraction; names `key`.
    """
    if isinstance(value, str):
        try:
            value = int(value) if value.strip().isdigit() else float(value)
        except ValueError:
            return parse_bytes(value, key)
    if isinstance(value, float) and 0 <= value <= 1:
        return int(value * total_bytes)
    return parse_bytes(value, key)


def format_bytes(num_bytes: float) -> str:
    """Writes a size for people: `format_bytes(3_500_000)` is `"3.5 MB"` (decimal units)."""
    size = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(size) < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} PB"
