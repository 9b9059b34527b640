"""The folder of a run: what was configured, what happened, and the ledger of every rank.

    config.json                     the configuration as it ran (rank 0)
    events.jsonl                    what happened, a line each; rotated (other ranks: events-rank-00001.jsonl)
    ranks/00000.json                all figures of the rank, replaced every `metrics.every_s`
    series/rank-00000.jsonl         a line of figures every `metrics.every_s`; rotated
    ledger/rank-00000/000000.parquet  one row a step
    quarantine.jsonl                samples that could not be decoded

Every file is either whole or missing, whenever the process ends; a line of a log is written in one call.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dalipipe.errors import ConfigError, DataError
from dalipipe.masking import masked_settings
from dalipipe.metrics.snapshot import RankSnapshot
from dalipipe.telemetry import StepRow

EVENTS_MOST_BYTES = 8 * 2**20
ROWS_A_PART = 4096
MOST_PARTS = 256
_WAIT, _PHASE = "wait_", "phase_"
_SERIES = (
    "bytes_read.",
    "bytes_written.",
    "blocks_hit.",
    "blocks_missed",
    "samples",
    "wait_s",
    "cpu_s.",
    "quarantined",
)


class RunWriter:
    """Writes one rank's part of a run folder.

    Raises:
        ConfigError: the folder cannot be made or written.
    """

    def __init__(
        self, folder: Path, rank: int, *, rows_a_part: int = ROWS_A_PART, most_parts: int = MOST_PARTS
    ) -> None:
        self._folder = folder
        self._rank = rank
        self._rows_a_part = rows_a_part
        self._most_parts = most_parts
        self._parts = folder / "ledger" / f"rank-{rank:05d}"
        self._events = folder / ("events.jsonl" if rank == 0 else f"events-rank-{rank:05d}.jsonl")
        self._series = folder / "series" / f"rank-{rank:05d}.jsonl"
        self._rows: list[StepRow] = []
        try:
            for path in (folder / "ranks", folder / "series", self._parts):
                path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"run_dir={folder} cannot be written: {error}; choose another folder") from error
        # A run that goes on in the same folder adds parts, it does not replace those before it.
        self._part = max((int(path.stem) for path in self._parts.glob("[0-9]*.parquet")), default=-1) + 1

    def config(self, config: Mapping[str, Any]) -> None:
        """Writes the configuration as it ran; passwords and signatures in URLs and options are left out."""
        _replace(self._folder / "config.json", json.dumps(masked_settings(config), indent=2, default=str).encode())

    def event(self, what: str, **about: Any) -> None:
        """Appends one line to the log of events, which is rotated at 8 MiB; a full disk loses the line, not the run."""
        _append(self._events, {"at": time.time(), "rank": self._rank, "event": what, **about})

    def series(self, snapshot: RankSnapshot) -> None:
        """Appends the figures that are drawn over time."""
        counters = {name: value for name, value in snapshot.counters.items() if name.startswith(_SERIES)}
        figures = {"steps": snapshot.num_steps, "wall_s": snapshot.wall_s, "gauges": snapshot.gauges}
        _append(self._series, {"at": snapshot.at, **figures, "counters": counters})

    def snapshot(self, snapshot: RankSnapshot) -> None:
        """Replaces the rank's figures."""
        _replace(self._folder / "ranks" / f"{self._rank:05d}.json", json.dumps(snapshot.to_json()).encode())

    def steps(self, rows: Sequence[StepRow]) -> None:
        """Adds rows to the ledger: the last part is replaced until it is full; the oldest parts beyond 256 go."""
        if not rows:
            return
        self._rows += rows
        while self._rows:
            part = self._rows[: self._rows_a_part]
            _write_part(self._parts / f"{self._part:06d}.parquet", self._rank, part)
            if len(part) < self._rows_a_part:
                break
            self._rows = self._rows[self._rows_a_part :]
            self._part += 1
        for old in sorted(self._parts.glob("[0-9]*.parquet"))[: -self._most_parts]:
            old.unlink(missing_ok=True)


