"""The data set of a plan, packed or not."""

from __future__ import annotations

from dalipipe.errors import ConfigError
from dalipipe.packing.plan import block_samples
from dalipipe.shards.shape import DataShape
from dalipipe.simulate.config import PlanConfig
from dalipipe.units import parse_bytes


def declared_shape(plan: PlanConfig) -> DataShape | None:
    """The data set that `plan.samples` and `plan.sample_bytes` describe, cut into blocks as `pack` would; None where
    they do not.

    Raises:
        ConfigError: one is given without the other, or is no number of samples or bytes.
    """
    sample_bytes = parse_bytes(plan.sample_bytes, "plan.sample_bytes")
    if plan.samples < 0:
        raise ConfigError(f"plan.samples={plan.samples} must be at least 0")
    if not plan.samples and not sample_bytes:
        return None
    if not plan.samples or not sample_bytes:
        raise ConfigError(
            f"plan.samples={plan.samples} and plan.sample_bytes={plan.sample_bytes!r} describe a data set together: "
            "give both, or data.url"
        )
    num_bytes = plan.samples * sample_bytes
    shard_bytes = parse_bytes(plan.shard_bytes, "plan.shard_bytes")
    if shard_bytes < 1:
        raise ConfigError(f"plan.shard_bytes={plan.shard_bytes!r} must be more than 0")
    num_shards = min(plan.samples, max(1, round(num_bytes / shard_bytes)))
    return DataShape(
        num_samples=plan.samples,
        block_samples=block_samples(plan.samples, num_shards, num_bytes, plan.block_bytes),
        num_bytes=num_bytes,
    )
