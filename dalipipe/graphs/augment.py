"""Optional augmentation after the resize: colour jitter and RandAugment-style operators, one draw a sample.

What to do with each sample is computed here in numpy from its uniform numbers (`plan_strengths`) and fed to DALI
operators that take an argument per sample (`apply`), so that nothing depends on batch, rank or restarts. All operators
that are not chosen for a sample get the argument that changes nothing.

Sources: colour jitter as in Howard, "Some improvements on deep convolutional neural network based image classification"
(2013); random operators as in Cubuk et al., "RandAugment" (2019), in a fixed order (geometry, colour, solarize,
posterize) and without those that look at the whole image (autocontrast, equalize, sharpness).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from dalipipe.graphs.config import GraphConfig

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class JitterConfig:
    """`graph.jitter.*`: random colour; all off by default."""

    brightness: float = 0.0
    """The factor is uniform in [max(0, 1 - brightness), 1 + brightness]."""
    contrast: float = 0.0
    """As brightness, around mid-gray."""
    saturation: float = 0.0
    """As brightness, around the pixel's own gray."""
    hue: float = 0.0
    """Turns the hue by a share of the colour circle, uniform in [-hue, hue]; at most 0.5."""
    probability: float = 1.0
    """Share of the samples whose colour is jittered."""
    grayscale: float = 0.0
    """Share of the samples that lose their colour."""

    @property
    def is_on(self) -> bool:
        """Whether any sample can change."""
        moves = max(self.brightness, self.contrast, self.saturation, self.hue)
        return (moves > 0 and self.probability > 0) or self.grayscale > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RandAugmentConfig:
    """`graph.rand_augment.*`: `num_ops` different operators a sample, drawn from `OPERATORS`; 0 = off."""

    num_ops: int = 0
    magnitude: float = 9.0
    """Strength, 0 (nothing) to 30 (the largest)."""
    exclude: list[str] = field(default_factory=list)
    """Operators that are never drawn."""

    @property
    def is_on(self) -> bool:
        """Whether any sample can change."""
        return self.num_ops > 0


MAX_MAGNITUDE = 30.0
# Largest strengths, at magnitude 30.
_LARGEST = {
    "rotate": 30.0,  # degrees
    "shear_x": 0.3,
    "shear_y": 0.3,
    "translate_x": 150 / 331,  # share of the side
    "translate_y": 150 / 331,
    "brightness": 0.9,
    "contrast": 0.9,
    "saturation": 0.9,
    "solarize": 256.0,  # levels by which the threshold sinks
    "posterize": 4.0,  # bits that go
}
OPERATORS = ("identity", *_LARGEST)
"""What RandAugment draws from."""

_JITTER_DRAWS = 6
_RAND_DRAWS = 2 * len(OPERATORS)
NUM_DRAWS = _JITTER_DRAWS + _RAND_DRAWS
"""Uniform numbers that a sample consumes."""

# Inputs of the operators: name -> DALI type, dimensions.
_GEOMETRY = {"matrix": ("FLOAT", 2)}
_COLOUR = dict.fromkeys(("brightness", "contrast", "saturation", "hue"), ("FLOAT", 0))
_LEVELS = {"solarize": ("INT32", 0), "posterize": ("INT32", 0)}


def strength_inputs(graph: GraphConfig) -> dict[str, tuple[str, int]]:
    """The inputs that `apply` wants, in order: name -> (DALI type, dimensions of a sample). Empty when all is off."""
    if graph.name == "image_eval" or not (graph.jitter.is_on or graph.rand_augment.is_on):
        return {}
    return _GEOMETRY | _COLOUR | _LEVELS if graph.rand_augment.is_on else dict(_COLOUR)


