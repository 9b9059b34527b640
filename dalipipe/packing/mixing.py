"""How well a data set will mix under a configuration: figures of its order, and how alike samples of a shard are."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import numpy as np

from dalipipe.errors import CorruptSampleError
from dalipipe.order.config import ShuffleConfig
from dalipipe.order.feistel import permute
from dalipipe.order.hashing import Purpose, seed_key
from dalipipe.order.quality import group_correlation, measure
from dalipipe.order.recipe import orders
from dalipipe.shards.manifest import Manifest
from dalipipe.storage.store import Store

_SHARDS, _SHARD_SAMPLES, _THREADS = 64, 32, 16


def mixing(
    manifest: Manifest, store: Store, *, batch_size: int, shuffle: ShuffleConfig, last_batch: str
) -> dict[str, Any]:
    """The figures of `dalipipe.order.quality` for a data set and a configuration, JSON-able.

    `rho` is the correlation of labels inside a shard, measured on up to 2,048 samples (None without labels, or with
    one shard); the design effect is given for it, and for the worst case of 1.

    Raises:
        ConfigError: the configuration cannot work with this data set.
        StorageError, ManifestError: labels or indices cannot be read.
    """
    order = orders({"": manifest.shape}, batch_size=batch_size, shuffle=shuffle, last_batch=last_batch)
    signature = order(0).signature
    starts = np.array([manifest.shard(i).first_sample for i in range(manifest.num_shards)] + [manifest.num_samples])
    rho, num_labels = shard_correlation(manifest, store)
    found = asdict(measure(order, starts, manifest.block_samples, rho=1.0))
    worst = found.pop("design_effect")
    return {
        "batch_size": batch_size,
        "lanes": signature.lanes,
        "window_blocks": signature.window_blocks,
        "epoch_steps": order(0).num_steps,
        **found,
        "rho": rho,
        "rho_samples": num_labels,
        "design_effect": None if rho is None or worst is None else 1 + (worst - 1) * rho,
        "design_effect_at_rho_1": worst,
    }


def shard_correlation(manifest: Manifest, store: Store) -> tuple[float | None, int]:
    """rho of the labels inside shards, and the number of labels that it was measured on.

    Raises:
        CorruptSampleError: a label is not an integer.
        StorageError, ManifestError: a label or an index cannot be read.
    """
    if not any(field.name == "label" for field in manifest.fields):
        return None, 0
    shards = np.unique(np.linspace(0, manifest.num_shards - 1, _SHARDS).astype(np.int64))
    wanted: list[tuple[int, str, int, int]] = []
    for number in shards.tolist():
        index = manifest.index(number)
        offsets, sizes = index.rows_fields.get("label", (np.empty(0, np.int64), np.empty(0, np.int64)))
        held = np.flatnonzero(offsets >= 0)
        if held.size:
            # Spread by hash, so that no period in the order of samples shows.
            key = seed_key(number, Purpose.SAMPLE)
            rows = held[permute(np.arange(min(_SHARD_SAMPLES, held.size)), held.size, key)]
            name = manifest.shard(number).name
            wanted += [(number, name, int(offsets[row]), int(offsets[row] + sizes[row])) for row in rows]
    if not wanted:
        return None, 0

    def label(place: tuple[int, str, int, int]) -> int:
        _, name, start, stop = place
        text = bytes(store.read(name, start, stop))
        try:
            return int(text)
        except ValueError:
            raise CorruptSampleError(
                f"the label at bytes [{start}, {stop}) of {store.url}/{name} is {text[:40]!r}, not an integer"
            ) from None

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="dalipipe-labels") as pool:
        labels = np.array(list(pool.map(label, wanted)), dtype=np.int64)
    return group_correlation(labels, np.array([place[0] for place in wanted])), len(labels)
