"""Where tasks run (`ray.*`)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RayConfig:
    """`ray.*`, used with `engine=ray`."""

    address: str = ""
    """A cluster to join (`auto`, `HOST:6379` or `ray://HOST:10001`); empty: a cluster of this machine alone, which
    ends with the engine."""
    retries: int = 3
    """How often a task is run again after its worker process or node died."""
