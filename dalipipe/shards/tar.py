"""POSIX tar shards: a deterministic writer, and a walker over the members of a piece of a tar.

A shard holds its samples one after the other, the fields of a sample together (`key.cls`, `key.jpg`), as WebDataset
users know it. Everything that could differ between two runs (times, owners, modes) is fixed, so that equal samples
give equal bytes. Names that do not fit the 1988 header travel in PAX records.
"""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

from dalipipe.errors import IntegrityError
from dalipipe.shards.digest import Digest64

if TYPE_CHECKING:
    from typing_extensions import Buffer

RECORD_BYTES = 512
END_BYTES = 2 * RECORD_BYTES
"""The zeros that close an archive."""

_JOINED_BYTES = 2**16
_SHORT_NAME_CHARACTERS = 100
_SHORT_SIZE_BYTES = 8**11
_HEADER_MODE = b"0000644\0" + b"0000000\0" * 2
"""Mode, owner and group."""
_HEADER_TIME = b"\0" + b"00000000000\0"
"""The end of the size, and the time."""
_HEADER_REST = b"0" + bytes(100) + b"ustar\x0000" + bytes(32 + 32 + 8 + 8 + 155 + 12)
_HEADER_SUM = sum(_HEADER_MODE) + sum(_HEADER_TIME) + sum(_HEADER_REST) + 8 * ord(" ")

_PAX_LOCAL, _PAX_GLOBAL, _GNU_LONG_NAME, _GNU_LONG_LINK = b"x", b"g", b"L", b"K"
_REGULAR = (b"0", b"\0", b"7")
_HARD_LINK, _GNU_SPARSE = b"1", b"S"
_PASSED = {
    _HARD_LINK: "hard link",
    _GNU_SPARSE: "sparse",
    b"2": "symbolic link",
    b"3": "device",
    b"4": "device",
    b"5": "folder",
    b"6": "pipe",
}
_GZIP = b"\x1f\x8b"
BEHIND_THE_END = "behind the end"
_MOST_ZEROS_BYTES = 2**20
"""How far behind the end of an archive another is looked for; GNU tar fills its last 10 KiB with zeros."""
_ZEROS_PIECE_BYTES = 20 * RECORD_BYTES
_MOST_DIGITS = 19
"""Of a number of bytes that a PAX record states; `int` refuses thousands of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleExtent:
    """Where a sample lies in its shard.

    [start, stop): all its members with headers and padding. members: extension -> (offset, size) of the content.
    """

    start: int
    stop: int
    members: dict[str, tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TarMember:
    """A regular file in a piece of a tar: content at [offset, offset + num_bytes); whole member at [start, stop)."""

    name: str
    start: int
    offset: int
    num_bytes: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """What stands in a tar and is no regular file. kind: `hard link` (link: the member that it names), `symbolic link`,
    `folder`, `device`, `pipe`, `sparse`, `other`; `behind the end`: a member of any kind behind the zeros that close a
    tar, as of two that were joined by `cat`; `no end` where the tar stops without these zeros."""

    name: str
    kind: str
    link: str = ""


_Archive = Generator["TarMember | Passed", None, "int | None"]


def member_header(name: str, num_bytes: int) -> bytes:
    """The header of a regular file: ustar, with a PAX record before it where the name needs one."""
    if len(name) <= _SHORT_NAME_CHARACTERS and name.isascii() and num_bytes < _SHORT_SIZE_BYTES and "\0" not in name:
        return _short_header(name.encode(), num_bytes)
    info = tarfile.TarInfo(name)
    info.size = num_bytes
    info.mode = 0o644
    return info.tobuf(format=tarfile.PAX_FORMAT, encoding="utf-8", errors="strict")


def _short_header(name: bytes, num_bytes: int) -> bytes:
    """What `tarfile` writes for a short ASCII name, ten times as fast: only name, size and checksum differ."""
    size = b"%011o" % num_bytes
    checksum = _HEADER_SUM + sum(name) + sum(size)
    return b"".join(
        (name, bytes(100 - len(name)), _HEADER_MODE, size, _HEADER_TIME, b"%06o\0 " % checksum, _HEADER_REST)
    )


def padded(num_bytes: int) -> int:
    """`num_bytes` rounded up to whole tar records."""
    return -(-num_bytes // RECORD_BYTES) * RECORD_BYTES


def sample_bytes(key: str, sizes: Mapping[str, int]) -> int:
    """Bytes that a sample takes in a shard, headers and padding included. sizes: extension -> content bytes."""
    return sum(len(member_header(f"{key}.{ext}", size)) + padded(size) for ext, size in sizes.items())


class TarWriter:
    """Writes samples into a binary stream, hashing as it goes. Does not own the stream."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._whole = Digest64()
        self._piece = Digest64()
        self.offset = 0

    @property
    def digest(self) -> int:
        """The xxh3-64 of everything written so far."""
        return self._whole.value

    def add(self, key: str, members: Mapping[str, Buffer]) -> SampleExtent:
        """Appends a sample, its members sorted by extension.

        Raises:
            OSError: the stream cannot take it (ENOSPC).
        """
        start = self.offset
        placed: dict[str, tuple[int, int]] = {}
        for extension in sorted(members):
            content = memoryview(members[extension]).cast("B")
            header = member_header(f"{key}.{extension}", len(content))
            padding = bytes(padded(len(content)) - len(content))
            placed[extension] = (self.offset + len(header), len(content))
            if len(content) <= _JOINED_BYTES:  # copying these is cheaper than a call more
                self._write(b"".join((header, content, padding)))
                continue
            for part in (header, content, padding):
                self._write(part)
        return SampleExtent(start=start, stop=self.offset, members=placed)

    def cut(self) -> int:
        """The xxh3-64 of what was written since the last cut (or the start): the digest of a part of a block."""
        value, self._piece = self._piece.value, Digest64()
        return value

    def finish(self) -> None:
        """Writes the end of the archive."""
        self._write(bytes(END_BYTES))

    def _write(self, data: Buffer) -> None:
        self._stream.write(data)
        self._whole.update(data)
        self._piece.update(data)
        self.offset += memoryview(data).nbytes


