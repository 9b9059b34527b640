"""Digests of bytes on disk: xxh3, fast enough (several GB/s a core) to be taken on every first touch.

They find torn, swapped and rotten bytes. They are no protection against an adversary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from typing_extensions import Buffer


NO_DIGEST = 0
"""Stands for a digest that is not known, as of tars that were only indexed. (A digest that is 0 is taken for one: one
in 2**64.)"""


def digest64(data: Buffer) -> int:
    """The xxh3-64 of a buffer, in [0, 2**64): kept as uint64 in Arrow files."""
    return xxhash.xxh3_64_intdigest(data)


class Digest64:
    """The xxh3-64 of bytes that arrive in pieces."""

    __slots__ = ("_state",)

    def __init__(self) -> None:
        self._state = xxhash.xxh3_64()

    def update(self, data: Buffer) -> None:
        """Appends a piece."""
        self._state.update(data)

    @property
    def value(self) -> int:
        """The digest of all pieces so far, in [0, 2**64)."""
        return self._state.intdigest()


class Digest128:
    """The xxh3-128 of bytes that arrive in pieces: for identities, where a collision would mix up two data sets."""

    __slots__ = ("_state",)

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()

    def update(self, data: Buffer) -> None:
        """Appends a piece."""
        self._state.update(data)

    @property
    def hex(self) -> str:
        """The digest of all pieces so far as 32 hexadecimal digits."""
        return self._state.hexdigest()
