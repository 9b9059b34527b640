"""The data set that a configuration names: its store, its manifest, and what of it comes more often."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dalipipe.errors import ConfigError
from dalipipe.shards.config import DataConfig, repeats_by_source, source_urls
from dalipipe.storage.store import StorageConfig, Store
from dalipipe.telemetry import Recorder

if TYPE_CHECKING:
    from dalipipe.order.repeat import Extra, Repeat
    from dalipipe.shards.manifest import Manifest
    from dalipipe.wiring.config import LoadConfig


def open_dataset(cfg: LoadConfig, recorder: Recorder) -> tuple[Store, Manifest, dict[str, Manifest]]:
    """Opens the store and the manifest that the data are read through, and the manifest of each set of a mix.

    Shard indices are kept on the node, with those of whoever reads the same set alone.
    """
    from dalipipe.shards.union import join_manifests
    from dalipipe.storage.union import UnionStore

    stores: dict[str, Store] = {}
    parts: dict[str, Manifest] = {}
    try:
        for name, url in source_urls(cfg.data).items():
            stores[name], parts[name] = _open_part(replace(cfg.data, url=url), cfg, recorder)
        if not cfg.data.mix:
            return stores[""], parts[""], parts

        def read_index(name: str) -> bytes | memoryview:
            part = max((part for part in parts if name.startswith(f"{part}/")), key=len)
            return parts[part].read_index(name[len(part) + 1 :])

        return UnionStore(stores), join_manifests(parts, read_index), parts
    except BaseException:
        for store in stores.values():
            store.close()
        raise


def open_manifest(data: DataConfig, storage: StorageConfig) -> tuple[Store, Manifest]:
    """Opens the store of `data.url` and its manifest, as `info` and `verify` need it."""
    from dalipipe.shards.manifest import Manifest

    store = _open_store(data, storage)
    return store, Manifest.open(store.read)


def find_repeats(data: DataConfig, parts: Mapping[str, Manifest]) -> dict[str, list[Repeat | Extra]]:
    """What `data.repeat` names, by set, as blocks and samples.

    Raises:
        ConfigError: a name is unknown or ambiguous, or a class is to come less often than once.
    """
    from dalipipe.order.repeat import Extra, Repeat
    from dalipipe.shards.selection import select

    found: dict[str, list[Repeat | Extra]] = {}
    for part, factors in repeats_by_source(data).items():
        for name, factor in factors.items():
            chosen = select(parts[part], name)
            own = found.setdefault(part, [])
            own += [Repeat(start=start, stop=stop, factor=factor) for start, stop in chosen.blocks]
            if chosen.samples is not None:
                if factor < 1:
                    raise ConfigError(
                        f"data.repeat.{name}={factor}: a class can come more often, not less: its samples share blocks "
                        "with others; leave it out when packing, or name shards"
                    )
                own.append(Extra(ids=chosen.samples, copies=factor - 1))
    return found


def check_fields(data: DataConfig, parts: Mapping[str, Manifest]) -> None:
    """Refuses `data.fields` that a data set of the mix lacks. Raises ConfigError."""
    for part, manifest in parts.items():
        known = [item.name for item in manifest.fields]
        missing = [name for name in data.fields if name not in known]
        if missing:
            which = f"the data set {part!r} of the mix" if part else "the data set"
            raise ConfigError(f"data.fields: {', '.join(missing)} not in {which}, which has {', '.join(known)}")


def _open_part(data: DataConfig, cfg: LoadConfig, recorder: Recorder) -> tuple[Store, Manifest]:
    from dalipipe.cache.indices import NodeIndices
    from dalipipe.cache.measured import MeasuredStore
    from dalipipe.shards.manifest import Manifest

    store = MeasuredStore(_open_store(data, cfg.storage, recorder), recorder)

    def read_index(name: str) -> bytes | memoryview:
        return NodeIndices(Path(cfg.cache.dir, manifest.identity, "indices"), store, recorder).read(name)

    manifest = Manifest.open(store.read, read_index)
    return store, manifest


def _open_store(data: DataConfig, storage: StorageConfig, recorder: Recorder | None = None) -> Store:
    from dalipipe.shards.virtual import DatasetStore
    from dalipipe.storage.open import open_store

    if not data.url:
        raise ConfigError("data.url is required: the folder or bucket prefix that holds manifest.json")
    record = (recorder or Recorder()).add
    return DatasetStore(data.url, lambda url: open_store(url, storage, record=record))
