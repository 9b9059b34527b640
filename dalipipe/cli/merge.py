"""`dalipipe merge sources=[URL,URL] target=URL`."""

from __future__ import annotations

from dataclasses import asdict

from dalipipe.cli.output import emit, progress
from dalipipe.cli.schema import MergeJob
from dalipipe.errors import ConfigError
from dalipipe.units import format_bytes


def run(cfg: MergeJob, *, as_json: bool) -> int:
    """Makes one data set of several without copying their shards."""
    from dalipipe.packing.merge import merge

    if not cfg.target:
        raise ConfigError("merge needs sources=[URL,URL] and target=URL: where the manifest over all of them goes")
    with progress("merging") as report:
        done = merge(
            cfg.sources,
            cfg.target,
            cfg.storage,
            checksums=cfg.checksums,
            overwrite=cfg.overwrite,
            progress=report,
        )
    text = (
        f"merged {len(cfg.sources)} data sets: {done.samples} samples in {done.shards} shards, "
        f"{format_bytes(done.bytes)}: {cfg.target}"
    )
    if done.blocks_without_checksum:
        text += (
            f"\n{done.blocks_without_checksum} of {done.blocks} blocks are cut anew and have no checksum; "
            "checksums=true reads the shards once and adds them"
        )
    emit(asdict(done), text, as_json=as_json)
    return 0
