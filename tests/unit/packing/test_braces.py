"""Names with braces, as WebDataset users write them."""

from __future__ import annotations

import pytest

from dalipipe.errors import ConfigError
from dalipipe.packing.braces import expand_braces


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("a.tar", ["a.tar"]),
        ("p-{008..011}.tar", ["p-008.tar", "p-009.tar", "p-010.tar", "p-011.tar"]),
        ("p-{0..2}.tar", ["p-0.tar", "p-1.tar", "p-2.tar"]),
        ("{train,val}-{0..1}.tar", ["train-0.tar", "train-1.tar", "val-0.tar", "val-1.tar"]),
        ("p-{5..5}.tar", ["p-5.tar"]),
    ],
)
def test_names(pattern, names):
    assert expand_braces(pattern) == names


@pytest.mark.parametrize("pattern", ["p-{0..}.tar", "p-{2..1}.tar", "p-{a}.tar", "p-{}.tar", "p-{0..99999999}.tar"])
def test_what_is_no_pattern_is_refused(pattern):
    with pytest.raises(ConfigError, match="is neither a range"):
        expand_braces(pattern)


@pytest.mark.parametrize("pattern", ["p-{0..1.tar", "p-0..1}.tar"])
def test_half_a_brace_is_refused(pattern):
    with pytest.raises(ConfigError, match="brace without its other half"):
        expand_braces(pattern)
