"""How WebDataset users name things: which members of a tar make one sample."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dalipipe.errors import IntegrityError
from dalipipe.shards.tar import TarMember

if TYPE_CHECKING:
    from typing_extensions import Buffer


@dataclass(slots=True, kw_only=True)
class Group:
    """The members of one sample by extension, in the order they lie in the tar."""

    key: str
    members: dict[str, TarMember] = field(default_factory=dict)


def split_name(name: str, dots: str = "first") -> tuple[str, str] | None:
    """Key and extension of a member. None for one that is no part of a sample (no extension, hidden, `__meta__`).

    Args:
        dots: where the extension starts: at the `first` dot of the last part of the name, as WebDataset has it
            (`a.seg.png`: key `a`, extension `seg.png`), or at the `last` one (key `a.seg`, extension `png`).

    Raises:
        IntegrityError: the name leads out of the folder it would be unpacked into.
    """
    parts = name.split("/")
    if name.startswith("/") or ".." in parts:
        raise IntegrityError(f"member {name!r} leads out of its folder (an absolute path, or '..')")
    parts = [part for part in parts if part not in ("", ".")]
    if not parts or parts[0].startswith("__") or any(part.startswith(".") for part in parts):
        return None
    stem, dot, extension = parts[-1].partition(".") if dots == "first" else parts[-1].rpartition(".")
    if not (stem and dot and extension):
        return None
    return "/".join([*parts[:-1], stem]), extension.lower()


def why_no_part(name: str) -> str:
    """Why `split_name` gives None for a name: `hidden`, `meta` (a name that begins with `__`) or `no extension`."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if parts and parts[0].startswith("__"):
        return "meta"
    return "hidden" if any(part.startswith(".") for part in parts) else "no extension"


def group_neighbours(members: Iterable[TarMember], dots: str = "first") -> Iterator[Group]:
    """Samples of members that lie side by side: a new one starts with another key, or an extension seen already."""
    group: Group | None = None
    for member in members:
        named = split_name(member.name, dots)
        if named is None:
            continue
        key, extension = named
        if group is not None and (group.key != key or extension in group.members):
            yield group
            group = None
        if group is None:
            group = Group(key=key)
        group.members[extension] = member
    if group is not None:
        yield group


def group_by_key(members: Iterable[TarMember], dots: str = "first") -> Iterator[Group]:
    """Samples wherever their members lie in the tar, in the order of their first one. An extension that a key has
    already starts a further sample of that key. Holds all members at once."""
    found: dict[str, list[Group]] = {}
    groups: list[Group] = []
    for member in members:
        named = split_name(member.name, dots)
        if named is None:
            continue
        key, extension = named
        of_key = found.setdefault(key, [])
        group = next((group for group in of_key if extension not in group.members), None)
        if group is None:
            group = Group(key=key)
            of_key.append(group)
            groups.append(group)
        group.members[extension] = member
    return iter(groups)


class HeaderWindow:
    """Reads a tar's headers through one window, so that small members cost no request of their own."""

    def __init__(self, read: Callable[[int, int], Buffer], num_bytes: int, window_bytes: int) -> None:
        self._read = read
        self._num_bytes = num_bytes
        self._window_bytes = window_bytes
        self._start = 0
        self._data = memoryview(b"")
        self.bytes_read = 0

    def __call__(self, start: int, stop: int) -> memoryview:
        """The bytes [start, stop), from the window or by one read."""
        if not (self._start <= start and stop <= self._start + len(self._data)):
            end = min(max(stop, start + self._window_bytes), self._num_bytes)
            self._data, self._start = memoryview(self._read(start, end)).cast("B"), start
            self.bytes_read += len(self._data)
        return self._data[start - self._start : stop - self._start]

    def held(self, start: int, stop: int) -> memoryview:
        """What the window holds of [start, stop): its beginning, perhaps nothing."""
        if not self._start <= start < self._start + len(self._data):
            return memoryview(b"")
        return self._data[start - self._start : min(stop - self._start, len(self._data))]
