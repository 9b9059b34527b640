"""Do download and decode overlap where the CPU is the bound?

    python benchmarks/overlap.py [--quick] [--rounds N] [--steps N]

T1 training (crop, flip, normalise; batches of 64) at a step of nine tenths of the CPU time of its batch, so that the
CPU can just not feed it, from a lake behind a link (30 ms, 100 MB/s) that carries more than that. AU (accelerator
utilisation) is time in steps / wall time after the first step, in epoch 1 and with an empty cache unless said:

    lake    the data set behind the link.
    memory  the same run, its files in a memory file system.
    beside  as memory, while another process reads the lake at the same rate and throws it away: what the emulated lake
            itself costs this machine, and a real one would not.
    near    (once) every block lies mapped in the node's cache, as in epoch 2: nothing is read, checked or kept.

The runs take turns. Where others use the machine, time says little; so CPU milliseconds a step are given as well, the
AU that they allow (`au_by_cpu`: all cores to itself, nothing waited for), and how many cores others used.
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
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.lake import BATCH_SIZE, make_data, train
from tests.support.emulation import RATE, lake, reader

_CPU_SHARE = 0.9
_LANES = ("shuffle.lanes=16",)
_TICKS = os.sysconf("SC_CLK_TCK")


class Runs:
    """What was measured, by the name of the run."""

    def __init__(self, step_s: float, num_steps: int, work: Path) -> None:
        self._step_s = step_s
        self._num_steps = num_steps
        self._work = work
        self.au: dict[str, list[float]] = {name: [] for name in ("lake", "memory", "beside", "near")}
        self.cpu_ms: dict[str, list[float]] = {name: [] for name in self.au}
        self.others: dict[str, list[float]] = {name: [] for name in self.au}
        self.lake_wait_s: list[float] = []

    def epoch(self, name: str, url: str, cache: Path | None = None) -> None:
        """An epoch 1; with no cache given, one that is empty."""
        busy_s, began_s, own_s = _busy_cpu_s(), time.perf_counter(), _own_cpu_s()
        with tempfile.TemporaryDirectory(dir=self._work) as empty:
            found = train(url, cache or Path(empty), step_s=self._step_s, num_steps=self._num_steps, extra=_LANES)
        others_s = _busy_cpu_s() - busy_s - (_own_cpu_s() - own_s)
        self.others[name].append(others_s / (time.perf_counter() - began_s))
        self.au[name].append(found["au"][0])
        self.cpu_ms[name].append(1000 * found["cpu_s"][0] / self._num_steps)
        if name == "lake":
            self.lake_wait_s.append(found["stats"]["wait_by_s"]["lake"])
        print(
            f"{name}: AU {self.au[name][-1]}, CPU {self.cpu_ms[name][-1]:.0f} ms a step; others used "
            f"{self.others[name][-1]:.2f} cores",
            file=sys.stderr,
        )

    def figures(self) -> dict[str, Any]:
        """Medians, and by how many points of AU the lake is behind."""
        cores = len(os.sched_getaffinity(0))
        by_cpu = {
            name: [min(1.0, 1000 * self._step_s * cores / cpu_ms) for cpu_ms in found]
            for name, found in self.cpu_ms.items()
        }
        return {
            "step_s": self._step_s,
            "steps": self._num_steps,
            "au": _medians(self.au, 3),
            "au_by_cpu": _medians(by_cpu, 3),
            "cpu_ms_a_step": _medians(self.cpu_ms, 1),
            "cores_that_others_used": _medians(self.others, 2),
            "lake_wait_s": round(statistics.median(self.lake_wait_s), 2),
            "points_behind_memory": _behind(self.au["memory"], self.au["lake"]),
            "points_of_the_emulated_lake_itself": _behind(self.au["memory"], self.au["beside"]),
            "points_behind_memory_by_cpu": _behind(by_cpu["memory"], by_cpu["lake"]),
            "points_behind_near_by_cpu": _behind(by_cpu["near"], by_cpu["lake"]),
            "au_by_round": {name: [round(au, 3) for au in found] for name, found in self.au.items()},
        }


def _medians(values: dict[str, list[float]], digits: int) -> dict[str, float]:
    return {name: round(statistics.median(found), digits) for name, found in values.items()}


def _behind(first: list[float], second: list[float]) -> float:
    return round(statistics.median(100 * (x - y) for x, y in zip(first, second, strict=False)), 1)


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


def compare(work: Path, *, num_rounds: int, num_steps: int) -> dict[str, Any]:
    """The runs in turn, over photographs of 0.8 megapixels at a web's quality.

    Blocks of 4 MiB are what a set of a usual size has. Of those, 64 lanes open 256 MB at once, nothing for an epoch of
    half an hour and half of this one; so there are 16 lanes.
    """
    num_batches = num_steps + 16
    folder = make_data(work, BATCH_SIZE * num_batches, "4MiB", height=768, width=1024, quality=60)
    shared = Path(tempfile.mkdtemp(dir="/dev/shm"))
    try:
        near = shutil.copytree(folder, shared / "set")
        batch_bytes = sum(file.stat().st_size for file in near.glob("*.tar")) / num_batches
        kept = partial(train, str(near), shared / "kept", step_s=0, extra=_LANES)
        kept(num_steps=num_steps)
        # From CPU seconds, not from time: what else the machine does just now must not make the steps longer.
        batch_s = kept(num_steps=min(24, num_steps))["cpu_s"][0] / min(24, num_steps) / len(os.sched_getaffinity(0))
        runs = Runs(round(_CPU_SHARE * batch_s, 3), num_steps, work)
        for number in range(num_rounds):
            with lake(folder) as server:
                runs.epoch("lake", server.url)
            runs.epoch("memory", str(near))
            with lake(folder) as server, reader(server.url, near, batch_bytes / batch_s):
                runs.epoch("beside", str(near))
            if number == 0:
                runs.epoch("near", str(near), shared / "kept")
    finally:
        shutil.rmtree(shared)
    return {"link_use": round(batch_bytes / batch_s / RATE, 2), **runs.figures()}


def main() -> None:
    """Prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=160)
    args = parser.parse_args()
    rounds, steps = (1, 6) if args.quick else (args.rounds, args.steps)
    with tempfile.TemporaryDirectory() as root:
        print(json.dumps(compare(Path(root), num_rounds=rounds, num_steps=steps)))


if __name__ == "__main__":
    main()
