"""What a diagnosis looks at: the steps of all ranks as arrays, and figures drawn from them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dalipipe.errors import DataError
from dalipipe.metrics.runfolder import phase_columns, read_ledger, read_snapshots, wait_columns
from dalipipe.metrics.snapshot import RankSnapshot
from dalipipe.telemetry import LATENCY_BOUNDS_S

Array = npt.NDArray[np.float64]
_WARM_UP_STEPS = 3
_FEW_STEPS = 12
SPIN_FILE = "spin.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSteps:
    """The steps of one rank: arrays [num_steps] of seconds, by row; bytes from the lake and the epoch of each."""

    wall_s: Array
    waits: dict[str, Array]
    phases: dict[str, Array]
    lake_bytes: Array
    epoch: npt.NDArray[np.int64]
    key: npt.NDArray[np.int64]
    """epoch * 2^32 + step: equal on all ranks for the same global step."""

    @property
    def waited_s(self) -> Array:
        """Seconds in the loader."""
        return np.asarray(sum(self.waits.values(), np.zeros_like(self.wall_s)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run as its folder or its ports tell it: ranks in order, the ledger where there is one."""

    ranks: list[RankSnapshot]
    steps: list[RankSteps]
    num_steps: int
    synthetic_step_s: float = 0.0
    source: str = ""
    events: list[dict[str, Any]] = field(default_factory=list)

    @property
    def wall_s(self) -> float:
        """Seconds of the steps looked at, of the longest rank."""
        return max((float(rank.wall_s.sum()) for rank in self.steps), default=0.0)

    def share(self, row: str) -> float:
        """The share of a row (a wait or a phase) in the wall time of the steps looked at, mean over ranks."""
        shares = [
            float((rank.waits.get(row, zero) + rank.phases.get(row, zero)).sum() / rank.wall_s.sum())
            for rank in self.steps
            for zero in (np.zeros_like(rank.wall_s),)
            if rank.wall_s.sum() > 0
        ]
        return sum(shares) / len(shares) if shares else 0.0

    def rows(self) -> list[str]:
        """All rows that any rank has, waits first."""
        waits = dict.fromkeys(name for rank in self.steps for name in rank.waits)
        return [*waits, *dict.fromkeys(name for rank in self.steps for name in rank.phases)]

    def stall_share(self) -> float:
        """Share of wall time that the slowest rank of each step waited: in lock-step all pay the maximum."""
        if not self.steps:
            return 0.0
        common = self.aligned()
        waited = np.max([rank.waited_s[at] for rank, at in zip(self.steps, common, strict=True)], axis=0)
        wall = np.max([rank.wall_s[at] for rank, at in zip(self.steps, common, strict=True)], axis=0)
        return float(min(1.0, waited.sum() / wall.sum())) if len(wall) and wall.sum() > 0 else 0.0

    def aligned(self) -> list[npt.NDArray[np.int64]]:
        """For each rank, where the steps lie that all ranks have; the last ones when no step is common."""
        keys = self.steps[0].key
        for rank in self.steps[1:]:
            keys = np.intersect1d(keys, rank.key)
        if not len(keys):
            shortest = min(len(rank.key) for rank in self.steps)
            return [np.arange(len(rank.key) - shortest, len(rank.key)) for rank in self.steps]
        return [np.searchsorted(rank.key, keys) for rank in self.steps]

    def counter(self, name: str) -> float:
        """The sum of a counter over ranks."""
        return sum(rank.counters.get(name, 0.0) for rank in self.ranks)

    def gauge(self, name: str) -> float:
        """The largest value of a gauge over ranks."""
        return max((rank.gauges.get(name, 0.0) for rank in self.ranks), default=0.0)

    def fact(self, name: str, default: Any = None) -> Any:
        """A fact, as the first rank that knows it tells it."""
        return next((rank.facts[name] for rank in self.ranks if name in rank.facts), default)

    def idle_share(self, hand_over: str) -> float:
        """The share of wall time that a hand-over's upstream side stood still because it was full, mean over ranks."""
        shares = [
            min(1.0, rank.counters.get(f"put_wait_s.{hand_over}", 0.0) / busy_s)
            for rank in self.ranks
            if (busy_s := rank.wall_s - rank.rows.get("start", 0.0)) > 0
        ]
        return sum(shares) / len(shares) if shares else 0.0


