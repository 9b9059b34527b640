"""What verbs print: results on stdout (text, or one JSON object), progress on stderr."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from dalipipe.masking import masked, masked_settings

Progress = Callable[[int, int], None]
_SHOW_AFTER_S = 2.0


def counted(kinds: Mapping[str, int]) -> str:
    """`2 folder, 1 hidden`."""
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items())


@contextmanager
def progress(label: str) -> Iterator[Progress]:
    """Gives a `report(done, total)`; draws a bar with an estimate once it takes over 2 s, only on a terminal."""
    if not sys.stderr.isatty():
        yield lambda _done, _total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bars = Bars(*columns, console=Console(stderr=True), transient=True)
    task = bars.add_task(label, total=None)
    begin, shown = time.monotonic(), False

    def report(done: int, total: int) -> None:
        nonlocal shown
        if not shown and time.monotonic() - begin > _SHOW_AFTER_S:
            bars.start()
            shown = True
        bars.update(task, completed=done, total=total or None)

    try:
        yield report
    finally:
        if shown:
            bars.stop()


@contextmanager
def stages() -> Iterator[Callable[[str, int, int], None]]:
    """Gives a `report(what, done, total)` for work in several stages, one bar each; total 0: not known."""
    with ExitStack() as open_bars:
        bars: dict[str, Progress] = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in bars:
                open_bars.close()
                bars[what] = open_bars.enter_context(progress(what))
            bars[what](done, total)

        yield report


def emit(result: Mapping[str, Any], text: str, *, as_json: bool) -> None:
    """Prints one JSON object or the text, without the secrets of URLs."""
    print(json.dumps(masked_settings(result), indent=2, sort_keys=False) if as_json else masked(text))


def table(rows: Sequence[Sequence[object]], *, indent: str = "  ") -> str:
    """Left-aligned first column, right-aligned others."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    lines = [
        indent + "  ".join(cell.ljust(width) if not i else cell.rjust(width) for i, (cell, width) in enumerate(pairs))
        for pairs in (list(zip(row, widths, strict=True)) for row in cells)
    ]
    return "\n".join(line.rstrip() for line in lines)