def walk_tar(data: Buffer) -> Iterator[TarMember]:
    """Yields the regular files of a tar, or of a piece of one that starts and ends between members.

    Offsets are relative to `data`. Understands PAX paths and sizes and GNU long names; stops at the end of archive.

    Raises:
        IntegrityError: a header is torn, its checksum is wrong, or a member passes the end of `data`.
    """
    view = memoryview(data).cast("B")
    return scan_tar(lambda start, stop: view[start:stop], len(view))


def scan_tar(read: Callable[[int, int], Buffer], num_bytes: int) -> Iterator[TarMember]:
    """Yields the regular files of a tar of `num_bytes` as `walk_tar` does, but reads only headers and long names.

    Args:
        read: gives the bytes [start, stop) of the tar.
    """
    for entry in scan_entries(read, num_bytes):
        if isinstance(entry, TarMember):
            yield entry
        elif entry.kind == BEHIND_THE_END:
            return


def scan_entries(read: Callable[[int, int], Buffer], num_bytes: int) -> Iterator[TarMember | Passed]:
    """Yields the regular files of a tar as `scan_tar` does, and whatever else stands there, also behind its end.

    Args:
        read: gives the bytes [start, stop) of the tar.
    """
    end = yield from _scan_archive(read, 0, num_bytes)
    while end is not None:
        begin = _after_zeros(read, end, num_bytes)
        end = None if begin is None else (yield from _unseen(_scan_archive(read, begin, num_bytes)))


def _after_zeros(read: Callable[[int, int], Buffer], position: int, num_bytes: int) -> int | None:
    """Where the zeros from `position` on end, in whole records; None where nothing else comes."""
    stop = min(num_bytes, position + _MOST_ZEROS_BYTES)
    while position < stop:
        piece = bytes(read(position, min(position + _ZEROS_PIECE_BYTES, num_bytes)))
        rest_bytes = len(piece.lstrip(b"\0"))
        if rest_bytes:
            return position + (len(piece) - rest_bytes) // RECORD_BYTES * RECORD_BYTES
        position += len(piece)
    return None


def _unseen(archive: _Archive) -> _Archive:
    """The members of an archive behind the end of another: up to where it is none, or damaged."""
    while True:
        try:
            entry = next(archive)
        except StopIteration as done:
            end: int | None = done.value
            return end
        except IntegrityError:
            return None
        if isinstance(entry, TarMember) or entry.kind != "no end":
            yield Passed(name=entry.name, kind=BEHIND_THE_END)


