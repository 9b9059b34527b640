"""From a loader and its configuration to a watched run."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dalipipe.engines.cpus import default_workers
from dalipipe.metrics.config import MetricsConfig
from dalipipe.metrics.environment import installed_version
from dalipipe.metrics.host import memory_bytes
from dalipipe.metrics.observer import RunObserver, open_observer
from dalipipe.metrics.profiled import ProfiledPhases
from dalipipe.storage.budget import declared_rate
from dalipipe.telemetry import Recorder, StepBook
from dalipipe.world import World

if TYPE_CHECKING:
    import torch

    from dalipipe.shards.manifest import Manifest

_SAMPLED_FILES = 16
_SAMPLED_SHARDS = 2


def watch(
    *,
    config: MetricsConfig,
    settings: Mapping[str, Any],
    recorder: Recorder,
    steps: StepBook,
    world: World,
    manifest: Manifest,
    device: torch.device,
    run_dir: Path | None,
) -> list[RunObserver | ProfiledPhases]:
    """Starts everything that tells about a loader, as configured; what is returned is closed with the loader.

    Args:
        settings: the whole configuration of the loader as nested plain values.

    Raises:
        ConfigError, DependencyError: as `open_observer`.
    """
    pci_bus_id = ""
    if device.type == "cuda":
        pci_bus_id = _pci_bus_id(device)
        if config.nvtx:
            _show_ranges(recorder)
    observer = open_observer(
        config,
        recorder=recorder,
        steps=steps,
        world=world,
        facts=_facts(settings, manifest, world, device),
        run_dir=run_dir,
        settings=settings,
        pci_bus_id=pci_bus_id,
        copies=_copies(settings, manifest),
    )
    watching: list[RunObserver | ProfiledPhases] = [observer] if observer is not None else []
    if config.phases == "profiler":
        profiled = ProfiledPhases(every=config.profile_every)
        steps.on_boundary = profiled.boundary
        watching.append(profiled)
    return watching


def _facts(settings: Mapping[str, Any], manifest: Manifest, world: World, device: torch.device) -> dict[str, Any]:
    """What does not change during the run and `doctor` needs; numbers where there is one."""
    cpus = max(1, default_workers() // world.local_world_size)
    affinity = max(1, len(os.sched_getaffinity(0)) // world.local_world_size)
    return {
        "version": installed_version("dalipipe"),
        "device": str(device),
        "cpus": cpus,
        "decode_threads": settings["graph"]["num_threads"] or affinity,
        "memory_bytes": memory_bytes(),
        "lake": settings["data"]["url"].partition("://")[0] if "://" in settings["data"]["url"] else "file",
        # The node's processes share what is declared for it.
        "declared_bandwidth": (declared_rate(settings["storage"]["bandwidth"]) or 0.0) / world.local_world_size,
        "dataset_bytes": manifest.num_bytes,
        "dataset_samples": manifest.num_samples,
        "block_samples": manifest.block_samples,
        "cache_policy": settings["cache"]["policy"],
        "cache_capacity": str(settings["cache"]["tiers"]["node"]["capacity"]),
        "cache_dir": settings["cache"]["dir"],
        "prefetch_depth_set": str(settings["prefetch"]["depth"]),
        "device_batches": settings["prefetch"]["device_batches"],
        "queue_depth": settings["prefetch"]["queue_depth"],
        "gpu_hour": settings["cost"]["gpu_hour"],
        "prices": dict(settings["cost"]),
    }


def _copies(
    settings: Mapping[str, Any], manifest: Manifest
) -> Callable[[], tuple[Sequence[Path], Sequence[Path]]] | None:
    """Files of a lake on a disk of this host, and of the cache: both hold the same bytes in the same page cache."""
    url = settings["data"]["url"].removeprefix("file://")
    if not url or settings["data"]["mix"] or "://" in url or settings["cache"]["policy"] == "stream":
        return None
    lake, node = Path(url), Path(settings["cache"]["dir"], manifest.identity)

    def copies() -> tuple[Sequence[Path], Sequence[Path]]:
        shards = sorted(lake.glob("*.tar"))[:_SAMPLED_SHARDS]
        blocks = []
        for path in node.rglob("*"):
            if path.name.isdigit() and path.is_file():
                blocks.append(path)
                if len(blocks) == _SAMPLED_FILES:
                    break
        return shards, blocks

    return copies


def _pci_bus_id(device: torch.device) -> str:
    import torch

    found: Any = torch.cuda.get_device_properties(device)
    return f"{found.pci_domain_id:08x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"


def _show_ranges(recorder: Recorder) -> None:
    import torch

    from dalipipe.telemetry.phases import set_ranges

    recorder.ranges = (torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop)
    set_ranges(torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop)
