"""Tables beside or instead of image files: CSV, JSONL or Parquet of labels, and Parquet that holds images."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dalipipe.errors import ConfigError, CorruptSampleError, ObjectNotFoundError, SourceError
from dalipipe.packing.config import ColumnsConfig
from dalipipe.packing.sample import Member, text_member
from dalipipe.shards.imageheader import parse_image_header
from dalipipe.storage.store import ObjectInfo, Store

_FILE = ("file_name", "file", "filename", "path", "image")
_IMAGE = ("image", "img", "jpg", "png", "image_bytes", "bytes")
_LABEL = ("label", "class", "cls", "target")
_CAPTION = ("caption", "text", "txt", "prompt")
_EXTENSIONS = {"jpeg": "jpg", "tiff": "tif", "jpeg2000": "jp2", "jp2": "jp2"}
_BATCH_ROWS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """A table of labels: members of each file beside its image, by path; class names by label where it has names."""

    name: str
    info: ObjectInfo
    rows: dict[str, tuple[Member, ...]]
    classes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chosen:
    """The columns of a table by what they mean; those without a meaning go into `json`."""

    label: str | None
    caption: str | None
    others: tuple[str, ...]

    def members(self, row: Mapping[str, Any]) -> tuple[Member, ...]:
        """What a row says beside its image. A class name stays a name here."""
        found = []
        if self.label is not None and row[self.label] is not None:
            found.append(text_member("cls", str(row[self.label])))
        if self.caption is not None and row[self.caption] is not None:
            found.append(text_member("txt", str(row[self.caption])))
        if self.others:
            said = {name: row[name] for name in self.others}
            found.append(text_member("json", json.dumps(said, ensure_ascii=False, default=str)))
        return tuple(found)


def read_labels(store: Store, name: str, columns: ColumnsConfig) -> Labels:
    """Reads a table of labels and captions by file.

    Raises:
        SourceError: it is missing, cannot be parsed, or names a file twice.
        ConfigError: a column is missing, or the name has no known ending.
    """
    try:
        info, data = store.head(name), bytes(store.read(name))
    except ObjectNotFoundError as error:
        raise SourceError(f"pack.labels={name!r}: {error}; give its path within the source") from error
    table = _parse(name, data)
    file = _choose("file", columns.file, _FILE, table.column_names, name)
    assert file is not None
    chosen = _meanings(columns, [column for column in table.column_names if column != file], name)
    rows: dict[str, tuple[Member, ...]] = {}
    for batch in table.to_batches(max_chunksize=_BATCH_ROWS * 64):
        for row in batch.to_pylist():
            path = str(row[file]).removeprefix("./")
            if path in rows:
                raise SourceError(f"{store.url}/{name} names {path!r} twice; one row a file")
            rows[path] = chosen.members(row)
    if not rows:
        raise SourceError(f"{store.url}/{name} has no row")
    classes, numbered = number_classes(list(rows.values()))
    return Labels(name=name, info=info, rows=dict(zip(rows, numbered, strict=True)), classes=classes)


def number_classes(
    samples: Sequence[tuple[Member, ...]],
) -> tuple[tuple[str, ...], list[tuple[Member, ...]]]:
    """The class names (sorted; empty where every label is a number), and the members with a number for each name."""
    names = {m.data for members in samples for m in members if m.extension == "cls" and m.data is not None}
    if all(_is_number(name) for name in names):
        return (), list(samples)
    classes = tuple(sorted(name.decode("utf-8", "surrogatepass") for name in names))
    number = {name.encode("utf-8", "surrogatepass"): text_member("cls", str(i)) for i, name in enumerate(classes)}
    return classes, [
        tuple(number[m.data] if m.extension == "cls" and m.data is not None else m for m in members)
        for members in samples
    ]


def parquet_samples(path: str, name: str, columns: ColumnsConfig) -> Iterator[tuple[bytes, str, tuple[Member, ...]]]:
    """(image bytes, extension, other members) of each row of a local Parquet file, some rows in memory at a time.

    Raises:
        SourceError: the file cannot be read; says so for `name`.
        ConfigError: no column holds images.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            schema = file.schema_arrow
            binary = [f.name for f in schema if _holds_bytes(f.type)]
            image = _choose("image", columns.image, (*_IMAGE, *binary[:1]), binary, name)
            assert image is not None
            chosen = _meanings(columns, [column for column in schema.names if column not in binary], name)
            names = _class_names(schema, chosen.label)
            for batch in file.iter_batches(batch_size=_BATCH_ROWS):
                for row in batch.to_pylist():
                    value = row.pop(image)
                    data = value["bytes"] if isinstance(value, dict) else value
                    if names and isinstance(row[chosen.label], int) and 0 <= row[chosen.label] < len(names):
                        row[chosen.label] = names[row[chosen.label]]
                    yield data or b"", _extension(data or b""), chosen.members(row)
    except (pa.ArrowException, OSError) as error:
        raise SourceError(f"{name} cannot be read as Parquet: {error}; copy it again from where it is whole") from error


