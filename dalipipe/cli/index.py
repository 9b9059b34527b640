"""`dalipipe index source=URL`."""

from __future__ import annotations

from dataclasses import asdict

from dalipipe.cli.output import counted, emit, progress
from dalipipe.cli.schema import IndexJob
from dalipipe.errors import ConfigError
from dalipipe.units import format_bytes


def run(cfg: IndexJob, *, as_json: bool) -> int:
    """Makes a manifest over tars, or image files, that exist."""
    from dalipipe.packing.index import index

    if not cfg.source:
        raise ConfigError("index needs source=URL: the folder or bucket prefix that holds the tars or images")
    with progress("indexing") as report:
        done = index(cfg.source, cfg.target, cfg.index, cfg.storage, progress=report)
    text = (
        f"indexed {done.samples} samples in {done.shards} shards, {format_bytes(done.bytes)}, in {done.seconds:.1f} s "
        f"by reading {format_bytes(done.bytes_read)} of them: {cfg.target or cfg.source}"
    )
    if done.skipped:
        text += f"\n{done.skipped} members of tars that are no data were skipped ({counted(done.skipped_kinds)})"
    if done.truncated:
        text += f"\n{done.truncated} tars have no end and may have been cut between two members"
    if not done.checksums:
        text += "\nchecksums are not known yet: `dalipipe verify URL checksums=all` reads every byte once and adds them"
    emit(asdict(done), text, as_json=as_json)
    return 0
