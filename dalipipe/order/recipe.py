"""From configuration to the order of every epoch: one set or several, repeated or not, with or without an end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache

from dalipipe.errors import ConfigError
from dalipipe.order.config import ShuffleConfig
from dalipipe.order.epoch import EpochOrder, epoch_order
from dalipipe.order.mix import mixed_order
from dalipipe.order.repeat import Repeats
from dalipipe.shards.shape import DataShape


def orders(
    shapes: Mapping[str, DataShape],
    *,
    batch_size: int,
    shuffle: ShuffleConfig,
    last_batch: str,
    mix: Mapping[str, float] | None = None,
    repeats: Mapping[str, Repeats] | None = None,
    epoch_samples: int | None = None,
) -> Callable[[int], EpochOrder]:
    """Gives the order of an epoch; a few are kept.

    Args:
        shapes: the data sets by name, in the order in which ids are numbered: one, or those of `mix`.
        batch_size: B over all ranks.
        shuffle: how samples are mixed.
        last_batch: what becomes of the samples that fill no step.
        mix: a weight for each set; without it there is one set, and an epoch is that set.
        repeats: by set, what comes more or less often than once.
        epoch_samples: the data run on without end, and an epoch is that many samples.

    Raises:
        ConfigError: values that can never work together; at once, not with the first epoch.
    """
    repeats = repeats or {}
    if mix or epoch_samples is not None:
        if last_batch != "drop":
            raise ConfigError(
                f"loader.last_batch={last_batch}: data that run on without end (data.mix, loader.epoch_samples) have "
                "no last samples that fill no step; set loader.last_batch=drop"
            )
        weights = mix or dict.fromkeys(shapes, 1.0)

        def order(epoch: int) -> EpochOrder:
            return mixed_order(
                shapes,
                weights,
                epoch=epoch,
                batch_size=batch_size,
                shuffle=shuffle,
                epoch_samples=epoch_samples,
                repeats=repeats,
            )

    else:
        ((name, shape),) = shapes.items()

        def order(epoch: int) -> EpochOrder:
            return epoch_order(
                shape,
                epoch=epoch,
                batch_size=batch_size,
                shuffle=shuffle,
                last_batch=last_batch,
                repeats=repeats.get(name, ()),
            )

    kept = lru_cache(maxsize=4)(order)
    kept(0)
    return kept
