"""`dalipipe verify URL`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from dalipipe.cli.output import emit, progress
from dalipipe.cli.schema import InspectJob
from dalipipe.errors import ConfigError

if TYPE_CHECKING:
    from dalipipe.packing.repair import RepairReport
    from dalipipe.packing.verify import VerifyReport

_DECODE = ("none", "sample", "all")
_CHECKSUMS = ("none", "kept", "all")


def run(cfg: InspectJob, *, as_json: bool) -> int:
    """Checks shards, indices, blocks and images against the manifest. Exit code 1 when anything is wrong."""
    from dalipipe.packing.repair import repair

    if cfg.workers < 0:
        raise ConfigError(f"workers={cfg.workers} must be at least 0")
    if not cfg.data.url:
        raise ConfigError("data.url is required: the folder or bucket prefix that holds manifest.json")
    if cfg.decode not in _DECODE:
        raise ConfigError(f"decode={cfg.decode!r} is not one of {', '.join(_DECODE)}")
    if cfg.checksums not in _CHECKSUMS:
        raise ConfigError(f"checksums={cfg.checksums!r} is not one of {', '.join(_CHECKSUMS)}")
    if cfg.repair_from and not cfg.repair:
        raise ConfigError(f"repair_from={cfg.repair_from!r} goes with repair=true")
    if cfg.checksums == "kept":
        if cfg.repair:
            raise ConfigError("checksums=kept reads nothing, so it finds nothing to repair; use checksums=all")
        return _add_kept(cfg, as_json)
    found = _check(cfg)
    mended = None
    num_added = found.checksums_added
    if cfg.repair and found.damaged:
        with progress("repairing") as report:
            mended = repair(cfg.data.url, cfg.storage, found, copy=cfg.repair_from, progress=report)
        before, found = found, _check(cfg)
        num_added += found.checksums_added
    lines = [f"{found.samples} samples in {found.shards} shards: " + ("whole" if not found.errors else "DAMAGED")]
    lines += [f"  {error}" for error in found.errors]
    if found.num_errors > len(found.errors):
        lines.append(f"  … and {found.num_errors - len(found.errors)} more")
    if num_added:
        lines.append(f"added the checksums of {num_added} parts of blocks; it is the same data set as before")
    if found.without_checksum:
        lines.append(
            f"{found.without_checksum} parts of blocks have no checksum yet ({found.first_reads} of them are as this "
            "node read them first); checksums=all adds them"
        )
    result = {
        "url": cfg.data.url,
        "samples": found.samples,
        "shards": found.shards,
        "num_errors": found.num_errors,
        "errors": list(found.errors),
        "without_checksum": found.without_checksum,
        "first_reads": found.first_reads,
        "checksums_added": num_added,
    }
    if mended is not None:
        result["repaired"] = {**asdict(mended), "errors_before": before.num_errors}
        lines = [*_said(mended), *lines]
    emit(result, "\n".join(lines), as_json=as_json)
    return 1 if found.errors else 0


def _add_kept(cfg: InspectJob, as_json: bool) -> int:
    from dalipipe.packing.checksums import add_first_reads

    done = add_first_reads(cfg.data.url, cfg.storage, cfg.cache.dir)
    result = {
        "url": cfg.data.url,
        "samples": done.samples,
        "shards": done.shards,
        "errors": [],
        "num_errors": 0,
        "checksums_added": done.added,
        "without_checksum": done.unknown,
    }
    text = f"added the checksums of {done.added} parts of blocks that this node had read; {done.unknown} have none yet"
    emit(result, text, as_json=as_json)
    return 0


def _check(cfg: InspectJob) -> VerifyReport:
    from dalipipe.engines import LocalEngine, default_workers
    from dalipipe.packing.verify import verify

    workers = cfg.workers or default_workers()
    engine = LocalEngine(workers) if workers > 1 else None
    try:
        with progress("verifying") as report:
            return verify(
                cfg.data.url,
                cfg.storage,
                decode=cfg.decode,
                cache_dir=cfg.cache.dir,
                add_checksums=cfg.repair or cfg.checksums == "all",
                engine=engine,
                progress=report,
            )
    finally:
        if engine is not None:
            engine.close()


def _said(mended: RepairReport) -> list[str]:
    lines = [f"made again: {name}" for name in mended.indices_made]
    lines += [f"fetched: {name}" for name in mended.shards_fetched]
    lines += [f"LEFT OUT, damaged and not found whole elsewhere: {name}" for name in mended.shards_dropped]
    if mended.identity != mended.identity_before:
        lines.append(
            f"the data set is another one now: identity {mended.identity} (was {mended.identity_before}); caches and "
            "loader states of the old one do not fit it"
        )
    return lines
