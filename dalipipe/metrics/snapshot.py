"""All figures of one rank at one moment: what exporters serve, run folders keep and `doctor` reads."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from dalipipe.errors import DataError
from dalipipe.telemetry import Recorder, StepBook
from dalipipe.world import World

SNAPSHOT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSnapshot:
    """Cumulative figures of one rank.

    at: seconds since 1970. wall_s, num_steps, rows: of the steps that are done; `rows` (seconds by row) sum to
    `wall_s`. counters, gauges: by dotted name. histograms: counts per bucket of `LATENCY_BOUNDS_S`, the count above the
    last bound, and the sum in seconds. facts: numbers and words that do not change during a run.
    """

    rank: int
    world_size: int
    local_rank: int = 0
    node: int = 0
    host: str = ""
    pid: int = 0
    at: float = 0.0
    wall_s: float = 0.0
    num_steps: int = 0
    rows: dict[str, float] = field(default_factory=dict)
    counters: dict[str, float] = field(default_factory=dict)
    gauges: dict[str, float] = field(default_factory=dict)
    histograms: dict[str, list[float]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """A JSON-able dictionary."""
        return {"version": SNAPSHOT_VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RankSnapshot:
        """The reverse of `to_json`.

        Raises:
            DataError: another version, or not a snapshot.
        """
        if not isinstance(data, Mapping) or data.get("version") != SNAPSHOT_VERSION:
            found = data.get("version") if isinstance(data, Mapping) else type(data).__name__
            raise DataError(f"a rank's figures of version {found!r} cannot be read; this release reads version 1")
        try:
            return cls(**{name: value for name, value in data.items() if name != "version"})
        except TypeError as error:
            raise DataError(f"a rank's figures have fields that this release does not know: {error}") from error


def take_snapshot(recorder: Recorder, steps: StepBook, world: World, facts: Mapping[str, Any]) -> RankSnapshot:
    """The figures of this process just now."""
    rows, wall_s, num_steps = steps.totals()
    counters = recorder.snapshot()
    counters["cpu_s.process"] = time.process_time()
    return RankSnapshot(
        rank=world.rank,
        world_size=world.world_size,
        local_rank=world.local_rank,
        node=world.node,
        host=socket.gethostname(),
        pid=os.getpid(),
        at=time.time(),
        wall_s=wall_s,
        num_steps=num_steps,
        rows=rows,
        counters=counters,
        gauges=recorder.gauges(),
        histograms=recorder.histograms(),
        facts=dict(facts),
    )


def subtract(after: RankSnapshot, before: RankSnapshot) -> RankSnapshot:
    """The figures of the time between two snapshots of one rank; gauges and facts are those of `after`."""

    def less(new: Mapping[str, float], old: Mapping[str, float]) -> dict[str, float]:
        return {name: value - old.get(name, 0.0) for name, value in new.items()}

    return RankSnapshot(
        rank=after.rank,
        world_size=after.world_size,
        local_rank=after.local_rank,
        node=after.node,
        host=after.host,
        pid=after.pid,
        at=after.at,
        wall_s=after.wall_s - before.wall_s,
        num_steps=after.num_steps - before.num_steps,
        rows=less(after.rows, before.rows),
        counters=less(after.counters, before.counters),
        gauges=after.gauges,
        histograms={
            name: [new - old for new, old in zip(counts, before.histograms.get(name, [0.0] * len(counts)), strict=True)]
            for name, counts in after.histograms.items()
        },
        facts=after.facts,
    )
