"""What users pay before anything happens: imports and the first answer of the command line."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

HEAVY = ("torch", "nvidia.dali", "pyarrow", "hydra", "fsspec", "obstore", "numpy")


def test_import_brings_nothing_heavy() -> None:
    code = f"import sys, dalipipe; print([name for name in {HEAVY!r} if name in sys.modules])"
    assert _run("-c", code) == "[]"


def test_public_names_are_sorted_and_exist() -> None:
    code = (
        "import dalipipe as d; assert d.__all__ == sorted(d.__all__), d.__all__; [getattr(d, n) for n in d.__all__];"
        "print('ok')"
    )
    assert _run("-c", code) == "ok"


def test_help_answers_in_two_seconds() -> None:
    fastest = min(_timed("-m", "dalipipe", "--help") for _ in range(3))
    assert fastest < 2.0


@pytest.mark.parametrize("verb", ["pack", "info", "verify", "cache", "plan"])
def test_verbs_that_need_no_tensor_import_no_torch(verb: str) -> None:
    code = (
        "import sys\n"
        "from dalipipe.cli import main\n"
        f"assert main([{verb!r}, '--cfg', 'job']) == 0\n"
        "sys.exit('torch' in sys.modules or 'nvidia.dali' in sys.modules)"
    )
    _run("-c", code)


def _run(*words: str) -> str:
    done = subprocess.run([sys.executable, *words], check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def _timed(*words: str) -> float:
    begin = time.perf_counter()
    assert "dalipipe VERB" in _run(*words)
    return time.perf_counter() - begin