def open_run(folder: Path) -> Run:
    """Reads the folder of a run, also of one that is running or was killed.

    Raises:
        DataError: it holds no run, or no finished step.
    """
    ranks = read_snapshots(folder)
    ledger = read_ledger(folder)
    spin = folder / SPIN_FILE
    synthetic_s = 0.0
    if spin.is_file():
        try:
            synthetic_s = float(json.loads(spin.read_text())["synthetic_step_s"])
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{spin} cannot be read: {error!r}; run `dalipipe spin` again, or delete it") from error
    steps = [_from_columns(ledger[rank.rank]) if rank.rank in ledger else _from_totals(rank) for rank in ranks]
    return _checked(
        Run(
            ranks=ranks,
            steps=steps,
            num_steps=max(rank.num_steps for rank in ranks),
            synthetic_step_s=synthetic_s,
            source=str(folder),
        )
    )


def run_from_snapshots(ranks: Sequence[RankSnapshot], source: str) -> Run:
    """A run of which only totals are known, such as the difference of two scrapes.

    Raises:
        DataError: no step was finished.
    """
    steps = [_from_totals(rank) for rank in ranks]
    return _checked(
        Run(ranks=list(ranks), steps=steps, num_steps=max((r.num_steps for r in ranks), default=0), source=source)
    )


def quantile(counts: Sequence[float], share: float) -> float:
    """The upper bound in seconds of the bucket that holds the quantile `share` of a latency histogram; 0 if empty."""
    total = sum(counts[:-1])
    seen = 0.0
    for bound, count in zip((*LATENCY_BOUNDS_S, float("inf")), counts[:-1], strict=True):
        seen += count
        if total and seen >= share * total:
            return bound
    return 0.0


def _checked(run: Run) -> Run:
    if run.num_steps < 1 or run.wall_s <= 0:
        raise DataError(
            f"{run.source}: no step is finished yet, so there is nothing to judge; wait, or look whether the loader is "
            "iterated"
        )
    return run


def _from_columns(columns: Mapping[str, list[Any]]) -> RankSteps:
    first = _WARM_UP_STEPS if len(columns["number"]) >= _FEW_STEPS and columns["number"][0] == 0 else 0

    def array(name: str) -> Array:
        return np.asarray(columns[name][first:], np.float64)

    epoch = np.asarray(columns["epoch"][first:], np.int64)
    return RankSteps(
        wall_s=array("wall_s"),
        waits={name.removeprefix("wait_"): array(name) for name in wait_columns(columns)},
        phases={name.removeprefix("phase_"): array(name) for name in phase_columns(columns)},
        lake_bytes=array("lake_bytes"),
        epoch=epoch,
        key=epoch * 2**32 + np.asarray(columns["step"][first:], np.int64),
    )


def _from_totals(rank: RankSnapshot) -> RankSteps:
    """Where only totals are known: one step, the mean of all."""
    waits = {name.removeprefix("wait_s.") for name in rank.counters if name.startswith("wait_s.")}
    rows = {name: np.array([seconds / max(1, rank.num_steps)]) for name, seconds in rank.rows.items()}
    return RankSteps(
        wall_s=np.array([rank.wall_s / max(1, rank.num_steps)]),
        waits={name: seconds for name, seconds in rows.items() if name in waits},
        phases={name: seconds for name, seconds in rows.items() if name not in waits},
        lake_bytes=np.array([rank.counters.get("bytes_read.lake", 0.0) / max(1, rank.num_steps)]),
        epoch=np.zeros(1, np.int64),
        key=np.zeros(1, np.int64),
    )
