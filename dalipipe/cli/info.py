"""`dalipipe info URL`."""

from __future__ import annotations

from dalipipe.build import open_manifest
from dalipipe.cli.output import emit
from dalipipe.cli.schema import InspectJob
from dalipipe.units import format_bytes


def run(cfg: InspectJob, *, as_json: bool) -> int:
    """Says what a data set holds, from its manifest alone."""
    from dalipipe.packing.inspect import info

    store, manifest = open_manifest(cfg.data, cfg.storage)
    try:
        facts = info(manifest)
    finally:
        store.close()
    shown = {name: format_bytes(value) if name.endswith("bytes") else value for name, value in facts.items()}
    rows = [
        (name, ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else value)
        for name, value in shown.items()
    ]
    text = f"{store.url}\n" + "\n".join(f"  {name:<14} {_short(str(value))}" for name, value in rows)
    emit({"url": store.url, **facts}, text, as_json=as_json)
    return 0


def _short(text: str, limit: int = 160) -> str:
    return text if len(text) <= limit else f"{text[:limit]}…"
