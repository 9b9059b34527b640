"""dalipipe: the input pipeline that keeps GPUs fed.

>>> import dalipipe as dp
>>> loader = dp.load("train", ["data.url=s3://bucket/set", "loader.batch_size=256"])
>>> for batch in loader: ...

Importing this package imports neither torch nor DALI: the names below are brought in when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dalipipe import errors
    from dalipipe.build import LoadConfig, Loader
    from dalipipe.cli.load import load
    from dalipipe.metrics.spin import spin
    from dalipipe.shards.manifest import Manifest
    from dalipipe.telemetry.phases import step
    from dalipipe.world import World, detect_world

__all__ = ["LoadConfig", "Loader", "Manifest", "World", "detect_world", "errors", "load", "spin", "step"]

_HOME = {
    "LoadConfig": "dalipipe.build",
    "Loader": "dalipipe.build",
    "Manifest": "dalipipe.shards.manifest",
    "World": "dalipipe.world",
    "detect_world": "dalipipe.world",
    "load": "dalipipe.cli.load",
    "spin": "dalipipe.metrics.spin",
    "step": "dalipipe.telemetry.phases",
}


def __getattr__(name: str) -> Any:
    if name == "errors":
        return import_module("dalipipe.errors")
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'dalipipe' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