def plan_strengths(graph: GraphConfig, draws: npt.NDArray[np.float32]) -> dict[str, npt.NDArray[Any]]:
    """The arguments of every operator for n samples, by the names of `strength_inputs`.

    draws: float32 [n, NUM_DRAWS] in [0, 1).

    Returns: matrix float32 [n, 2, 3] (output to input pixels), brightness, contrast, saturation (factors) and hue
    (degrees) float32 [n], solarize (levels from here on are turned over; 256 = none) and posterize (the bits to keep,
    as a mask) int32 [n].
    """
    wanted = strength_inputs(graph)
    if not wanted:
        return {}
    exact: Floats = draws.astype(np.float64)
    factors = _jitter(graph.jitter, exact[:, :_JITTER_DRAWS])
    picked = _pick(graph.rand_augment, exact[:, _JITTER_DRAWS:])
    for name in ("brightness", "contrast", "saturation"):
        factors[name] = factors[name] * (1 + picked[name])
    planned: dict[str, npt.NDArray[Any]] = {name: value.astype(np.float32) for name, value in factors.items()}
    planned["matrix"] = _matrix(picked, graph.size).astype(np.float32)
    planned["solarize"] = np.rint(256 - np.abs(picked["solarize"])).astype(np.int32)
    planned["posterize"] = (0xFF << np.rint(np.abs(picked["posterize"])).astype(np.int32)) & 0xFF
    return {name: planned[name] for name in wanted}


def apply(image: Any, strengths: dict[str, Any]) -> Any:
    """DALI operators over uint8 HWC images, on the backend where `image` is. strengths: CPU nodes by input name."""
    from nvidia.dali import fn, types

    if "matrix" in strengths:
        image = fn.warp_affine(
            image, matrix=strengths["matrix"], fill_value=128, interp_type=types.INTERP_LINEAR, inverse_map=True
        )
    if "hue" in strengths:
        image = fn.color_twist(image, **{name: strengths[name] for name in _COLOUR})
    if "solarize" in strengths:
        on_gpu = image.device == "gpu"
        threshold, mask = (strengths[name].gpu() if on_gpu else strengths[name] for name in ("solarize", "posterize"))
        turned = fn.cast(image >= threshold, dtype=types.UINT8) * types.Constant(255, types.UINT8)
        image = fn.cast(image ^ turned, dtype=types.UINT8) & fn.cast(mask, dtype=types.UINT8)
    return image


def _jitter(config: JitterConfig, draws: Floats) -> dict[str, Floats]:
    num = len(draws)
    applied = draws[:, 0] < config.probability

    def factor(column: int, reach: float) -> Floats:
        low, high = max(0.0, 1 - reach), 1 + reach
        return np.where(applied, low + draws[:, column] * (high - low), 1.0)

    saturation = factor(3, config.saturation)
    turn = np.where(applied, (2 * draws[:, 4] - 1) * config.hue * 360, 0.0) if config.hue else np.zeros(num)
    return {
        "brightness": factor(1, config.brightness),
        "contrast": factor(2, config.contrast),
        "saturation": np.where(draws[:, 5] < config.grayscale, 0.0, saturation),
        "hue": turn,
    }


def _pick(config: RandAugmentConfig, draws: Floats) -> dict[str, Floats]:
    """Signed strength of each operator for each sample, 0 where it was not drawn."""
    allowed = [index for index, name in enumerate(OPERATORS) if name not in config.exclude]
    rank, sign = draws[:, : len(OPERATORS)], np.where(draws[:, len(OPERATORS) :] < 0.5, -1.0, 1.0)
    # The operators with the smallest draws are a uniform choice without repetition.
    order = np.argsort(rank[:, allowed], axis=1)[:, : config.num_ops]
    chosen = np.zeros(rank.shape, np.bool_)
    np.put_along_axis(chosen, np.asarray(allowed)[order], True, axis=1)
    share = config.magnitude / MAX_MAGNITUDE
    return {
        name: np.where(chosen[:, index], sign[:, index] * share * _LARGEST[name], 0.0)
        for index, name in enumerate(OPERATORS)
        if name in _LARGEST
    }


def _matrix(picked: dict[str, Floats], size: int) -> Floats:
    """float64 [n, 2, 3]: rotation, then shear, about the centre, then translation; output to input coordinates."""
    angle = np.deg2rad(picked["rotate"])
    cosine, sine = np.cos(angle), np.sin(angle)
    right, down = picked["shear_x"], picked["shear_y"]
    ones = np.ones_like(angle)
    shear = np.stack([np.stack([ones, right], -1), np.stack([down, ones], -1)], -2)
    turn = np.stack([np.stack([cosine, -sine], -1), np.stack([sine, cosine], -1)], -2)
    linear = turn @ shear
    shift = np.stack([picked["translate_x"], picked["translate_y"]], -1) * size
    centre = np.full((len(angle), 2), size / 2)
    offset = centre + shift - (linear @ centre[:, :, None])[:, :, 0]
    return np.concatenate([linear, offset[:, :, None]], axis=2)
