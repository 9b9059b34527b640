"""Do download and decode overlap where the CPU is the bound?

    python benchmarks/overlap.py [--quick] [--rounds N] [--steps N]

T1 training (crop, flip, normalise; batches of 64) at a step of nine tenths of the CPU time of its batch, so that the
CPU can just not feed it, from a lake behind a link (30 ms, 100 MB/s) that carries more than that. AU (accelerator
utilisation) is time in steps / wall time after the first batch, in epoch 1 and with an empty cache unless said:

    lake    the data set behind the link.
    memory  the same run, its files in a memory file system.
    beside  as memory, while another process reads the lake at the same rate and throws it away: what the emulated lake
            itself costs this machine, and a real one would not.
    near    every block lies mapped in the node's cache, as in epoch 2: nothing is read, checked or kept.

An epoch is a turn of some seconds. Each round is one turn of lake, memory and beside, in an order that alternates, so
that all see the same machine; every fourth round one of near besides. Differences are taken within a round; of
everything there is [lower quartile, median, upper quartile]. The wait for the first blocks comes once an epoch, however
long that is, so the first 32 steps are told apart from the others: an epoch of N steps loses the `start` seconds once,
the `later` points all along. What a wait was for is the loader's own account, in seconds of the epoch.

Where others use the machine, time says little; so CPU milliseconds a step are given as well, the AU that they allow
(`by_cpu`: all cores to itself, nothing waited for), how many cores others used, and the differences once again from the
rounds in which that was less than a tenth of one (`_quiet`).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.lake import BATCH_SIZE, make_data, train
from dalipipe.interrupts import Stopping
from tests.support.emulation import RATE, lake, reader

_CPU_SHARE = 0.9
_LANES = ("shuffle.lanes=16",)
_TICKS = os.sysconf("SC_CLK_TCK")
_NUM_START = 32
_NEAR_EVERY = 4
_QUIET_CORES = 0.1


class Runs:
    """What was measured: by the name of the run, a value a turn."""

    def __init__(self, step_s: float, num_steps: int, work: Path) -> None:
        self._step_s = step_s
        self._num_steps = num_steps
        self._num_start = min(_NUM_START, num_steps // 2)
        self._work = work
        self._turns: dict[str, list[dict[str, float]]] = defaultdict(list)
        self._waits_s: dict[str, list[dict[str, float]]] = defaultdict(list)

    def epoch(self, name: str, url: str, cache: Path | None = None) -> None:
        """An epoch 1; with no cache given, one that is empty."""
        busy_s, began_s, own_s = _busy_cpu_s(), time.perf_counter(), _own_cpu_s()
        with tempfile.TemporaryDirectory(dir=self._work) as empty:
            found = train(url, cache or Path(empty), step_s=self._step_s, num_steps=self._num_steps, extra=_LANES)
        others_s = _busy_cpu_s() - busy_s - (_own_cpu_s() - own_s)
        cpu_s, ended_s = found["cpu_s"][0] / self._num_steps, found["ended_s"][0]
        start_s = ended_s[self._num_start - 1]
        later_s = (ended_s[-1] - start_s) / (self._num_steps - self._num_start)
        turn = {
            "au": found["au"][0],
            "epoch_s": ended_s[-1],
            "start_s": start_s,
            "later_au": self._step_s / later_s,
            "by_cpu": min(1.0, self._step_s * len(os.sched_getaffinity(0)) / cpu_s),
            "cpu_ms": 1000 * cpu_s,
            "others": others_s / (time.perf_counter() - began_s),
        }
        self._turns[name].append(turn)
        self._waits_s[name].append(found["waits_s"][0])
        print(name, *(f"{key} {value:.3f}" for key, value in turn.items()), file=sys.stderr)

    def figures(self) -> dict[str, Any]:
        """Medians and quartiles, and by how much the lake is behind memory within a round."""
        return {
            "step_s": self._step_s,
            "steps": self._num_steps,
            "turns": {name: len(turns) for name, turns in self._turns.items()},
            "au": self._of("au", 3),
            "later_au": self._of("later_au", 3),
            "au_by_cpu": self._of("by_cpu", 3),
            "cpu_ms_a_step": self._of("cpu_ms", 1),
            "cores_that_others_used": self._of("others", 2),
            "epoch_s": self._of("epoch_s", 2),
            "waits_s": {name: _by_kind(waits_s) for name, waits_s in self._waits_s.items()},
            "points_behind_memory": self._behind("memory", "lake", "au", 100),
            "points_behind_memory_later": self._behind("memory", "lake", "later_au", 100),
            "start_s_more_than_memory": self._behind("lake", "memory", "start_s", 1),
            "points_behind_memory_quiet": self._behind("memory", "lake", "au", 100, quiet=True),
            "points_behind_memory_later_quiet": self._behind("memory", "lake", "later_au", 100, quiet=True),
            "start_s_more_than_memory_quiet": self._behind("lake", "memory", "start_s", 1, quiet=True),
            "points_behind_memory_by_cpu": self._behind("memory", "lake", "by_cpu", 100),
            "points_of_the_emulated_lake_itself": self._behind("memory", "beside", "au", 100),
            "points_behind_beside": self._behind("beside", "lake", "au", 100),
            "points_behind_near": self._behind("near", "lake", "au", 100),
        }

    def _of(self, key: str, digits: int) -> dict[str, list[float]]:
        return {name: _spread([turn[key] for turn in turns], digits) for name, turns in self._turns.items()}

    def _behind(self, first: str, second: str, key: str, factor: float, *, quiet: bool = False) -> list[float]:
        """How much more the first has, from the rounds that both were part of."""
        turns = {name: dict(enumerate(found)) for name, found in self._turns.items()}
        turns["near"] = {_NEAR_EVERY * number: turn for number, turn in turns.get("near", {}).items()}
        both = [(turns[first][number], turns[second][number]) for number in turns[first].keys() & turns[second].keys()]
        if quiet:
            both = [pair for pair in both if all(turn["others"] < _QUIET_CORES for turn in pair)]
        return _spread([factor * (one[key] - other[key]) for one, other in both], 2)


def _spread(values: list[float], digits: int) -> list[float]:
    """[lower quartile, median, upper quartile]; one value is all three, of none there is nothing."""
    if len(values) < 2:
        return [round(value, digits) for value in values * 3]
    return [round(value, digits) for value in statistics.quantiles(values, n=4, method="inclusive")]


def _by_kind(waits_s: list[dict[str, float]]) -> dict[str, float]:
    kinds = sorted({kind for turn in waits_s for kind in turn})
    return {kind: round(statistics.median(turn.get(kind, 0.0) for turn in waits_s), 2) for kind in kinds}


def _busy_cpu_s() -> float:
    """CPU seconds that this machine has spent on anything."""
    user, nice, system, _, _, *interrupts = map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:8])
    return (user + nice + system + sum(interrupts)) / _TICKS


def _own_cpu_s() -> float:
    """CPU seconds of this process and of its children that run."""
    total_s = time.process_time()
    for child in multiprocessing.active_children():
        fields = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
        total_s += (int(fields[11]) + int(fields[12])) / _TICKS
    return total_s


def compare(work: Path, shared: Path, *, num_rounds: int, num_steps: int, extras: bool) -> dict[str, Any]:
    """The runs in turn, over photographs of 0.8 megapixels at a web's quality; `shared` lies in memory.

    Blocks of 4 MiB are what a set of a usual size has. Of those, 64 lanes open 256 MB at once, nothing for an epoch of
    half an hour and half of this one; so there are 16 lanes.
    """
    num_batches = num_steps + (16 if num_steps > 16 else 6)
    folder = make_data(work, BATCH_SIZE * num_batches, "4MiB", height=768, width=1024, quality=60)
    near = shutil.copytree(folder, shared / "set")
    batch_bytes = sum(file.stat().st_size for file in near.glob("*.tar")) / num_batches
    kept = partial(train, str(near), shared / "kept", step_s=0, extra=_LANES)
    kept(num_steps=num_steps)
    # From CPU seconds, not from time: what else the machine does just now must not make the steps longer.
    batch_s = kept(num_steps=min(24, num_steps))["cpu_s"][0] / min(24, num_steps) / len(os.sched_getaffinity(0))
    runs = Runs(round(_CPU_SHARE * batch_s, 3), num_steps, work)
    for number in range(num_rounds):
        names = ["lake", "memory", "beside"] if extras else ["lake", "memory"]
        for name in names if number % 2 == 0 else reversed(names):
            if name == "memory":
                runs.epoch("memory", str(near))
                continue
            with lake(folder) as server:
                if name == "lake":
                    runs.epoch("lake", server.url)
                    continue
                with reader(server.url, near, batch_bytes / batch_s):
                    runs.epoch("beside", str(near))
        if extras and number % _NEAR_EVERY == 0:
            runs.epoch("near", str(near), shared / "kept")
    return {"link_use": round(batch_bytes / batch_s / RATE, 2), **runs.figures()}


def main() -> int:
    """Prints one JSON object; interrupted, it takes what it made away and ends as signals end a process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=96)
    args = parser.parse_args()
    rounds, steps = (1, 6) if args.quick else (args.rounds, args.steps)
    stopping = Stopping(ends_process=True)
    try:
        with (
            stopping,
            tempfile.TemporaryDirectory() as work,
            tempfile.TemporaryDirectory(dir="/dev/shm", prefix=f"overlap-{os.getpid()}-") as shared,
        ):
            found = compare(Path(work), Path(shared), num_rounds=rounds, num_steps=steps, extras=not args.quick)
    except KeyboardInterrupt:
        return 128 + (stopping.number or 2)
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
