"""`dalipipe pack source=URL target=URL`."""

from __future__ import annotations

from dataclasses import asdict

from dalipipe.cli.output import emit, progress
from dalipipe.cli.schema import PackJob
from dalipipe.errors import ConfigError
from dalipipe.units import format_bytes


def run(cfg: PackJob, *, as_json: bool) -> int:
    """Packs a lake of files into shards."""
    from dalipipe.engines.cpus import default_workers
    from dalipipe.engines.local import LocalEngine
    from dalipipe.packing.run import pack

    if not cfg.source or not cfg.target:
        raise ConfigError(
            f"pack needs source=URL and target=URL (got source={cfg.source!r} target={cfg.target!r}): "
            "a folder of class folders with images, and a folder or bucket prefix for the shards"
        )
    if cfg.engine != "local":
        raise ConfigError(f"engine={cfg.engine!r} is not available in this release; use engine=local")
    engine = LocalEngine(cfg.pack.workers or default_workers())
    try:
        with progress("packing") as report:
            done = pack(cfg.source, cfg.target, cfg.pack, cfg.storage, engine=engine, progress=report)
    finally:
        engine.close()
    text = (
        f"packed {done.samples} samples into {done.shards} shards, {format_bytes(done.bytes)}, "
        f"in {done.seconds:.1f} s: {cfg.target}"
    )
    if done.quarantined:
        text += f"\n{done.quarantined} corrupt samples were left out; see quarantine.jsonl beside the shards"
    if done.skipped:
        text += f"\n{done.skipped} files that are not images were skipped"
    emit(asdict(done), text, as_json=as_json)
    return 0
