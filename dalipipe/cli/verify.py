"""`dalipipe verify URL`."""

from __future__ import annotations

from dalipipe.cli.output import emit, progress
from dalipipe.cli.schema import InspectJob
from dalipipe.errors import ConfigError

_DECODE = ("none", "sample", "all")


def run(cfg: InspectJob, *, as_json: bool) -> int:
    """Checks shards, indices, blocks and images against the manifest. Exit code 1 when anything is wrong."""
    from dalipipe.packing.verify import verify

    if not cfg.data.url:
        raise ConfigError("data.url is required: the folder or bucket prefix that holds manifest.json")
    if cfg.decode not in _DECODE:
        raise ConfigError(f"decode={cfg.decode!r} is not one of {', '.join(_DECODE)}")
    with progress("verifying") as report:
        found = verify(cfg.data.url, cfg.storage, decode=cfg.decode, progress=report)
    lines = [f"{found.samples} samples in {found.shards} shards: " + ("whole" if not found.errors else "DAMAGED")]
    lines += [f"  {error}" for error in found.errors]
    if found.num_errors > len(found.errors):
        lines.append(f"  … and {found.num_errors - len(found.errors)} more")
    result = {
        "url": cfg.data.url,
        "samples": found.samples,
        "shards": found.shards,
        "num_errors": found.num_errors,
        "errors": list(found.errors),
    }
    emit(result, "\n".join(lines), as_json=as_json)
    return 1 if found.errors else 0