def read_snapshots(folder: Path) -> list[RankSnapshot]:
    """The figures of all ranks, by rank.

    Raises:
        DataError: the folder is not that of a run, or a file of it is not what this release writes.
    """
    paths = sorted((folder / "ranks").glob("[0-9]*.json"))
    if not paths:
        raise DataError(
            f"{folder} holds no run: ranks/*.json is missing; give the folder of a job that was started with run_dir=…"
        )
    snapshots = []
    for path in paths:
        try:
            snapshots.append(RankSnapshot.from_json(json.loads(path.read_bytes())))
        except ValueError as error:
            raise DataError(f"{path} cannot be read: {error}") from error
    return snapshots


def read_ledger(folder: Path, *, most_rows: int = 100_000) -> dict[int, dict[str, list[Any]]]:
    """The last `most_rows` steps of each rank, by column; rows of the ledger that a step lacks are 0.

    Raises:
        DataError: a part cannot be read.
    """
    return {
        int(ranks.name.rpartition("-")[2]): _read_parts(sorted(ranks.glob("[0-9]*.parquet")), most_rows)
        for ranks in sorted((folder / "ledger").glob("rank-*"))
        if any(ranks.glob("[0-9]*.parquet"))
    }


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a log, the rotated file first; a torn last line is left out."""
    lines: list[dict[str, Any]] = []
    for name in (path.with_suffix(".jsonl.1"), path):
        if not name.exists():
            continue
        for line in name.read_text().splitlines():
            try:
                lines.append(json.loads(line))
            except ValueError:
                continue
    return lines


def wait_columns(columns: Iterable[str]) -> list[str]:
    """Those of the ledger's columns that are waits in the loader."""
    return [name for name in columns if name.startswith(_WAIT)]


def phase_columns(columns: Iterable[str]) -> list[str]:
    """Those of the ledger's columns that are phases of the trainer."""
    return [name for name in columns if name.startswith(_PHASE)]


def _write_part(path: Path, rank: int, rows: Sequence[StepRow]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns: dict[str, list[Any]] = {
        "rank": [rank] * len(rows),
        **{
            name: [getattr(row, name) for row in rows]
            for name in ("number", "epoch", "step", "samples", "began_at", "wall_s", "lake_bytes")
        },
    }
    for name in sorted({name for row in rows for name in row.waits}):
        columns[f"{_WAIT}{name}"] = [row.waits.get(name, 0.0) for row in rows]
    for name in sorted({name for row in rows for name in row.phases}):
        columns[f"{_PHASE}{name}"] = [row.phases.get(name, 0.0) for row in rows]
    draft = path.with_name(f".{path.name}.draft")
    pq.write_table(pa.table(columns), draft)
    draft.replace(path)


def _read_parts(paths: Sequence[Path], most_rows: int) -> dict[str, list[Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    tables, num_rows = [], 0
    for path in reversed(paths):
        try:
            table = pq.read_table(path)
        except FileNotFoundError:  # rotated away meanwhile
            continue
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{path} cannot be read: {error}; delete it to read the rest of the run") from error
        tables.append(table.to_pydict())
        num_rows += table.num_rows
        if num_rows >= most_rows:
            break
    names = list(dict.fromkeys(name for table in tables for name in table))
    columns: dict[str, list[Any]] = {name: [] for name in names}
    for table in reversed(tables):
        length = len(table["number"])
        for name in names:
            columns[name] += table.get(name, [0.0] * length)
    return {name: values[-most_rows:] for name, values in columns.items()}


def _append(path: Path, what: Mapping[str, Any]) -> None:
    line = json.dumps(what, default=str) + "\n"
    try:
        if path.exists() and path.stat().st_size + len(line) > EVENTS_MOST_BYTES:
            path.replace(path.with_suffix(".jsonl.1"))
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)
    except OSError:
        return


def _replace(path: Path, data: bytes) -> None:
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_bytes(data)
    draft.replace(path)