def _scan_archive(read: Callable[[int, int], Buffer], position: int, num_bytes: int) -> _Archive:
    """The entries of an archive that begins at `position`. Returns where the zeros that close it begin, if they do."""
    start = position
    said = _Extended()
    while position < num_bytes:
        header = bytes(read(position, min(position + RECORD_BYTES, num_bytes)))
        if len(header) < RECORD_BYTES:
            raise IntegrityError(f"tar header at byte {position} is cut short ({len(header)} of {RECORD_BYTES} bytes)")
        if header.count(0) == RECORD_BYTES:
            return position
        content_bytes = _checked_size(header, position)
        kind = header[156:157]
        if kind in _REGULAR and said.num_bytes is not None:
            content_bytes = said.num_bytes
        offset = position + RECORD_BYTES
        if kind == _GNU_SPARSE:
            offset += _sparse_map_bytes(read, header, offset, num_bytes)
        stop = offset + padded(content_bytes)
        if stop > num_bytes:
            raise IntegrityError(f"tar member at byte {position} ({content_bytes} bytes) passes the end at {num_bytes}")
        if kind in (_PAX_LOCAL, _GNU_LONG_NAME, _GNU_LONG_LINK):
            said.take(kind, bytes(read(offset, offset + content_bytes)))
        elif kind != _PAX_GLOBAL:
            name = _short_name(header) if said.name is None else said.name
            if kind in _REGULAR and not said.sparse and not (kind == b"\0" and name.endswith("/")):
                yield TarMember(name=name, start=start, offset=offset, num_bytes=content_bytes, stop=stop)
            elif kind in _REGULAR:
                yield Passed(name=name, kind="sparse" if said.sparse else "folder")
            else:
                link = _text(header[157:257]) if said.link is None else said.link
                yield Passed(name=name, kind=_PASSED.get(kind, "other"), link=link)
            start, said = stop, _Extended()
        position = stop
    yield Passed(name="", kind="no end")
    return None


@dataclass(slots=True)
class _Extended:
    """What records before a member say about it."""

    name: str | None = None
    link: str | None = None
    num_bytes: int | None = None
    sparse: bool = False

    def take(self, kind: bytes, data: bytes) -> None:
        if kind == _GNU_LONG_NAME:
            self.name = _text(data)
        elif kind == _GNU_LONG_LINK:
            self.link = _text(data)
        else:
            records = _pax_records(data)
            path = records.get(b"GNU.sparse.name", records.get(b"path"))
            self.name = self.name if path is None else _text(path)
            self.link = _text(records[b"linkpath"]) if b"linkpath" in records else self.link
            size = records.get(b"size", b"")
            self.num_bytes = int(size[:_MOST_DIGITS]) if size.isdigit() else self.num_bytes
            self.sparse = self.sparse or any(key.startswith(b"GNU.sparse.") for key in records)


def _sparse_map_bytes(read: Callable[[int, int], Buffer], header: bytes, position: int, num_bytes: int) -> int:
    """The bytes of the records that go on with the map of an old GNU sparse member, which its size leaves out."""
    begin, more = position, header[482]
    while more:
        if position + RECORD_BYTES > num_bytes:
            raise IntegrityError(f"the map of a sparse tar member at byte {position} passes the end at {num_bytes}")
        more = bytes(read(position, position + RECORD_BYTES))[504]
        position += RECORD_BYTES
    return position - begin


def _checked_size(header: bytes, position: int) -> int:
    try:
        stated = _octal(header[148:156].strip(b" \0"))
        size_field = header[124:136]
        binary = size_field[0] & 0x80  # GNU's way to write sizes of 8 GiB and more
        num_bytes = int.from_bytes(size_field[1:], "big") if binary else _octal(size_field.strip(b" \0") or b"0")
    except ValueError as error:
        packed = "; it is compressed: name it .tar.gz" if position == 0 and header.startswith(_GZIP) else ""
        raise IntegrityError(f"no tar header at byte {position}: its number fields are not octal{packed}") from error
    found = sum(header) - sum(header[148:156]) + 8 * ord(" ")
    if stated != found:
        raise IntegrityError(f"no tar header at byte {position}: its checksum is {found}, it states {stated}")
    return num_bytes


def _octal(digits: bytes) -> int:
    # `int` takes signs and underscores too: a member of negative size would lead the walk back, for ever.
    if not digits.isdigit():
        raise ValueError(digits)
    return int(digits, 8)


def _short_name(header: bytes) -> str:
    name = _text(header[:100])
    prefix = _text(header[345:500]) if header[257:263] == b"ustar\0" else ""
    return f"{prefix}/{name}" if prefix else name


def _pax_records(data: bytes) -> dict[bytes, bytes]:
    """PAX records, each `LENGTH KEY=VALUE\\n` where LENGTH counts the whole record."""
    position = 0
    found: dict[bytes, bytes] = {}
    while position < len(data):
        length = data[position:].split(b" ", 1)[0]
        if not length.isdigit() or len(length) > _MOST_DIGITS or int(length) <= len(length) + 1:
            break
        key, _, value = data[position + len(length) + 1 : position + int(length) - 1].partition(b"=")
        found[key] = value
        position += int(length)
    return found


def _text(raw: bytes) -> str:
    return raw.split(b"\0", 1)[0].decode("utf-8", "surrogateescape")
