"""Which graph configurations can work at all."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence

from dalipipe.errors import ConfigError, DependencyError
from dalipipe.graphs.config import GraphConfig, QuarantineConfig
from dalipipe.graphs.image import GRAPHS

_CHOICES = {
    "name": tuple(GRAPHS),
    "dtype": ("float32", "float16", "uint8"),
    "layout": ("NCHW", "NHWC"),
}


def device_number(device: str) -> int | None:
    """N of `cuda:N`, None for `cpu`.

    Raises:
        ConfigError: neither of the two.
    """
    if device == "cpu":
        return None
    match = re.fullmatch(r"cuda:([0-9]+)", device)
    if match is None:
        raise ConfigError(f"device={device!r} is not one of 'cpu', 'cuda:0', 'cuda:1', …")
    return int(match[1])


def check_config(graph: GraphConfig, quarantine: QuarantineConfig, fields: Sequence[str], queue_depth: int) -> None:
    """Refuses what can never work.

    Raises:
        ConfigError: names the key, the value and the valid ones.
        DependencyError: DALI is not installed.
    """
    for key, valid in _CHOICES.items():
        if getattr(graph, key) not in valid:
            raise ConfigError(f"graph.{key}={getattr(graph, key)!r} is not one of {', '.join(valid)}")
    _require(
        quarantine.policy in ("substitute", "raise"), "quarantine.policy", quarantine.policy, "substitute or raise"
    )
    _require(0 <= quarantine.max_fraction <= 1, "quarantine.max_fraction", quarantine.max_fraction, "in [0, 1]")
    _require(quarantine.max_pixels >= 1, "quarantine.max_pixels", quarantine.max_pixels, "at least 1")
    _require("image" in fields, "data.fields", list(fields), f"with 'image' in it for graph={graph.name}")
    _require("id" not in fields, "data.fields", list(fields), "without 'id': it always comes along")
    _require(isinstance(queue_depth, int) and queue_depth >= 1, "prefetch.queue_depth", queue_depth, "an integer >= 1")
    _require(graph.size >= 1, "graph.size", graph.size, "at least 1 pixel")
    _require(graph.num_threads >= 0, "graph.num_threads", graph.num_threads, "at least 0 (0 = all CPUs)")
    _require(0 <= graph.flip <= 1, "graph.flip", graph.flip, "in [0, 1]")
    _require(0 <= graph.hw_decoder_load <= 1, "graph.hw_decoder_load", graph.hw_decoder_load, "in [0, 1]")
    _require(_is_range(graph.scale) and graph.scale[1] <= 1, "graph.scale", graph.scale, "[low, high] in (0, 1]")
    _require(_is_range(graph.ratio), "graph.ratio", graph.ratio, "[low, high], both positive")
    _require(
        len(graph.mean) == 3 and len(graph.std) == 3, "graph.mean, graph.std", (graph.mean, graph.std), "3 numbers"
    )
    _require(min(graph.std) > 0, "graph.std", graph.std, "positive")
    if graph.name == "image_eval":
        _require(
            graph.resize_shorter >= graph.size, "graph.resize_shorter", graph.resize_shorter,
            f"at least graph.size={graph.size}",
        )  # fmt: skip
    if importlib.util.find_spec("nvidia") is None or importlib.util.find_spec("nvidia.dali") is None:
        raise DependencyError("NVIDIA DALI is not installed; pip install 'dalipipe[cpu]', [cuda12] or [cuda13]")


def _require(holds: bool, key: str, value: object, valid: str) -> None:
    if not holds:
        raise ConfigError(f"{key}={value!r} must be {valid}")


def _is_range(pair: Sequence[float]) -> bool:
    return len(pair) == 2 and 0 < pair[0] <= pair[1]