def _parse(name: str, data: bytes) -> Any:
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.json
    import pyarrow.parquet

    ending = name.rpartition(".")[2].lower()
    readers = {
        "csv": lambda: pyarrow.csv.read_csv(io.BytesIO(data)),
        "tsv": lambda: pyarrow.csv.read_csv(io.BytesIO(data), parse_options=pyarrow.csv.ParseOptions(delimiter="\t")),
        "jsonl": lambda: pyarrow.json.read_json(io.BytesIO(data)),
        "parquet": lambda: pyarrow.parquet.read_table(io.BytesIO(data)),
    }
    if ending not in readers:
        raise ConfigError(f"pack.labels={name!r} must end in .csv, .tsv, .jsonl or .parquet")
    try:
        return readers[ending]()
    except (pa.ArrowException, OSError) as error:
        raise SourceError(f"pack.labels={name!r} cannot be read: {error}") from error


def _meanings(columns: ColumnsConfig, names: Sequence[str], where: str) -> _Chosen:
    label = _choose("label", columns.label, _LABEL, names, where, needed=False)
    caption = _choose("caption", columns.caption, _CAPTION, names, where, needed=False)
    return _Chosen(label=label, caption=caption, others=tuple(n for n in names if n not in (label, caption)))


def _choose(
    meaning: str, given: str, usual: Sequence[str], names: Sequence[str], where: str, *, needed: bool = True
) -> str | None:
    if given and given not in names:
        raise ConfigError(f"pack.columns.{meaning}={given!r}: {where} has the columns {', '.join(names) or 'none'}")
    found = given or next((name for name in usual if name in names), None)
    if found is None and needed:
        raise ConfigError(
            f"{where} has no column that could be the {meaning}: looked for {', '.join(usual)} among "
            f"{', '.join(names) or 'none'}; set pack.columns.{meaning}"
        )
    return found


def _is_number(label: bytes) -> bool:
    return label.isdigit() or (label.startswith(b"-") and label[1:].isdigit())


def _holds_bytes(kind: Any) -> bool:
    import pyarrow as pa

    if pa.types.is_struct(kind):
        return any(field.name == "bytes" and _holds_bytes(field.type) for field in kind)
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _class_names(schema: Any, label: str | None) -> list[str]:
    """The names that a label column of Hugging Face data sets has in the file's metadata."""
    if label is None:
        return []
    try:
        said = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        names = said["info"]["features"][label]["names"]
    except (KeyError, TypeError, ValueError):
        return []
    return [str(name) for name in names]


def _extension(data: bytes) -> str:
    """Bytes of no known format are called jpg; the check finds them."""
    try:
        codec = parse_image_header(memoryview(data)).codec
    except CorruptSampleError:
        return "jpg"
    return _EXTENSIONS.get(codec, codec)
