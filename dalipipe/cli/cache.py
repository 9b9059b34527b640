"""`dalipipe cache stat|verify|clear`."""

from __future__ import annotations

from dataclasses import asdict

from dalipipe.cli.output import emit, progress
from dalipipe.cli.schema import CacheJob
from dalipipe.errors import ConfigError
from dalipipe.units import format_bytes


def run(cfg: CacheJob, *, as_json: bool) -> int:
    """Measures, checks or clears the node's cache folder. Safe while jobs run."""
    from dalipipe.cache.inspect import clear, stat, verify

    if cfg.action == "stat":
        report, did = stat(cfg.cache), "holds"
    elif cfg.action == "clear":
        report, did = clear(cfg.cache), "cleared of"
    elif cfg.action == "verify":
        total_bytes, done_bytes = stat(cfg.cache).bytes, 0
        with progress("verifying the cache") as show:

            def read(num_bytes: int) -> None:
                nonlocal done_bytes
                done_bytes += num_bytes
                show(done_bytes, total_bytes)

            report, did = verify(cfg.cache, progress=read), "checked:"
    else:
        raise ConfigError(f"dalipipe cache {cfg.action!r}: use stat, verify or clear")
    text = f"{cfg.cache.dir} {did} {report.blocks} blocks, {format_bytes(report.bytes)}"
    text += f" (budget {format_bytes(report.budget_bytes)})" if cfg.action == "stat" else ""
    if report.corrupt:
        text += f"\n{report.corrupt} blocks are corrupt: readers fetch such blocks again; `cache clear` drops all"
    emit({"dir": cfg.cache.dir, **asdict(report)}, text, as_json=as_json)
    return 1 if report.corrupt else 0
