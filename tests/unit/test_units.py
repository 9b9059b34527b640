"""Sizes as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dalipipe.errors import ConfigError
from dalipipe.units import format_bytes, parse_bytes, parse_capacity


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("64MiB", 64 * 2**20),
        ("100G", 10**11),
        ("100GB", 10**11),
        ("1.5Ki", 1536),
        ("7", 7),
        (" 2 tib ", 2**41),
        (1024, 1024),
        (0, 0),
    ],
)
def test_sizes(text: int | str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "64 apples", "-1G", "1e3", "GiB", -1, float("nan"), float("inf"), True])
def test_what_is_no_size_names_the_key(text: float | str) -> None:
    with pytest.raises(ConfigError, match=r"cache\.size="):
        parse_bytes(text, "cache.size")


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0.8, 800), ("0.8", 800), (1.0, 1000), ("1.0", 1000), (1, 1), ("1", 1), ("1K", 1000), (0, 0)],
)
def test_fractions_are_of_the_total(value: float | str, expected: int) -> None:
    assert parse_capacity(value, 1000) == expected


@given(st.integers(0, 10**18))
def test_what_is_formatted_can_be_read_back_closely(size: int) -> None:
    assert parse_bytes(format_bytes(size)) == pytest.approx(size, rel=0.06, abs=1)
