"""The tiny net of the demo and its training step."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import nn
from torch.nn import functional as F


class Phases(Protocol):
    """Something that charges a block of code to a named row, such as the step ledger."""

    def phase(self, name: str) -> AbstractContextManager[None]: ...


class Trainer:
    """A three-layer convolutional net with its optimiser."""

    def __init__(self, num_classes: int, device: torch.device, seed: int) -> None:
        torch.manual_seed(seed)
        if device.type == "cpu":
            # Decoding runs on the same cores: a second OpenMP thread would spend its time spinning at barriers.
            torch.set_num_threads(1)
        layers: list[nn.Module] = []
        channels = 3
        for width in (16, 32, 64):
            layers += [nn.Conv2d(channels, width, 3, stride=2, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
            channels = width
        self.net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes))
        self.net.to(device)
        self.optimiser = torch.optim.AdamW(self.net.parameters(), lr=3e-3)

    def step(self, batch: Mapping[str, torch.Tensor], phases: Phases) -> torch.Tensor:
        """One training step on `image` (float32 [B,3,H,W]) and `label` (int64 [B]); returns the loss, a scalar."""
        with phases.phase("forward"):
            loss = F.cross_entropy(self.net(batch["image"]), batch["label"])
        with phases.phase("backward"):
            self.optimiser.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
        with phases.phase("optimiser"):
            self.optimiser.step()
        return loss.detach()
