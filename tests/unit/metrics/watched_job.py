"""A training process that is watched, to be killed: `python -m tests.unit.metrics.watched_job URL CACHE RUN_DIR`."""

from __future__ import annotations

import sys
import time

import dalipipe as dp


def main(url: str, cache: str, run_dir: str) -> None:
    words = [f"data.url={url}", f"cache.dir={cache}", f"run_dir={run_dir}", "metrics.every_s=0.2"]
    with dp.load("train", [*words, "graph.size=32", "device=cpu", "loader.batch_size=8"]) as loader:
        while True:
            for _batch in loader:
                with dp.step("forward"):
                    time.sleep(0.005)


if __name__ == "__main__":
    main(*sys.argv[1:4])
