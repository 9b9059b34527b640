"""Who am I among the processes of the job."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from dalipipe.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The place of one process (one per GPU) in the job.

    `rank` in [0, world_size), `local_rank` in [0, local_world_size) on node number `node`.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(
                f"rank={self.rank} must be in [0, world_size={self.world_size}); look at RANK and WORLD_SIZE"
            )
        if not 0 <= self.local_rank < self.local_world_size:
            raise ConfigError(
                f"local_rank={self.local_rank} must be in [0, local_world_size={self.local_world_size}); look at "
                "LOCAL_RANK and LOCAL_WORLD_SIZE"
            )


def detect_world(environ: Mapping[str, str] | None = None) -> World:
    """Reads the world from `RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE`, else from an initialised
    `torch.distributed`, else answers a world of one. Never initialises anything.

    Raises:
        ConfigError: a variable is not an integer, or they contradict each other.
    """
    env = os.environ if environ is None else environ
    if "WORLD_SIZE" in env or "RANK" in env:
        rank, size = _integer(env, "RANK", 0), _integer(env, "WORLD_SIZE", 1)
        local_rank = _integer(env, "LOCAL_RANK", 0)
        # Some launchers tell the local rank and not the local size: there are at least so many.
        local_size = _integer(env, "LOCAL_WORLD_SIZE", local_rank + 1)
        if "LOCAL_RANK" not in env:
            local_rank = rank % max(local_size, 1)
        node = _integer(env, "GROUP_RANK", rank // max(local_size, 1))
        return World(rank=rank, world_size=size, local_rank=local_rank, local_world_size=local_size, node=node)
    distributed = sys.modules.get("torch.distributed")
    if environ is None and distributed is not None and distributed.is_available() and distributed.is_initialized():
        # Local ranks are unknown here: without the launcher's variables each process counts as its own node.
        rank = int(distributed.get_rank())
        return World(rank=rank, world_size=int(distributed.get_world_size()), node=rank)
    return World()


def store_address(environ: Mapping[str, str] | None = None) -> tuple[str, int, int]:
    """Host and port of the job's TCPStore (`MASTER_ADDR`, `MASTER_PORT`), and how often the launcher restarted the job.

    Raises:
        ConfigError: they are not set, or not what they must be.
    """
    env = os.environ if environ is None else environ
    if not env.get("MASTER_ADDR") or not env.get("MASTER_PORT"):
        raise ConfigError(
            "ranks that agree on something meet at MASTER_ADDR:MASTER_PORT, which are not set: start the job with "
            "torchrun, set them, or use assign=static"
        )
    return env["MASTER_ADDR"], _integer(env, "MASTER_PORT", 0), _integer(env, "TORCHELASTIC_RESTART_COUNT", 0)


def _integer(env: Mapping[str, str], name: str, default: int) -> int:
    try:
        return int(env.get(name, default))
    except ValueError:
        raise ConfigError(f"environment variable {name}={env[name]!r} must be an integer") from None
