"""`dalipipe pack source=URL target=URL`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from dalipipe.cli.output import counted, emit, progress, stages
from dalipipe.cli.schema import PackJob
from dalipipe.errors import ConfigError
from dalipipe.units import format_bytes

if TYPE_CHECKING:
    from dalipipe.engines import Engine


def run(cfg: PackJob, *, as_json: bool) -> int:
    """Packs a lake of files into shards."""
    from dalipipe.packing.run import pack

    if not cfg.source or not cfg.target:
        raise ConfigError(
            f"pack needs source=URL and target=URL (got source={cfg.source!r} target={cfg.target!r}): "
            "a folder of class folders with images, and a folder or bucket prefix for the shards"
        )
    engine = open_engine(cfg)
    try:
        with stages() as stage, progress("packing") as report:
            done = pack(cfg.source, cfg.target, cfg.pack, cfg.storage, engine=engine, progress=report, stage=stage)
    finally:
        engine.close()
    text = (
        f"packed {done.samples} samples into {done.shards} shards, {format_bytes(done.bytes)}, "
        f"in {done.seconds:.1f} s: {cfg.target}"
    )
    if done.quarantined:
        text += f"\n{done.quarantined} corrupt samples were left out; see quarantine.jsonl beside the shards"
    if done.duplicates:
        text += f"\n{done.duplicates} duplicates were left out; see duplicates.jsonl beside the shards"
    if done.skipped:
        text += (
            f"\n{done.skipped} files or members of tars that are no data were skipped ({counted(done.skipped_kinds)})"
        )
    if done.truncated:
        text += f"\n{done.truncated} tars have no end and may have been cut between two members"
    emit(asdict(done), text, as_json=as_json)
    return 0


def open_engine(cfg: PackJob) -> Engine:
    """Where tasks run: `engine=local` or `engine=ray`.

    Raises:
        ConfigError: another engine. DependencyError: Ray is not installed.
    """
    from dalipipe.engines import LocalEngine, default_workers

    if cfg.engine == "local":
        return LocalEngine(cfg.pack.workers or default_workers())
    if cfg.engine == "ray":
        from dalipipe.engines.ray_engine import RayEngine

        return RayEngine(cfg.pack.workers, cfg.ray)
    raise ConfigError(f"engine={cfg.engine!r} is not one of local, ray")
