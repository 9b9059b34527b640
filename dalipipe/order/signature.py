"""The numbers that name an order: what a loader state must agree on to be resumed."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

from dalipipe.errors import ConfigError
from dalipipe.order.config import ShuffleConfig
from dalipipe.shards.shape import DataShape
from dalipipe.units import parse_capacity

_MODES = ("block", "full", "none")
_TAILS = ("drop", "partial", "pad")
_AUTO_LANES = 64
_MAX_RECIPE = 240


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderSignature:
    """Everything but the data set's identity and the position that decides which samples form which step.

    `lanes` (L) and `window_blocks` (P, blocks open in a lane) are 0 where the mode has none; `exchange` is q; `kept` is
    the share of blocks that come evenly between the others; `recipe` writes out a mix or a repeat (K, L and P are then
    those of the first source).
    """

    mode: str
    seed: int
    batch_size: int
    block_samples: int
    lanes: int
    window_blocks: int
    exchange: float
    last_batch: str
    recipe: str = ""
    kept: float = 0.0


def order_signature(
    shape: DataShape, *, batch_size: int, shuffle: ShuffleConfig, last_batch: str, window_bytes: int | None = None
) -> OrderSignature:
    """Resolves `auto`, fractions and sizes to the numbers that the order is made of.

    `window_bytes` replaces `shuffle.window` where several sources share one window.

    Raises:
        ConfigError: a value can never work, or does not fit the batch; names the key and the nearest valid values.
    """
    if shape.num_samples < 1 or shape.block_samples < 1:
        raise ConfigError(
            f"the data set has {shape.num_samples} samples in blocks of {shape.block_samples}: there is nothing to "
            "order; check data.url and the manifest"
        )
    if batch_size < 1:
        raise ConfigError(f"loader.global_batch_size={batch_size} must be at least 1")
    if shuffle.mode not in _MODES:
        raise ConfigError(f"shuffle.mode={shuffle.mode!r} is not one of {', '.join(_MODES)}")
    if last_batch not in _TAILS:
        raise ConfigError(f"loader.last_batch={last_batch!r} is not one of {', '.join(_TAILS)}")
    if not 0 <= shuffle.exchange <= 1:
        raise ConfigError(f"shuffle.exchange={shuffle.exchange} must be a share in [0, 1]")
    blocks = shuffle.mode == "block"
    if not 0 <= shuffle.kept <= 1 or (shuffle.kept and (shuffle.exchange or not blocks or window_bytes is not None)):
        raise ConfigError(
            f"shuffle.kept={shuffle.kept} must be a share in [0, 1], and goes with shuffle.mode=block, "
            "shuffle.exchange=0 and one data set without data.repeat"
        )
    lanes = _num_lanes(shuffle.lanes, batch_size) if blocks else 0
    return OrderSignature(
        mode=shuffle.mode,
        seed=shuffle.seed,
        batch_size=batch_size,
        block_samples=shape.block_samples,
        lanes=lanes,
        window_blocks=_window_blocks(shape, lanes, shuffle.window, window_bytes) if blocks else 0,
        exchange=float(shuffle.exchange) if blocks else 0.0,
        last_batch=last_batch,
        kept=float(shuffle.kept),
    )


def short_recipe(text: str) -> str:
    """`text`, its end replaced by a hash where it is long or not ASCII: a state stays under 1 KB whatever is mixed."""
    if text.isascii() and len(text) <= _MAX_RECIPE:
        return text
    digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    shown = text[: _MAX_RECIPE - 50].encode("ascii", "replace").decode()
    return f"{shown}... blake2b:{digest}"


def _num_lanes(lanes: int | str, batch_size: int) -> int:
    if lanes == "auto":
        return math.gcd(batch_size, _AUTO_LANES)
    try:
        number = int(lanes)
    except ValueError:
        raise ConfigError(f"shuffle.lanes={lanes!r} is neither a number nor 'auto'") from None
    if number < 1 or batch_size % number:
        below = max((d for d in range(1, min(max(number, 1), batch_size) + 1) if batch_size % d == 0), default=1)
        above = next((d for d in range(max(number, 1), batch_size + 1) if batch_size % d == 0), batch_size)
        nearest = " or ".join(str(d) for d in sorted({below, above}))
        raise ConfigError(
            f"shuffle.lanes={number} must divide the global batch of {batch_size} (each lane fills as many slots as "
            f"every other); the nearest that do: {nearest}, or 'auto'"
        )
    return number


def _window_blocks(shape: DataShape, lanes: int, window: int | float | str, window_bytes: int | None) -> int:
    # A manifest that does not know its bytes counts a sample as one byte: fractions keep their meaning.
    total_bytes = shape.num_bytes or shape.num_samples
    if window_bytes is None:
        window_bytes = parse_capacity(window, total_bytes, "shuffle.window")
    num_rows = shape.num_samples // shape.block_samples // lanes
    open_blocks = window_bytes * shape.num_samples // (total_bytes * lanes * shape.block_samples)
    return max(1, min(open_blocks, num_rows))
