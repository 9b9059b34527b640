"""`manifest.json` and `shards.arrow`: the two small files of a manifest, and the identity over what they say."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dalipipe.errors import ManifestError
from dalipipe.shards.digest import Digest128, digest64
from dalipipe.shards.fields import Field

if TYPE_CHECKING:
    from typing_extensions import Buffer

HEADER_NAME = "manifest.json"
SHARDS_NAME = "shards.arrow"
FORMAT = "dalipipe-manifest"
VERSION = 1

_COLUMNS = {
    "name": "string",
    "bytes": "int64",
    "samples": "int64",
    "checksum": "uint64",
    "index_checksum": "uint64",
    "index_content": "uint64",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What `manifest.json` says. `shards_checksum` (xxh3-64 of `shards.arrow`, so that no damaged file is parsed) and
    `made_by` are no part of the identity."""

    kind: str
    fields: tuple[Field, ...]
    classes: tuple[str, ...]
    block_samples: int
    num_samples: int
    num_shards: int
    num_bytes: int
    identity: str = ""
    shards_checksum: int = 0
    made_by: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardTable:
    """What `shards.arrow` says, by column, views over the file's bytes: `names` is a pyarrow string array."""

    names: Any
    num_bytes: npt.NDArray[np.int64]
    num_samples: npt.NDArray[np.int64]
    checksums: npt.NDArray[np.uint64]
    index_checksums: npt.NDArray[np.uint64]
    index_contents: npt.NDArray[np.uint64]


def encode_shards(
    *,
    names: Sequence[str],
    num_bytes: Sequence[int],
    num_samples: Sequence[int],
    checksums: Sequence[int],
    index_checksums: Sequence[int],
    index_contents: Sequence[int],
) -> bytes:
    """Writes `shards.arrow`, one row a shard, in one record batch so that its columns can be mapped without a copy."""
    import pyarrow as pa

    values = (names, num_bytes, num_samples, checksums, index_checksums, index_contents)
    arrays = [pa.array(v, pa.type_for_alias(kind)) for v, kind in zip(values, _COLUMNS.values(), strict=True)]
    batch = pa.record_batch(arrays, names=list(_COLUMNS))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


def decode_shards(data: Buffer, checksum: int) -> ShardTable:
    """Reads `shards.arrow`, whose xxh3-64 must be `checksum`.

    Raises:
        ManifestError: it is torn, of another data set, or has other columns.
    """
    import pyarrow as pa

    found_checksum = digest64(data)
    if found_checksum != checksum:
        raise ManifestError(
            f"{SHARDS_NAME} has digest {found_checksum:016x} ({memoryview(data).nbytes} bytes found), {HEADER_NAME} "
            f"states {checksum:016x}: it is torn, damaged or of another data set; copy or pack again"
        )

    try:
        reader = pa.ipc.open_file(pa.py_buffer(data))
        found = {f.name: str(f.type) for f in reader.schema}
        if found != _COLUMNS or reader.num_record_batches != 1:
            raise ManifestError(f"{SHARDS_NAME} has columns {found}, expected {_COLUMNS}; pack again")
        batch = reader.get_batch(0)
        batch.validate(full=True)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ManifestError(f"{SHARDS_NAME} cannot be read ({error}); pack again") from error
    name, *numbers = (batch.column(c) for c in _COLUMNS)
    if any(column.null_count for column in (name, *numbers)):
        raise ManifestError(f"{SHARDS_NAME} has empty cells: it is damaged; pack again")
    columns = [column.to_numpy(zero_copy_only=True) for column in numbers]
    return ShardTable(
        names=name,
        num_bytes=columns[0],
        num_samples=columns[1],
        checksums=columns[2],
        index_checksums=columns[3],
        index_contents=columns[4],
    )


def encode_header(header: Header) -> bytes:
    """Writes `manifest.json`."""
    said = {
        "format": FORMAT,
        "version": VERSION,
        "identity": header.identity,
        "shards_checksum": f"{header.shards_checksum:016x}",
        "kind": header.kind,
        "num_samples": header.num_samples,
        "num_shards": header.num_shards,
        "num_bytes": header.num_bytes,
        "block_samples": header.block_samples,
        "fields": [{"name": f.name, "extensions": list(f.extensions)} for f in header.fields],
        "classes": list(header.classes),
        "made_by": header.made_by,
    }
    return (json.dumps(said, indent=1, ensure_ascii=False) + "\n").encode()


def decode_header(data: Buffer) -> Header:
    """Reads `manifest.json`.

    Raises:
        ManifestError: it is torn, no manifest, or of another version.
    """
    try:
        said = json.loads(bytes(data))
    except ValueError as error:
        raise ManifestError(
            f"{HEADER_NAME} is not JSON ({error}; {len(bytes(data))} bytes found): it is torn; copy or pack again"
        ) from error
    if not isinstance(said, dict) or said.get("format") != FORMAT:
        raise ManifestError(f'{HEADER_NAME} is not a dalipipe manifest: expected "format": "{FORMAT}"')
    if said.get("version") != VERSION:
        raise ManifestError(
            f"{HEADER_NAME} has version {said.get('version')!r}, this dalipipe reads version {VERSION}; "
            "use the dalipipe that wrote it, or pack again"
        )
    try:
        header = Header(
            kind=str(said["kind"]),
            fields=tuple(Field(name=f["name"], extensions=tuple(f["extensions"])) for f in said["fields"]),
            classes=tuple(map(str, said["classes"])),
            block_samples=int(said["block_samples"]),
            num_samples=int(said["num_samples"]),
            num_shards=int(said["num_shards"]),
            num_bytes=int(said["num_bytes"]),
            identity=str(said["identity"]),
            shards_checksum=int(said["shards_checksum"], 16),
            made_by={str(k): str(v) for k, v in said.get("made_by", {}).items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ManifestError(f"{HEADER_NAME} lacks or garbles an entry ({error!r}); copy or pack again") from error
    if header.block_samples < 1 or header.num_samples < 1:
        raise ManifestError(f"{HEADER_NAME}: block_samples and num_samples must be at least 1, found {header}")
    return header


def identity_of(header: Header, shards: ShardTable) -> str:
    """The xxh3-128 over what a manifest says, as 32 hexadecimal digits.

    Raises:
        ManifestError: header and shard table do not have the same counts.
    """
    counts = (len(shards.names), int(shards.num_samples.sum()), int(shards.num_bytes.sum()))
    stated = (header.num_shards, header.num_samples, header.num_bytes)
    if counts != stated or (shards.num_samples < 1).any():
        raise ManifestError(
            f"{HEADER_NAME} states (shards, samples, bytes) = {stated}, {SHARDS_NAME} has {counts}; "
            "the two are of different data sets, or damaged: copy or pack again"
        )
    digest = Digest128()
    bare = replace(header, identity="", shards_checksum=0, made_by={})
    digest.update(encode_header(bare))
    for name in shards.names:
        digest.update(name.as_py().encode() + b"\0")
    for column in (shards.num_bytes, shards.num_samples, shards.checksums, shards.index_contents):
        digest.update(column.astype(column.dtype.newbyteorder("<")).tobytes())
    return digest.hex
