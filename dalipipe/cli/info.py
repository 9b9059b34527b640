"""`dalipipe info URL`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from dalipipe.cli.output import emit
from dalipipe.cli.schema import InfoJob
from dalipipe.errors import ConfigError
from dalipipe.units import format_bytes
from dalipipe.wiring.dataset import open_manifest

_MEANING = {
    "collision_ratio": "pairs of a batch from one shard, over chance; 1 is ideal",
    "block_collision_ratio": "the same for blocks",
    "recurrence": "pairs that meet in both of two epochs, over chance; 1 is ideal",
    "multiset_deviation": "samples too many or too few, over all; 0: each exactly once",
    "rho": "correlation of labels inside a shard; 0: shuffled when packed",
    "design_effect": "variance of a batch mean over that of a full shuffle, at this rho",
    "design_effect_at_rho_1": "the same if each shard were a class of its own",
}


def run(cfg: InfoJob, *, as_json: bool) -> int:
    """Says what a data set holds, from its manifest alone; with `quality=true` also how well it will mix."""
    from dalipipe.packing.inspect import info

    if cfg.data.mix:
        raise ConfigError("dalipipe info describes one data set: give data.url and no data.mix")
    if cfg.nodes < 0:
        raise ConfigError(f"nodes={cfg.nodes} must be at least 0")
    store, manifest = open_manifest(cfg.data, cfg.storage)
    try:
        facts = info(manifest)
        if cfg.nodes:
            from dalipipe.simulate.topology import cross_node_reads

            facts |= asdict(cross_node_reads(manifest, cfg.nodes))
        if cfg.quality:
            from dalipipe.packing.mixing import mixing

            facts["quality"] = mixing(
                manifest,
                store,
                batch_size=cfg.loader.global_batch_size or cfg.loader.batch_size or _fitting(manifest.num_samples),
                shuffle=cfg.shuffle,
                last_batch=cfg.loader.last_batch,
            )
    finally:
        store.close()
    quality = facts.get("quality", {})
    shown = {name: format_bytes(value) if name.endswith("bytes") else value for name, value in facts.items()}
    rows = [
        (name, ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else value)
        for name, value in shown.items()
        if name != "quality"
    ]
    text = f"{store.url}\n" + "\n".join(f"  {name:<14} {_short(str(value))}" for name, value in rows)
    if quality:
        text += "\n" + "\n".join(_quality_line(name, value) for name, value in quality.items())
    emit({"url": store.url, **facts}, text, as_json=as_json)
    return 0


def _fitting(num_samples: int) -> int:
    return max(1, min(256, num_samples))


def _quality_line(name: str, value: Any) -> str:
    shown = "-" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)
    return f"  {name:<22} {shown:>10}  {_MEANING.get(name, '')}".rstrip()


def _short(text: str, limit: int = 160) -> str:
    return text if len(text) <= limit else f"{text[:limit]}…"
