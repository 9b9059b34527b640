"""How far ahead data is fetched (`prefetch.*`)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchConfig:
    """`prefetch.*`."""

    depth: int | str = "auto"
    """Steps whose blocks are fetched ahead. `auto` follows the data's order, the lake's latency and the stalls."""
    whole_epoch: bool = False
    """Threads with nothing nearer to do bring the rest of the epoch to the node's cache, as far as it keeps blocks."""
    cold_steps: int | str = "auto"
    """At the start, at most so many steps read their samples alone where blocks are not near, as whole blocks would
    come too late; `auto`: until blocks come in time for as long as those of the first step are used, at most six times
    that, or not at all where they come as soon. 0 never does, nor does a single thread."""
    threads: int = 32
    """Threads that fetch blocks; they wait for the lake and for the disk, not for the CPU."""
    memory_cap: int | float | str = "4GiB"
    """Hard cap on the bytes of fetched blocks that this process holds in memory (streamed blocks)."""
    queue_depth: int = 2
    """DALI's own `prefetch_queue_depth`: batches in decode at once."""
    device_batches: int = 2
    """Decoded batches kept ready for the trainer."""
    timeout_s: float = 120.0
    """How long the trainer may wait for one batch before it is an error that names the stage."""
