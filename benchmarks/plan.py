"""Does `dalipipe plan` tell what a job then does?

    python benchmarks/plan.py [--quick] [--only LAKE,LAKE] [--images N] [--step S]

A data set of JPEGs (about 110 kB each) behind a web server of this machine of known latency and rate. For each lake
`dalipipe bench` trains two epochs on it with an emulated step, from an empty cache that holds all; then the simulation
behind `dalipipe plan` predicts the same steps twice: from the figures of the lake and the step alone, and from what the
run itself wrote down (`plan.from`). Printed: AU (step time over wall time, without 4 steps of start) and, in points,
predicted less observed. The floor is a plan that knows nothing: AU 100 %.

Server, decoder and whatever else runs on the machine share its cores, which no plan knows.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.lake import make_data
from dalipipe.cache.config import CacheConfig, TierConfig, TiersConfig
from dalipipe.loader.config import LoaderConfig
from dalipipe.shards.manifest import Manifest
from dalipipe.simulate.config import PlanConfig
from dalipipe.simulate.job import Sample, simulate
from dalipipe.simulate.plan import Settings, make_job
from dalipipe.storage import StorageConfig, open_store
from tests.support.emulation import lake

BATCH_SIZE = 32
SAMPLE_BYTES = 110_000
WARM_UP_STEPS = 4
# What the lake gives over what the job would read without waiting, and its latency.
LAKES = {
    "ample": (3.0, 0.03),
    "just enough": (1.1, 0.03),
    "far away": (3.0, 1.0),
    "too little": (0.6, 0.03),
}


def dalipipe(*words: str) -> dict[str, Any]:
    """One verb's JSON."""
    command = [sys.executable, "-m", "dalipipe", *words, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def one_lake(folder: Path, work: Path, *, step_s: float, share: float, latency_s: float) -> dict[str, Any]:
    """Observed and predicted AU with one lake."""
    rate = share * BATCH_SIZE * SAMPLE_BYTES / step_s
    run = work / "run"
    with lake(folder, latency_s=latency_s, rate=rate) as server:
        observed = dalipipe(
            "bench",
            server.url,
            f"cache.dir={work / 'cache'}",
            f"run_dir={run}",
            f"loader.batch_size={BATCH_SIZE}",
            f"bench.step_s={step_s}",
            "bench.epochs=2",
            f"bench.warmup_steps={WARM_UP_STEPS}",
            "graph.size=64",
            "device=cpu",
        )["au"]
    from_figures = from_figures_au(folder, step_s=step_s, rate=rate, latency_s=latency_s)
    calibrated = dalipipe("plan", f"plan.from={run}")["calibration"]
    return {
        "observed_au": round(observed, 3),
        "from_figures_au": round(from_figures, 3),
        "from_figures_points": round(100 * (from_figures - observed), 1),
        "ledger_au": round(calibrated["observed_au"], 3),
        "from_run_au": round(calibrated["predicted_au"], 3),
        "from_run_points": round(calibrated["difference_points"], 1),
        "floor_points": round(100 * (1 - observed), 1),
    }


def from_figures_au(folder: Path, *, step_s: float, rate: float, latency_s: float) -> float:
    """AU as predicted from the lake's figures, over the steps that `bench` measures."""
    store = open_store(str(folder), StorageConfig())
    try:
        shape = Manifest.open(store.read).shape
    finally:
        store.close()
    settings = Settings(
        plan=PlanConfig(
            step_s=step_s, latency_s=latency_s, latency_p99_s=latency_s, lake_bandwidth=rate, gpus_per_node=1
        ),
        cache=CacheConfig(tiers=TiersConfig(node=TierConfig(capacity="100GB"))),
        loader=LoaderConfig(batch_size=BATCH_SIZE),
    )
    job = make_job(settings, shape, 1)
    total = 2 * job.orders()(0).num_steps
    traces = simulate(job, sample=Sample(nodes=(0,), ranks_a_node=1), start=(0, 0), num_steps=total)
    wait_s = sum(step.wait_s for step in traces[WARM_UP_STEPS:])
    steps_s = step_s * (total - WARM_UP_STEPS)
    return steps_s / (steps_s + wait_s)


def main() -> None:
    """Prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one lake, for `make bench`")
    parser.add_argument("--only", default="", help=f"of the lakes: {', '.join(LAKES)}")
    parser.add_argument("--images", type=int, default=0, help="images of the data set (1536; quick: 384)")
    parser.add_argument("--step", type=float, default=0.0, help="seconds of the emulated step (0.2; quick: 0.1)")
    args = parser.parse_args()
    step_s = args.step or (0.1 if args.quick else 0.2)
    names = args.only.split(",") if args.only else ["too little"] if args.quick else list(LAKES)
    lakes = {name: LAKES[name] for name in names}
    found = {}
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        folder = make_data(root, args.images or (384 if args.quick else 1536))
        for lake_name, (share, latency_s) in lakes.items():
            work = root / lake_name.replace(" ", "-")
            work.mkdir()
            found[lake_name] = one_lake(folder, work, step_s=step_s, share=share, latency_s=latency_s)
            print(json.dumps({lake_name: found[lake_name]}), file=sys.stderr, flush=True)
    points = [abs(one[key]) for one in found.values() for key in ("from_figures_points", "from_run_points")]
    print(json.dumps({"lakes": found, "largest_difference_points": max(points)}, indent=2))


if __name__ == "__main__":
    main()
