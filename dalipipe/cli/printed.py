"""What Hydra prints of a configuration (`--cfg`, `--info`, wrong usage), without the secrets in it."""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from dalipipe.masking import HIDDEN, is_secret_name, masked

AroundJob = Callable[[], contextlib.AbstractContextManager[None]]


@contextmanager
def masked_output(words: Sequence[str]) -> Iterator[AroundJob]:
    """Holds back what is printed until the end, and masks it then.

    Yields what a job runs in: there both streams are as they were before.
    """
    before = sys.stdout, sys.stderr
    out, err = io.StringIO(), io.StringIO()

    @contextmanager
    def as_before() -> Iterator[None]:
        with contextlib.redirect_stdout(before[0]), contextlib.redirect_stderr(before[1]):
            yield

    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            yield as_before
    finally:
        shown = masked(out.getvalue())
        before[0].write(f"{HIDDEN}\n" if shown and _is_of_a_secret(words) else shown)
        before[1].write(masked(err.getvalue()))


def _is_of_a_secret(words: Sequence[str]) -> bool:
    """Whether `--package` asks for something below a secret option, whose name is then not printed."""
    flags = argparse.ArgumentParser(add_help=False)
    flags.add_argument("--package", "-p", default="")
    names = flags.parse_known_args(list(words))[0].package.split(".")
    below = names[names.index("options") + 1 :] if "options" in names else []
    return any(map(is_secret_name, below))
