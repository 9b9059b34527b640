"""Tars that nobody wrote: files of a folder, seen as the tar that packing them would write.

A virtual tar is a name that ends in `.vtar`. It has an index as any shard, and beside it a table (`NAME.vtar.members`)
that says which file lies where in it. Headers and padding are made up as they are read, contents come from the files;
so blocks, caches, checksums, logical shards and `verify` need not know that there is no such file.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dalipipe.errors import ConfigError, IntegrityError, ManifestError, ObjectNotFoundError, StorageError
from dalipipe.shards.digest import digest64
from dalipipe.shards.tar import END_BYTES, SampleExtent, member_header, padded
from dalipipe.storage.coalesce import read_each
from dalipipe.storage.linked import LinkedStore
from dalipipe.storage.store import ObjectInfo, Store
from dalipipe.storage.url import is_link, link_target, strip_slash

if TYPE_CHECKING:
    from typing_extensions import Buffer

ENDING = ".vtar"
FORMAT = b"dalipipe-members-1"
_DIGEST_BYTES = 8
_MAX_TABLES = 64
_THREADS = 16
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualMember:
    """A member of a virtual tar: `num_bytes` of the file `path` (relative to the root of the table), or `data`."""

    extension: str
    num_bytes: int
    path: str = ""
    data: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Members:
    """The table of a virtual tar, n members in the order they lie in it.

    root: where paths begin: a link as shards have them, or empty for the folder of the data set. starts, offsets,
    sizes: int64 [n]: where the header of each begins, where its content lies and its bytes. names, paths, data: pyarrow
    columns (data is null where the content is a file's).
    """

    root: str
    starts: Ints
    offsets: Ints
    sizes: Ints
    names: Any
    paths: Any
    data: Any

    @property
    def num_bytes(self) -> int:
        """Of the whole tar, its end included."""
        return int(self.offsets[-1]) + padded(int(self.sizes[-1])) + END_BYTES


def is_virtual(shard: str) -> bool:
    """Whether a shard's name is one of a virtual tar."""
    return shard.endswith(ENDING)


def members_name(shard: str) -> str:
    """The name of the table of a virtual tar."""
    return f"{shard}.members"


def lay_out(samples: Sequence[tuple[str, Sequence[VirtualMember]]], root: str) -> tuple[list[SampleExtent], int, bytes]:
    """The tar that samples (key, members) would make, as `TarWriter` lays it out.

    Returns: the extent of each sample, the bytes of the whole tar, and its table: the digest of what follows (8 bytes,
    little-endian), then an Arrow IPC file.
    """
    import pyarrow as pa

    extents: list[SampleExtent] = []
    columns: dict[str, list[Any]] = {name: [] for name in ("name", "start", "offset", "num_bytes", "path", "data")}
    at = 0
    for key, members in samples:
        begin, placed = at, {}
        for member in sorted(members, key=lambda one: one.extension):
            name = f"{key}.{member.extension}"
            offset = at + len(member_header(name, member.num_bytes))
            row = (name, at, offset, member.num_bytes, member.path, member.data)
            for column, value in zip(columns.values(), row, strict=True):
                column.append(value)
            placed[member.extension] = (offset, member.num_bytes)
            at = offset + padded(member.num_bytes)
        extents.append(SampleExtent(start=begin, stop=at, members=placed))
    kinds = (pa.string(), pa.int64(), pa.int64(), pa.int64(), pa.string(), pa.binary())
    arrays = [pa.array(column, kind) for column, kind in zip(columns.values(), kinds, strict=True)]
    batch = pa.record_batch(arrays, names=list(columns))
    batch = batch.replace_schema_metadata({"format": FORMAT, "said": json.dumps({"root": root})})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    body = bytes(sink.getvalue())
    return extents, at + END_BYTES, digest64(body).to_bytes(_DIGEST_BYTES, "little") + body


def open_members(data: Buffer, name: str) -> Members:
    """Reads a table.

    Raises:
        ManifestError: it is damaged or of another version; names `name`.
    """
    import pyarrow as pa

    view = memoryview(data).cast("B")
    body = bytes(view[_DIGEST_BYTES:])
    if digest64(body) != int.from_bytes(view[:_DIGEST_BYTES], "little"):
        raise ManifestError(f"{name} is damaged ({len(view)} bytes found): its digest is not its own; index again")
    try:
        reader = pa.ipc.open_file(pa.py_buffer(body))
        metadata = reader.schema.metadata or {}
        if metadata.get(b"format") != FORMAT:
            raise ManifestError(f"{name} is no table of version {FORMAT.decode()}; index again")
        batch = reader.get_batch(0)
        return Members(
            root=str(json.loads(metadata[b"said"])["root"]),
            starts=batch.column("start").to_numpy(),
            offsets=batch.column("offset").to_numpy(),
            sizes=batch.column("num_bytes").to_numpy(),
            names=batch.column("name"),
            paths=batch.column("path"),
            data=batch.column("data"),
        )
    except (pa.ArrowException, OSError, KeyError, TypeError, ValueError) as error:
        raise ManifestError(f"{name} cannot be read ({error}); index again") from error


@dataclass(frozen=True, slots=True)
class _Piece:
    """Bytes [start, stop) of a file that had `num_bytes` when it was listed, and where they go."""

    path: str
    num_bytes: int
    start: int
    stop: int
    into: memoryview


class DatasetStore:
    """The store of a data set: its objects, what it links to (`LinkedStore`), and its virtual tars (read only).

    Files of a virtual tar in an object store are read in parallel. Memory: the tables of 64 virtual tars, about 100
    bytes a member.

    Args:
        open_at: opens the store of a URL.
    """

    def __init__(self, url: str, open_at: Callable[[str], Store]) -> None:
        self._store = LinkedStore(url, open_at)
        # `Store.url` is for messages; files are reached with the same password.
        self._base = strip_slash(url) if "://" in self._store.url else self._store.url
        self._open_at = open_at
        self._lock = threading.Lock()
        self._tables: OrderedDict[str, Members] = OrderedDict()
        self._roots: dict[str, Store] = {}
        self._pool: ThreadPoolExecutor | None = None

    @property
    def url(self) -> str:
        """As `Store.url`."""
        return self._store.url

    def head(self, key: str) -> ObjectInfo:
        """As `Store.head`; a virtual tar has the size that its table gives it, whatever became of its files."""
        if not is_virtual(key):
            return self._store.head(key)
        return ObjectInfo(key=key, num_bytes=self._members(key).num_bytes)

    def read(self, key: str, start: int = 0, stop: int | None = None, *, into: memoryview | None = None) -> memoryview:
        """As `Store.read`.

        Raises:
            IntegrityError: a file of a virtual tar has not the bytes that were listed; names it.
            ManifestError: the table of the virtual tar is missing or damaged.
        """
        if not is_virtual(key):
            return self._store.read(key, start, stop, into=into)
        members = self._members(key)
        stop = members.num_bytes if stop is None else stop
        if not 0 <= start <= stop:
            raise ConfigError(f"bytes [{start}, {stop}) of {self.url}/{key} are no range")
        if stop > members.num_bytes:
            raise StorageError(f"bytes [{start}, {stop}) of {self.url}/{key} pass its end at {members.num_bytes}")
        if into is not None and len(into) < stop - start:
            raise ConfigError(f"a buffer of {len(into)} bytes cannot take [{start}, {stop}) of {self.url}/{key}")
        view = np.zeros(stop - start, np.uint8).data if into is None else into[: stop - start]
        if into is not None:
            view[:] = bytes(len(view))
        self._fill(members, self._root(key, members.root), start, stop, view)
        return view

    def read_many(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """As `ReadsMany.read_many`. Raises as `read`."""
        if not is_virtual(key):
            return read_each(self._store, key, ranges)
        return [self.read(key, start, stop) for start, stop in ranges]

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """The objects that are there."""
        return self._store.list(prefix)

    def put(self, key: str, data: bytes | memoryview | Path, *, if_absent: bool = False) -> None:
        """As `Store.put`. Raises ConfigError for a virtual tar."""
        if is_virtual(key):
            raise ConfigError(f"{self.url}/{key} stands for the files it lists and cannot be written")
        self._store.put(key, data, if_absent=if_absent)

    def delete(self, key: str) -> None:
        """As `Store.delete`."""
        self._store.delete(key)

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            pool, self._pool = self._pool, None
            roots, self._roots = list(self._roots.values()), {}
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)  # each read has a deadline of its own
        for store in (*roots, self._store):
            store.close()

    def _members(self, key: str) -> Members:
        with self._lock:
            members = self._tables.get(key)
            if members is not None:
                self._tables.move_to_end(key)
                return members
        name = members_name(key)
        try:
            members = open_members(self._store.read(name), f"{self.url}/{name}")
        except ObjectNotFoundError as error:
            raise ManifestError(f"{self.url}/{name} is missing: {error}; index again") from error
        with self._lock:
            self._tables[key] = members
            while len(self._tables) > _MAX_TABLES:
                self._tables.popitem(last=False)
        return members

    def _root(self, key: str, root: str) -> Store:
        """The store that paths of a table are relative to; the table may lie in another data set."""
        base = link_target(self._base, key)[0] if is_link(key) else self._base
        if root:
            base = link_target(base, f"{root}/x")[0]
        with self._lock:
            store = self._roots.get(base)
            if store is None:
                store = self._roots[base] = self._open_at(base)
        return store

    def _fill(self, members: Members, root: Store, start: int, stop: int, view: memoryview) -> None:
        """Writes the bytes [start, stop) of a tar into `view`, which holds zeros."""
        first = max(0, int(np.searchsorted(members.starts, start, side="right")) - 1)
        files: list[_Piece] = []
        for row in range(first, len(members.starts)):
            begin, offset, num_bytes = int(members.starts[row]), int(members.offsets[row]), int(members.sizes[row])
            if begin >= stop:
                break
            if start < offset:
                header = member_header(members.names[row].as_py(), num_bytes)
                a, b = max(start, begin), min(stop, offset)
                view[a - start : b - start] = header[a - begin : b - begin]
            a, b = max(start, offset), min(stop, offset + num_bytes)
            if a >= b:
                continue
            data = members.data[row].as_py()
            if data is None:
                path = members.paths[row].as_py()
                files.append(_Piece(path, num_bytes, a - offset, b - offset, view[a - start : b - start]))
            else:
                view[a - start : b - start] = data[a - offset : b - offset]
        self._read_files(root, files)

    def _read_files(self, root: Store, files: Sequence[_Piece]) -> None:
        if len(files) < 2 or "://" not in root.url:
            for file in files:
                _read_file(root, file)
            return
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="virtual-tar")
            pool = self._pool
        for done in [pool.submit(_read_file, root, file) for file in files]:
            done.result()


def _read_file(store: Store, piece: _Piece) -> None:
    try:
        if (piece.start, piece.stop) != (0, piece.num_bytes):
            store.read(piece.path, piece.start, piece.stop, into=piece.into)
            return
        data = store.read(piece.path)
    except ObjectNotFoundError as error:
        raise ObjectNotFoundError(f"{error}; it was there when it was indexed: restore it, or index again") from error
    if len(data) != piece.num_bytes:
        raise IntegrityError(
            f"{store.url}/{piece.path} has {len(data)} bytes, it had {piece.num_bytes} when it was indexed; "
            "restore it, or index again"
        )
    piece.into[:] = data
