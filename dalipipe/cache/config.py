"""What is kept near, where, and how much (`cache.*`)."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class TierConfig:
    """One tier. `capacity`: `"100G"`, bytes, or a fraction such as 0.8 (of the free space); 0 turns the tier off."""

    capacity: int | float | str = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TiersConfig:
    """`cache.tiers.*`."""

    node: TierConfig = field(default_factory=lambda: TierConfig(capacity=0.8))


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """`cache.*`."""

    dir: str = ""
    """The folder of the node tier, best on local NVMe, shared by all jobs of the node."""
    policy: str = "auto"
    """`pin` (never evict: a hash-chosen part of the set stays), `stream` (use and drop), `auto`."""
    tiers: TiersConfig = field(default_factory=TiersConfig)
    wait_s: float = 60.0
    """How long a reader waits for another process that is bringing the same block, before it is an error."""
