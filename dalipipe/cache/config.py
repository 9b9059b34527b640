"""What is kept near, where, and how much (`cache.*`)."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class TierConfig:
    """One tier. `capacity`: `"100G"`, bytes, or a fraction such as 0.8 (of the free space); 0 turns the tier off.

    The budget is that of one data set; nodes and jobs that name the same folder share it.
    """

    capacity: int | float | str = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """`cache.tiers.pool`: a store near the cluster, filled on first read, so that a byte leaves the lake once."""

    url: str = ""
    """Any URL that dalipipe can write: a shared mount, an in-cluster bucket. Empty turns the tier off."""
    capacity: int | float | str = 1.0
    """Bytes, or a fraction of the data set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryConfig:
    """`cache.tiers.memory`: encoded blocks in shared memory, for all jobs of the node."""

    capacity: int | float | str = 0
    """Bytes, or a fraction of what the host (or its container) has free."""
    dir: str = ""
    """A folder of a memory file system; by default one in /dev/shm for this user and `cache.dir`."""
    hugepages: bool = False
    """Use huge pages, where the file system of `dir` is mounted with `huge=` or the host's default allows them."""
    keep: bool = False
    """Leave the blocks there when the last job ends, for the next one. Memory stays taken until `cache clear`."""
    decoded: int | float | str = 0
    """Decoded images beside the encoded blocks, with a budget of their own: bytes, or a fraction of what is free. 0 =
    none. For the CPU path of `image_train`, `image_eval` and `multimodal`; pixels are the same with and without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TiersConfig:
    """`cache.tiers.*`: exclusive, the nearest first: memory, node, pool. Beside them decoded images: `memory.decoded`,
    and `device` (experimental) in the memory of the GPU: bytes, or a fraction of what is free there."""

    pool: PoolConfig = field(default_factory=PoolConfig)
    node: TierConfig = field(default_factory=lambda: TierConfig(capacity=0.8))
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    device: TierConfig = field(default_factory=TierConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """`cache.*`."""

    dir: str = ""
    """The folder of the node tier, best on local NVMe, shared by all jobs of the node."""
    policy: str = "auto"
    """`pin` (never evict: a hash-chosen part of the set stays), `lru` and `lfu` (for sets with hot samples), `stream`
    (use and drop), `auto` (`pin`, or `lfu` where `data.repeat` makes samples hot)."""
    tiers: TiersConfig = field(default_factory=TiersConfig)
    request_bytes: int | float | str = "8MiB"
    """Neighbouring blocks of a shard that are wanted at the same time are read from the lake by one request of at most
    so many bytes; 0 reads each alone."""
    wait_s: float = 60.0
    """How long a reader waits for another process that is bringing the same block, before it is an error."""
