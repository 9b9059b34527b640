"""What happens to a sample between its bytes and the batch (`graph.*`, `quarantine.*`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dalipipe.graphs.augment import JitterConfig, RandAugmentConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphConfig:
    """`graph.*`; the group `graph=` chooses a preset."""

    name: str = "image_train"
    """`image_train` (random resized crop, flip, optional colour), `image_eval` (short side to `resize_shorter`, centre
    crop), `image_raw` (decoded images, a list of uint8 HWC tensors), `multimodal` (as `image_train`, with text or JSON
    beside the image), or the dotted path of a graph of your own (`package.module.function`, see docs/graphs.md)."""
    args: dict[str, Any] = field(default_factory=dict)
    """Your own graph: what it reads as `graph.args`."""
    num_draws: int = 32
    """Your own graph: uniform numbers a sample."""
    size: int = 224
    """Height and width of the output image in pixels."""
    resize_shorter: int = 256
    """`image_eval`: the short side before the centre crop, in pixels."""
    scale: list[float] = field(default_factory=lambda: [0.08, 1.0])
    """`image_train`: range of the crop's area as a share of the image."""
    ratio: list[float] = field(default_factory=lambda: [0.75, 4 / 3])
    """`image_train`: range of the crop's aspect ratio (width / height), drawn log-uniformly."""
    flip: float = 0.5
    """`image_train`: probability of a horizontal flip."""
    mean: list[float] = field(default_factory=lambda: [123.675, 116.28, 103.53])
    """Per channel, in units of 0..255."""
    std: list[float] = field(default_factory=lambda: [58.395, 57.12, 57.375])
    jitter: JitterConfig = field(default_factory=JitterConfig)
    rand_augment: RandAugmentConfig = field(default_factory=RandAugmentConfig)
    jpeg_scale: str = "off"
    """CPU: `auto` decodes a JPEG at 1/2, 1/4 or 1/8 of its size where what is cut out of it still has twice the pixels
    that the output needs, in both directions. Pays for large sources; pixels differ from the full decode by as much
    as two resize filters differ. `off`: never."""
    labels: str = "single"
    """`single`: one integer, int64 [b]. `multi_hot`: any number of integers, float32 [b, num_classes] of 0 and 1."""
    num_classes: int = 0
    """`labels=multi_hot`: columns of `label`."""
    json_fields: dict[str, str] = field(default_factory=dict)
    """Numbers out of the `json` field: dotted path ▸ `int64`, `float32` or `bool`. Each becomes a tensor of that name,
    [b], or [b, …] where the path leads to lists of equal shape in every sample."""
    dtype: str = "float32"
    """`float32`, `float16` (normalised) or `uint8` (not normalised)."""
    layout: str = "NCHW"
    """`NCHW`, or `NHWC` in memory with the same [B, C, H, W] shape (torch's channels_last)."""
    resize_kernel: str = "auto"
    """CPU: `native` (compiled when the package was installed), `torch` (more CPU time; within one level of it), or
    `auto`: native where it is there."""
    num_threads: int = 0
    """Decode threads; 0 = the CPUs this process may use, divided by the ranks of the node."""
    hw_decoder_load: float = 0.65
    """GPU: share of JPEGs that goes to the hardware decoder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantineConfig:
    """`quarantine.*`: what happens to samples that cannot be decoded."""

    policy: str = "substitute"
    """`substitute` (the next good sample of the block takes its place), `drop` (the batch is shorter) or `raise`."""
    max_fraction: float = 0.001
    """The run stops when more than this share of the delivered samples was bad (at least one is always allowed)."""
    max_pixels: int = 2**28
    """Images with more pixels are bad: a decompression bomb must not take the host's memory."""
