"""Several data sets read as one: samples, blocks and shards numbered on from set to set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields as dataclass_fields

import numpy as np

from dalipipe.errors import ConfigError
from dalipipe.shards.checksums import NOTE
from dalipipe.shards.digest import Digest128
from dalipipe.shards.fields import Field
from dalipipe.shards.header import Header, ShardTable
from dalipipe.shards.manifest import Manifest, Read


def join_manifests(parts: Mapping[str, Manifest], read_index: Read) -> Manifest:
    """The manifest over several data sets; shard `s.tar` of the set `a` is `a/s.tar` in it.

    Each set keeps its own blocks and labels: labels of two sets with other class names mean what they mean in their
    own set. A field is one that any of the sets has. The identity covers names, order and contents of the sets, so a
    state or a cache of one union is never taken for that of another. Memory: a copy of the shard columns.

    Args:
        parts: at least one, in the order in which samples are numbered.
        read_index: gives an index by its name in the union, `a/s.tar.idx`, and what lies beside it.

    Raises:
        ConfigError: sets of different kinds are joined.
    """
    kinds = {name: part.kind for name, part in parts.items()}
    if len(set(kinds.values())) > 1:
        raise ConfigError(f"data.mix joins sets of different kinds, {kinds}: batches hold one kind of sample")
    identity = Digest128()
    for name, part in parts.items():
        identity.update(f"{len(name.encode())}:{name}:{part.identity}\n".encode())
    classes = {part.classes for part in parts.values()}
    header = Header(
        kind=next(iter(kinds.values())),
        fields=_all_fields(list(parts.values())),
        classes=classes.pop() if len(classes) == 1 else (),
        block_samples=max(part.block_samples for part in parts.values()),
        num_samples=sum(part.num_samples for part in parts.values()),
        num_shards=sum(part.num_shards for part in parts.values()),
        num_bytes=sum(part.num_bytes for part in parts.values()),
        identity=identity.hex,
        made_by={NOTE: "of the sets"} if any(NOTE in part.made_by for part in parts.values()) else {},
    )
    shapes = {name: part.shape for name, part in parts.items()}
    return Manifest(header, _all_shards(parts), read_index, shapes=shapes)


def _all_fields(parts: list[Manifest]) -> tuple[Field, ...]:
    extensions: dict[str, set[str]] = {}
    for part in parts:
        for field in part.fields:
            extensions.setdefault(field.name, set()).update(field.extensions)
    return tuple(Field(name=name, extensions=tuple(sorted(extensions[name]))) for name in sorted(extensions))


def _all_shards(parts: Mapping[str, Manifest]) -> ShardTable:
    import pyarrow as pa
    import pyarrow.compute as pc

    tables = {name: part.files[1] for name, part in parts.items()}
    names = [pc.binary_join_element_wise(name, table.names, "/") for name, table in tables.items()]
    columns = {
        item.name: np.concatenate([getattr(table, item.name) for table in tables.values()])
        for item in dataclass_fields(ShardTable)
        if item.name != "names"
    }
    return ShardTable(names=pa.concat_arrays(names), **columns)
