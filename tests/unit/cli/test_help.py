"""`dalipipe VERB --help`: what it does, calls that work, and its keys."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dalipipe.cli import main
from dalipipe.cli.entry import VERBS
from dalipipe.cli.keys import is_known, keys_of
from dalipipe.cli.schema import JOBS
from dalipipe.cli.words import is_bare

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_a_verb(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "--help"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert shown.out.startswith(f"dalipipe {verb}: {VERBS[verb]}\n")
    assert "schema" not in shown.out
    known = set(keys_of(JOBS[verb]))
    examples = re.findall(rf"^  dalipipe ({verb}.*)$", shown.out, flags=re.M)
    assert examples
    for example in examples:
        for word in example.split()[1:]:
            assert is_bare(word) or word == "--json" or is_known(word.split("=")[0], known), word
    for key in (key for key in known if "*" not in key):
        assert f"{key.split('.')[-1]}:" in shown.out, key
    (page,) = re.findall(r"More: (\S+\.md)", shown.out)
    assert (ROOT / page).is_file()
