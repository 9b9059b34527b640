"""This process's part of the job: its device, its share of a batch, and who says which slots are its own."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from dalipipe.errors import ConfigError
from dalipipe.loader.config import LoaderConfig
from dalipipe.world import World, store_address

if TYPE_CHECKING:
    from dalipipe.cache.contract import Cache
    from dalipipe.coordination.contract import Coordinator
    from dalipipe.order.epoch import EpochOrder
    from dalipipe.shards.manifest import Manifest
    from dalipipe.wiring.config import LoadConfig

# Loaders that this process opened: every rank opens them in the same order, so the numbers agree.
_openings = itertools.count()


def open_coordinator(cfg: LoadConfig, world: World, order: EpochOrder, manifest: Manifest, cache: Cache) -> Coordinator:
    """Who says which slots this rank loads (`assign`).

    Raises:
        ConfigError: `assign=node` with ranks that are no whole nodes, or that have nowhere to meet.
        CoordinationError: the place where they meet does not answer.
    """
    from dalipipe.coordination.board import TcpBoard
    from dalipipe.coordination.node import NodeCoordinator, lane_nearness
    from dalipipe.coordination.static import StaticCoordinator

    lanes = order.signature.lanes
    # One node, or no lanes to be near to: there is nothing to agree on.
    if cfg.assign == "static" or not lanes or world.local_world_size == world.world_size:
        return StaticCoordinator(world, replicas=cfg.loader.replicas)
    host, port, restarts = store_address()
    board = TcpBoard(
        host,
        port,
        prefix=f"dalipipe/{restarts}/{next(_openings)}/{manifest.identity}",
        timeout_s=cfg.prefetch.timeout_s,
    )
    return NodeCoordinator(
        world,
        board,
        lambda: lane_nearness(order, lanes, manifest.block_of, cache.contains),
        replicas=cfg.loader.replicas,
    )


def batch_sizes(config: LoaderConfig, world: World) -> tuple[int, int]:
    """(per rank, whole job) from the one that is given. Ranks of one group of replicas count once."""
    local, total = config.batch_size, config.global_batch_size
    if (local is None) == (total is None):
        raise ConfigError(
            f"give exactly one of loader.batch_size={local} (per rank) and loader.global_batch_size={total} (whole job)"
        )
    # Whether the groups come out even is judged where the slots are dealt.
    num_groups = max(1, world.world_size // max(1, config.replicas))
    if local is not None:
        if local < 1:
            raise ConfigError(f"loader.batch_size={local} must be at least 1")
        return local, local * num_groups
    assert total is not None
    return total // num_groups, total


def choose_device(device: str, world: World) -> Any:
    """The torch device of this rank.

    Raises:
        ConfigError: there is no such device.
    """
    import torch

    if device == "auto" and torch.cuda.is_available():
        # Without a launcher that tells the local rank, the trainer's own choice of a device is the best that is known.
        number = world.local_rank if world.local_world_size > 1 else torch.cuda.current_device()
        device = f"cuda:{number % torch.cuda.device_count()}"
    elif device == "auto":
        device = "cpu"
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise ConfigError(f"device={device!r} is not a device; use auto, cpu or cuda:N") from None
    if chosen.type not in ("cpu", "cuda"):
        raise ConfigError(f"device={device!r}: DALI runs on cpu or cuda:N")
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={device!r} but torch sees no GPU; use device=cpu, or mend the driver")
    return torch.device("cuda", chosen.index or 0) if chosen.type == "cuda" else chosen
