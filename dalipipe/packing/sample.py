"""A sample of a source: its members, and where the bytes of each one lie."""

from __future__ import annotations

from dataclasses import dataclass

from dalipipe.shards.digest import digest64
from dalipipe.shards.fields import field_of

WHOLE = -1


@dataclass(frozen=True, slots=True)
class Member:
    """The bytes [start, start + num_bytes) of the object `path` (the whole object when `start` is WHOLE), or `data`.

    in_run: the object is a run at the target, not one of the source.
    """

    extension: str
    num_bytes: int
    path: str = ""
    start: int = WHOLE
    data: bytes | None = None
    in_run: bool = False

    # Millions of these go to worker processes: the way of frozen dataclasses takes three times as long.
    def __reduce__(self) -> tuple[type[Member], tuple[object, ...]]:
        return type(self), (self.extension, self.num_bytes, self.path, self.start, self.data, self.in_run)


@dataclass(frozen=True, slots=True)
class SourceSample:
    """One sample. `name` says where it comes from (`a/b.jpg`, `x.tar:k.jpg`), unique in the source; `key` is its key in
    the shards, unique too."""

    name: str
    key: str
    members: tuple[Member, ...]

    def __reduce__(self) -> tuple[type[SourceSample], tuple[object, ...]]:
        return type(self), (self.name, self.key, self.members)

    @property
    def image(self) -> Member | None:
        """The member that is the image."""
        return next((member for member in self.members if field_of(member.extension) == "image"), None)

    @property
    def num_bytes(self) -> int:
        """Content bytes of all members."""
        return sum(member.num_bytes for member in self.members)


def text_member(extension: str, text: str) -> Member:
    """A member whose content is known already."""
    data = text.encode("utf-8", "surrogatepass")
    return Member(extension, len(data), data=data)


def plain_key(stem: str) -> str:
    """A key that every reader takes, from a path without its extension.

    Readers of WebDataset split a name at the first dot of its last part, so dots there become `_`; so do characters
    that cannot be written as UTF-8 text in a tar.
    """
    plain = _without_dots(stem)
    return plain if plain.isprintable() else "".join(c if c.isprintable() else "_" for c in plain)


def _without_dots(stem: str) -> str:
    folder, slash, name = stem.rpartition("/")
    return f"{folder}{slash}{name.replace('.', '_')}" if "." in name else stem


class Keys:
    """Gives each name a key of its own: `plain_key`, with a hash of the whole name where two would get one key or a
    character that cannot be written was replaced."""

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def key(self, stem: str, name: str) -> str:
        """The key for `name`, whose path without extension is `stem`."""
        key = plain_key(stem)
        if key in self._taken or not stem.isprintable():
            key = f"{key}-{digest64(name.encode('utf-8', 'surrogatepass')):016x}"
        self._taken.add(key)
        return key
