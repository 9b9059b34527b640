"""ResNet-50 (He et al. 2015, stride in the 3x3 convolution as most implementations have it), since no package that
brings one is needed otherwise."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class Bottleneck(nn.Module):
    """1x1 down, 3x3, 1x1 up, and the shortcut."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out),
        )  # fmt: skip
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[b, channels, h, w] to [b, 4 * width, h / stride, w / stride]."""
        return F.relu(self.body(x) + self.shortcut(x), inplace=True)


def resnet(num_classes: int, depths: tuple[int, ...] = (3, 4, 6, 3), width: int = 64) -> nn.Sequential:
    """Images [b, 3, h, w] to logits [b, num_classes]; the defaults are ResNet-50, which has 25.6 million
    parameters at 1,000 classes."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 7, 2, 3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    channels = width
    for level, depth in enumerate(depths):
        wide = width << level
        for number in range(depth):
            layers.append(Bottleneck(channels, wide, 2 if level and number == 0 else 1))
            channels = 4 * wide
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes))
