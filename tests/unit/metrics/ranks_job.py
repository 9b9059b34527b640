"""One rank of a training job over gloo, to be started by torchrun:

    torchrun --nproc-per-node 4 tests/unit/metrics/ranks_job.py URL FOLDER NUM_STEPS SLOW_RANK [PORT]

Each rank trains a small net; `SLOW_RANK` (-1: none) takes 60 ms longer in each forward pass.
"""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist

import dalipipe as dp


def main(url: str, folder: str, num_steps: int, slow_rank: int, port: int = 0) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 64), torch.nn.Linear(64, 3))
    optimiser = torch.optim.SGD(net.parameters(), lr=1e-3)
    words = [f"data.url={url}", f"cache.dir={folder}/cache", f"run_dir={folder}/run", f"metrics.port={port}"]
    words += ["metrics.every_s=0.5", "graph.size=32", "device=cpu", "loader.batch_size=4", "cost.gpu_hour=3"]
    done = 0
    with dp.load("train", words) as loader:
        while done < num_steps:
            for batch in loader:
                with dp.step("forward"):
                    loss = torch.nn.functional.cross_entropy(net(batch["image"]), batch["label"])
                    time.sleep(0.02 + 0.06 * (dist.get_rank() == slow_rank))
                with dp.step("backward"):
                    optimiser.zero_grad()
                    loss.backward()
                    time.sleep(0.03)
                with dp.step("collective"):
                    for parameter in net.parameters():
                        dist.all_reduce(parameter.grad)
                with dp.step("optimiser"):
                    optimiser.step()
                done += 1
                if done == num_steps:
                    break
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), int((sys.argv[5:] or ["0"])[0]))
