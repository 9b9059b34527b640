"""`dalipipe cache stat|warm|verify|clear`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from dalipipe.cli.output import emit, progress
from dalipipe.cli.schema import CacheJob
from dalipipe.errors import ConfigError
from dalipipe.units import format_bytes

if TYPE_CHECKING:
    from dalipipe.cache.inspect import CacheReport


def run(cfg: CacheJob, *, as_json: bool) -> int:
    """Measures, fills, checks or clears the cache of this node. Safe while jobs run."""
    actions = {"stat": _stat, "warm": _warm, "verify": _verify, "clear": _clear}
    if cfg.action not in actions:
        raise ConfigError(f"dalipipe cache {cfg.action!r}: use {', '.join(actions)}")
    return actions[cfg.action](cfg, as_json)


def _stat(cfg: CacheJob, as_json: bool) -> int:
    from dalipipe.cache.inspect import stat

    report = stat(cfg.cache)
    lines = [
        f"{cfg.cache.dir} holds {_amount(report)} (budget {format_bytes(report.budget_bytes)}, "
        f"{format_bytes(report.resident_bytes)} in the page cache)",
        f"processes hold {format_bytes(report.held_bytes)}, of which {format_bytes(report.held_unnamed_bytes)} are "
        "dropped and come back to the disk when the last view ends",
    ]
    lines += [
        f"  {each.identity} in {each.tier}: {each.blocks} blocks, {format_bytes(each.bytes)}"
        + (", in use" if each.in_use else "")
        for each in report.sets
    ]
    emit({"dir": cfg.cache.dir, **asdict(report)}, "\n".join(lines), as_json=as_json)
    return 0


def _warm(cfg: CacheJob, as_json: bool) -> int:
    from dalipipe.wiring.tiers import warm_cache

    with progress("warming the cache") as show:
        report = warm_cache(cfg.data, cfg.storage, cfg.cache, threads=cfg.threads, progress=show)
    rate = format_bytes(report.fetched_bytes / max(report.wall_s, 1e-9))
    text = (
        f"{cfg.cache.dir} holds {report.blocks} blocks, {format_bytes(report.bytes)}; {report.fetched_blocks} of them "
        f"came in {report.wall_s:.1f} s ({rate}/s)"
    )
    if report.left_blocks:
        text += f"; {report.left_blocks} blocks are not kept and are read from farther away every epoch"
    emit({"dir": cfg.cache.dir, **asdict(report)}, text, as_json=as_json)
    return 0


def _verify(cfg: CacheJob, as_json: bool) -> int:
    from dalipipe.cache.inspect import stat, verify

    total_bytes, done_bytes = stat(cfg.cache).bytes, 0
    with progress("verifying the cache") as show:

        def read(num_bytes: int) -> None:
            nonlocal done_bytes
            done_bytes += num_bytes
            show(done_bytes, total_bytes)

        report = verify(cfg.cache, drop=cfg.drop, progress=read)
    text = f"{cfg.cache.dir} checked: {_amount(report)}"
    if report.corrupt:
        text += f"\n{report.corrupt} blocks are corrupt" + (
            " and were dropped"
            if cfg.drop
            else ": readers fetch such blocks again; `cache verify drop=true` drops them"
        )
    emit({"dir": cfg.cache.dir, **asdict(report)}, text, as_json=as_json)
    return 1 if report.corrupt else 0


def _clear(cfg: CacheJob, as_json: bool) -> int:
    from dalipipe.cache.inspect import clear

    report = clear(cfg.cache, force=cfg.force, first_reads=cfg.first_reads)
    text = f"{cfg.cache.dir} cleared of {_amount(report)}"
    if report.skipped:
        text += f"; {report.skipped} data sets are in use by a running job and were left alone (force=true drops them)"
    emit({"dir": cfg.cache.dir, **asdict(report)}, text, as_json=as_json)
    return 0


def _amount(report: CacheReport) -> str:
    return f"{report.blocks} blocks, {format_bytes(report.bytes)}"
