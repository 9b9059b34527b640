"""Which graph configurations can work at all."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence

from dalipipe.errors import ConfigError, DependencyError
from dalipipe.graphs.augment import MAX_MAGNITUDE, OPERATORS
from dalipipe.graphs.config import GraphConfig, QuarantineConfig
from dalipipe.graphs.custom import is_custom
from dalipipe.graphs.fields import JSON_DTYPES
from dalipipe.graphs.image import GRAPHS, check_custom

_CHOICES = {
    "name": tuple(GRAPHS),
    "labels": ("single", "multi_hot"),
    "jpeg_scale": ("off", "auto"),
    "dtype": ("float32", "float16", "uint8"),
    "layout": ("NCHW", "NHWC"),
    "resize_kernel": ("auto", "native", "torch"),
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
        value = getattr(graph, key)
        if value not in valid and not (key == "name" and is_custom(value)):
            hint = ", or the dotted path of a function of yours" if key == "name" else ""
            raise ConfigError(f"graph.{key}={value!r} is not one of {', '.join(valid)}{hint}")
    _check_fields(graph, fields)
    _check_augmentation(graph)
    policies = ("substitute", "drop", "raise")
    _require(quarantine.policy in policies, "quarantine.policy", quarantine.policy, "substitute, drop or raise")
    _require(0 <= quarantine.max_fraction <= 1, "quarantine.max_fraction", quarantine.max_fraction, "in [0, 1]")
    _require(quarantine.max_pixels >= 1, "quarantine.max_pixels", quarantine.max_pixels, "at least 1")
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
    if is_custom(graph.name):
        check_custom(graph, "cpu")


def check_kept(graph: GraphConfig, device: str) -> None:
    """Refuses decoded samples in memory where no graph would take them.

    Raises:
        ConfigError: says which key stands against it.
    """
    key, valid = "cache.tiers.memory.decoded", ("image_train", "image_eval", "multimodal")
    if device_number(device) is not None:
        raise ConfigError(f"{key} is for device=cpu, not {device}: there the card decodes; set it to 0")
    if graph.name not in valid:
        raise ConfigError(f"{key} is for graph.name={', '.join(valid)}, not {graph.name}")
    if graph.jpeg_scale != "off":
        raise ConfigError(f"{key} keeps whole images: give it with graph.jpeg_scale=off, not {graph.jpeg_scale}")


def _check_fields(graph: GraphConfig, fields: Sequence[str]) -> None:
    _require("image" in fields, "data.fields", list(fields), f"with 'image' in it for graph={graph.name}")
    _require("id" not in fields, "data.fields", list(fields), "without 'id': it always comes along")
    if graph.name == "multimodal":
        beside = set(fields) - {"image", "label"}
        _require(bool(beside), "data.fields", list(fields), "with text or json in it for graph=multimodal")
    if graph.labels == "multi_hot":
        _require(graph.num_classes >= 1, "graph.num_classes", graph.num_classes, "at least 1 for labels=multi_hot")
    for path, dtype in graph.json_fields.items():
        _require(dtype in JSON_DTYPES, f"graph.json_fields[{path!r}]", dtype, " or ".join(JSON_DTYPES))
        _require(path not in (*fields, "id", "valid"), "graph.json_fields", path, "a name that the batch does not have")
    if graph.json_fields:
        _require("json" in fields, "data.fields", list(fields), "with 'json' in it for graph.json_fields")


def _check_augmentation(graph: GraphConfig) -> None:
    jitter, rand = graph.jitter, graph.rand_augment
    for key in ("brightness", "contrast", "saturation"):
        _require(getattr(jitter, key) >= 0, f"graph.jitter.{key}", getattr(jitter, key), "at least 0")
    _require(0 <= jitter.hue <= 0.5, "graph.jitter.hue", jitter.hue, "in [0, 0.5]")
    for key in ("probability", "grayscale"):
        _require(0 <= getattr(jitter, key) <= 1, f"graph.jitter.{key}", getattr(jitter, key), "in [0, 1]")
    unknown = sorted(set(rand.exclude) - set(OPERATORS))
    _require(not unknown, "graph.rand_augment.exclude", unknown, f"of {', '.join(OPERATORS)}")
    num_left = len(set(OPERATORS) - set(rand.exclude))
    _require(0 <= rand.num_ops <= num_left, "graph.rand_augment.num_ops", rand.num_ops, f"in [0, {num_left}]")
    _require(
        0 <= rand.magnitude <= MAX_MAGNITUDE,
        "graph.rand_augment.magnitude",
        rand.magnitude,
        f"in [0, {MAX_MAGNITUDE:g}]",
    )
    if graph.name in ("image_eval", "image_raw") or is_custom(graph.name):
        _require(
            not (jitter.is_on or rand.is_on),
            "graph.jitter, graph.rand_augment",
            (jitter, rand),
            f"off for {graph.name}",
        )
    _require(graph.num_draws >= 1, "graph.num_draws", graph.num_draws, "at least 1")


def _require(holds: bool, key: str, value: object, valid: str) -> None:
    if not holds:
        raise ConfigError(f"{key}={value!r} must be {valid}")


def _is_range(pair: Sequence[float]) -> bool:
    return len(pair) == 2 and 0 < pair[0] <= pair[1]
