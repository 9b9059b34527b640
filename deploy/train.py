"""A whole training job, to start from: one process per GPU, DistributedDataParallel, checkpoints, exact resume.

    torchrun --standalone --nproc-per-node=8 train.py --out runs/one data.url=s3://bucket/set loader.batch_size=256

`key=value` words are what `dalipipe.load` takes (`dalipipe bench --cfg job` prints them all). Kill it at any moment and
start it again, with another number of processes too: it goes on after the last checkpoint, with the same batches. The
world is the launcher's; `--out` must be a folder that all nodes see.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import dalipipe as dp


def main(argv: list[str] | None = None) -> int:
    """Trains `--epochs` epochs and prints one line every `--log-every` steps, on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint, seen by all nodes")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--log-every", type=int, default=20, help="steps between lines")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        with dp.load("train", args.overrides) as loader:
            train(loader, args)
    finally:
        dist.destroy_process_group()
    return 0


def train(loader: dp.Loader, args: argparse.Namespace) -> None:
    """The loop: from the last checkpoint, or from the start."""
    if loader.device.type == "cuda":
        torch.cuda.set_device(loader.device)
    torch.manual_seed(0)
    net = build_net(len(loader.manifest.classes)).to(loader.device)
    optimiser = torch.optim.AdamW(net.parameters(), lr=args.learning_rate)
    step = restore(args.out / "checkpoint.pt", net, optimiser, loader)
    model = DistributedDataParallel(net, device_ids=[loader.device.index] if loader.device.type == "cuda" else None)
    while loader.epoch < args.epochs:
        for batch in loader:
            loss = F.cross_entropy(model(batch["image"]), batch["label"])
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            optimiser.step()
            step += 1
            if dist.get_rank() == 0 and step % args.log_every == 0:
                print(f"epoch {loader.epoch} step {step} loss {loss.item():.3f}", flush=True)
            if step % args.save_every == 0:
                save(args.out / "checkpoint.pt", net, optimiser, loader, step)
        save(args.out / "checkpoint.pt", net, optimiser, loader, step)
    if dist.get_rank() == 0:
        print(f"done: {step} steps, {loader.stats()['quarantined']} bad images replaced on this rank", flush=True)


def build_net(num_classes: int) -> nn.Sequential:
    """Put your model here: images float32 [B, 3, H, W] to logits [B, num_classes]."""
    layers: list[nn.Module] = []
    channels = 3
    for width in (16, 32, 64):
        layers += [nn.Conv2d(channels, width, 3, stride=2, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes))


def restore(path: Path, net: nn.Module, optimiser: torch.optim.Optimizer, loader: dp.Loader) -> int:
    """Loads the checkpoint where there is one; returns the steps that were done."""
    if not path.is_file():
        return 0
    saved: dict[str, Any] = torch.load(path, map_location=loader.device, weights_only=True)
    net.load_state_dict(saved["net"])
    optimiser.load_state_dict(saved["optimiser"])
    loader.load_state_dict(saved["loader"])
    if dist.get_rank() == 0:
        print(f"goes on after step {saved['step']}", flush=True)
    return int(saved["step"])


def save(path: Path, net: nn.Module, optimiser: torch.optim.Optimizer, loader: dp.Loader, step: int) -> None:
    """Rank 0 writes the checkpoint; it appears under its name when it is whole."""
    if dist.get_rank() != 0:
        return
    state = {
        "net": net.state_dict(),
        "optimiser": optimiser.state_dict(),
        "loader": loader.state_dict(),
        "step": step,
    }
    temporary = path.with_suffix(".part")
    torch.save(state, temporary)
    with temporary.open("rb") as written:
        os.fsync(written.fileno())
    temporary.replace(path)


if __name__ == "__main__":
    sys.exit(main())
