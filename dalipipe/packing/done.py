"""The done record of one shard: kept beside the shards until the manifest is written, so that a killed pack resumes.

It says which plan the shard belongs to and all that its index will need, so the manifest is put together from done
records alone, whether they are a second or a week old.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dalipipe.shards.digest import digest64
from dalipipe.shards.index import Rows

if TYPE_CHECKING:
    from typing_extensions import Buffer

FOLDER = ".pack"
_DIGEST_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantined:
    """An image that was left out: its path in the source, why, its bytes and their xxh3-64 in hexadecimal."""

    path: str
    reason: str
    num_bytes: int
    xxh3: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardDone:
    """A written shard. `part_digests` hold for the block grid of a shard that starts where it was planned to."""

    plan: str
    name: str
    num_bytes: int
    digest: int
    part_digests: Sequence[int]
    extensions: Sequence[str]
    rows: Rows
    quarantined: Sequence[Quarantined]


def record_name(shard: str) -> str:
    """The key of the done record of a shard."""
    return f"{FOLDER}/{shard}.done"


def encode_done(done: ShardDone) -> bytes:
    """Writes a done record: the digest of what follows (8 bytes, little-endian), then an Arrow IPC file."""
    import pyarrow as pa

    rows = done.rows
    columns: dict[str, Any] = {"key": pa.array(rows.keys, pa.string()), "start": rows.starts, "stop": rows.stops}
    for name, (offsets, sizes) in rows.fields.items():
        columns |= {f"{name}.offset": offsets, f"{name}.size": sizes}
    columns |= {side: np.ascontiguousarray(rows.sizes[:, i]) for i, side in enumerate(("height", "width"))}
    said = {
        "plan": done.plan,
        "name": done.name,
        "num_bytes": done.num_bytes,
        "digest": done.digest,
        "part_digests": list(done.part_digests),
        "extensions": list(done.extensions),
        "quarantined": [asdict(entry) for entry in done.quarantined],
    }
    batch = pa.record_batch({name: pa.array(column) for name, column in columns.items()})
    batch = batch.replace_schema_metadata({"done": json.dumps(said)})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    body = bytes(sink.getvalue())
    return digest64(body).to_bytes(_DIGEST_BYTES, "little") + body


def decode_done(data: Buffer) -> ShardDone | None:
    """Reads a done record; None when it is not one (damaged, or of another version): the shard is written again."""
    import pyarrow as pa

    view = memoryview(data).cast("B")
    # A damaged Arrow file is never parsed; the copy aligns the columns.
    body = bytes(view[_DIGEST_BYTES:])
    if digest64(body) != int.from_bytes(view[:_DIGEST_BYTES], "little"):
        return None
    try:
        reader = pa.ipc.open_file(pa.py_buffer(body))
        said = json.loads(reader.schema.metadata[b"done"])
        batch = reader.get_batch(0)
        columns = {name: batch.column(name).to_numpy() for name in batch.schema.names if name != "key"}
        offsets = [name for name in columns if name.endswith(".offset")]
        rows = Rows(
            keys=batch.column("key").to_pylist(),
            starts=columns["start"],
            stops=columns["stop"],
            fields={n.removesuffix(".offset"): (columns[n], columns[f"{n[:-7]}.size"]) for n in offsets},
            sizes=np.stack([columns["height"], columns["width"]], axis=1).astype(np.int32),
        )
        quarantined = [Quarantined(**entry) for entry in said.pop("quarantined")]
        return ShardDone(rows=rows, quarantined=quarantined, **said)
    except (pa.ArrowException, OSError, KeyError, TypeError, ValueError):
        return None
