"""A trainer as torchrun starts it: reads batches in lock-step and writes down what it got.

    torchrun … tests/support/train_job.py DATA CACHE STATE LOGS STEP_S [override …]

Each rank appends a line `epoch step id id …` for every batch to its own file in LOGS before the ranks meet.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import dalipipe as dp


def main() -> None:
    data, cache, state, logs, step_s, *overrides = sys.argv[1:]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    log = os.open(Path(logs, f"{rank}-of-{dist.get_world_size()}.txt"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    options = [f"data.url={data}", f"cache.dir={cache}", f"state.url={state}", "graph.size=16", "prefetch.threads=2"]
    with dp.load("train", [*options, *overrides]) as loader:
        epoch = loader.epoch
        for step, batch in enumerate(loader, loader.state_dict()["step"]):
            ids = " ".join(map(str, batch["id"].tolist()))
            os.write(log, f"{epoch} {step} {ids}\n".encode())
            dist.all_reduce(torch.ones(1))  # stands for the gradients: nobody is a step ahead
            time.sleep(float(step_s))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
