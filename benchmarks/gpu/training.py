"""Does it keep a real training step busy? ResNet-50 on the whole pipeline, against its own spin floor."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn import functional as F

import dalipipe as dp
from benchmarks.gpu.kit import Kit, synchronise
from benchmarks.gpu.resnet import resnet
from dalipipe.packing.config import PackConfig
from dalipipe.packing.run import pack
from dalipipe.storage.store import StorageConfig

Result = dict[str, Any]
_COPIES = 8  # of each image in the packed set, so that making images does not eat the time on the card
_SPIN_BATCHES = 4
_SETTLE_STEPS = 4
_NUM_CLASSES = 8


def training(kit: Kit) -> Result:
    """Packs the images, trains on them in bfloat16, and compares the steps of the warm epochs with the same steps on
    batches held in memory. AU = floor / fed, from rounds that alternate."""
    copies, steps, size = (_COPIES, 30, 224) if not kit.quick else (2, 3, 32)
    _pack(kit, copies)
    overrides = [
        f"data.url={kit.scratch / 'packed'}",
        f"cache.dir={kit.scratch / 'cache'}",
        f"loader.batch_size={kit.batch_size}",
        f"graph.size={size}",
        f"graph.num_threads={kit.threads}",
        "graph.layout=NHWC",
        f"device={kit.device}",
    ]
    with dp.load("train", overrides) as loader:
        step = _step(kit)
        batches = _endless(loader)
        began = time.perf_counter()
        step(next(batches))
        synchronise(kit)
        first_s = time.perf_counter() - began
        cold = _seconds(kit, step, itertools.islice(batches, min(steps, len(loader) - 1)))
        for batch in itertools.islice(batches, len(loader)):  # the whole set is on the node afterwards
            step(batch)
        held = [
            {name: value.clone() for name, value in batch.items()} for batch in itertools.islice(batches, _SPIN_BATCHES)
        ]
        fed, floor = [], []
        for _ in range(3):
            for batch in itertools.islice(batches, _SETTLE_STEPS):  # the pipeline starts anew after each rest
                step(batch)
            fed.append(_seconds(kit, step, itertools.islice(batches, steps)))
            loader.rest()
            floor.append(_seconds(kit, step, itertools.islice(itertools.cycle(held), steps)))
        stats = loader.stats()
    au = sorted(a / b for a, b in zip(floor, fed, strict=True))[1]
    # Without a card, or with a net of a few layers, the figures say that the lines run and nothing more.
    verdict = (
        {"ok": True} if kit.on_gpu and not kit.quick else {"ok": None, "why": "a dry run: AU is not that of a card"}
    )
    return {
        **verdict,
        "batch_size": kit.batch_size,
        "steps_a_round": steps,
        "first_step_s": round(first_s, 3),
        "cold_step_ms": round(1e3 * cold, 2),
        "fed_step_ms": round(1e3 * min(fed), 2),
        "floor_step_ms": round(1e3 * min(floor), 2),
        "au": round(au, 4),
        "au_rounds": [round(a / b, 4) for a, b in zip(floor, fed, strict=True)],
        "images_per_s": round(kit.batch_size / min(fed)),
        "lake_bytes": stats["bytes_read"]["lake"],
        "quarantined": stats["quarantined"],
    }


def _pack(kit: Kit, copies: int) -> None:
    lake = kit.scratch / "lake"
    for number, (copy, image) in enumerate(itertools.product(range(copies), kit.images)):
        folder = lake / f"class_{number % _NUM_CLASSES}"
        folder.mkdir(parents=True, exist_ok=True)
        # Bytes after the end marker are legal and make each copy a file of its own.
        (folder / f"{number:06d}.jpg").write_bytes(image + b"%d" % copy)
    pack(
        str(lake),
        str(kit.scratch / "packed"),
        PackConfig(shard_bytes="64MiB", workers=1),
        StorageConfig(),
    )


def _step(kit: Kit) -> Callable[[Any], None]:
    torch.manual_seed(0)
    depths, width = ((1, 1, 1, 1), 8) if kit.quick else ((3, 4, 6, 3), 64)
    net = resnet(_NUM_CLASSES, depths, width).to(kit.device)
    net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimiser = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)

    def step(batch: Any) -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=kit.on_gpu):
            loss = F.cross_entropy(net(batch["image"]), batch["label"])
        optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()

    return step


def _endless(loader: dp.Loader) -> Any:
    while True:
        yield from loader


def _seconds(kit: Kit, step: Callable[[Any], None], batches: Iterable[Any]) -> float:
    """Seconds a step, from a synchronised start to a synchronised end."""
    synchronise(kit)
    began, count = time.perf_counter(), 0
    for batch in batches:
        step(batch)
        count += 1
    synchronise(kit)
    return (time.perf_counter() - began) / count
