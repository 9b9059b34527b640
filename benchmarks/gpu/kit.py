"""What the sections of the kit share: the device, images to decode, and a deadline."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dalipipe.graphs.config import GraphConfig, QuarantineConfig
from dalipipe.graphs.contract import BatchSource
from dalipipe.graphs.device.tier import DeviceTier
from dalipipe.graphs.source import open_source
from dalipipe.telemetry import Recorder
from tests.support.images import jpeg_bytes
from tests.unit.graphs.steps import MemoryPrefetcher


@dataclass(frozen=True, slots=True, kw_only=True)
class Kit:
    """device: `cuda:N` or `cpu`. images: JPEGs of about 500 x 375 pixels, each of its own size and content."""

    device: str
    out: Path
    scratch: Path
    """A folder on a fast disk, empty."""
    images: list[bytes]
    threads: int
    """CPUs that this process may use."""
    batch_size: int
    seconds: float
    """How long one figure is measured."""
    quick: bool
    deadline: float = field(default=float("inf"))

    @property
    def on_gpu(self) -> bool:
        """Whether there is a card; without one the same lines run on DALI's CPU operators."""
        return self.device != "cpu"

    @property
    def device_id(self) -> int | None:
        """N of `cuda:N`."""
        return int(self.device.split(":")[1]) if self.on_gpu else None

    def left_s(self) -> float:
        """Seconds until the whole kit must be done."""
        return self.deadline - time.monotonic()


def make_images(count: int, threads: int) -> list[bytes]:
    """`count` textured JPEGs, quality 90, between 400 x 300 and 600 x 450 pixels."""

    def one(number: int) -> bytes:
        return jpeg_bytes(number, height=300 + 10 * (number % 16), width=400 + 13 * (number % 16))

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(one, range(count)))


@contextmanager
def source(
    kit: Kit,
    images: list[bytes],
    graph: GraphConfig,
    *,
    device: str | None = None,
    depth: int = 2,
    seed: int = 3,
    tier: DeviceTier | None = None,
) -> Iterator[BatchSource]:
    """The package's own source of batches over images in memory."""
    opened = open_source(
        MemoryPrefetcher(images, kit.batch_size),
        graph=graph,
        quarantine=QuarantineConfig(max_fraction=1.0),
        fields=["image", "label"],
        seed=seed,
        device=device or kit.device,
        queue_depth=depth,
        num_samples=len(images),
        run_dir=None,
        recorder=Recorder(),
        tier=tier,
    )
    try:
        yield opened
    finally:
        opened.close()


def synchronise(kit: Kit) -> None:
    """Waits for the card."""
    if kit.on_gpu:
        import torch

        torch.cuda.synchronize(kit.device)


def rate(kit: Kit, step: Any, *, seconds: float | None = None, warm: int = 4) -> float:
    """Images a second of `step()`, which returns how many it made, over about `seconds`."""
    for _ in range(warm):
        step()
    synchronise(kit)
    images, began = 0, time.perf_counter()
    while time.perf_counter() - began < (seconds or kit.seconds):
        images += step()
    synchronise(kit)
    return images / (time.perf_counter() - began)
