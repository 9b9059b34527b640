"""Checksums of block parts that became known after the manifest was made (`NAME.sums`, where the index is `NAME.idx`).

They are no part of the data set's identity: it names which bytes are meant, and knowing their checksums changes none of
them, so caches and loader states stay valid. A manifest says in `made_by` that there are any.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from dalipipe.shards.digest import digest64

if TYPE_CHECKING:
    from typing_extensions import Buffer

NOTE = "checksums"
"""The entry of `made_by` that says that some shards have such a file."""
ENDING = ".sums"
_MAGIC = b"dpsums01"
_END_BYTES = 8
Digests = npt.NDArray[np.uint64]


def checksums_name(index_name: str) -> str:
    """The name of the file, by that of the index which it goes with."""
    return index_name.removesuffix(".idx") + ENDING


def encode_checksums(index_digest: int, digests: Digests) -> bytes:
    """The file: a mark, the xxh3-64 of the index, the digests of its parts (uint64 [p], NO_DIGEST where unknown), the
    xxh3-64 of all that; little-endian."""
    body = _MAGIC + index_digest.to_bytes(8, "little") + digests.astype("<u8").tobytes()
    return body + digest64(body).to_bytes(_END_BYTES, "little")


def decode_checksums(data: Buffer, index_digest: int, num_parts: int) -> Digests | None:
    """uint64 [num_parts]; None where the file is damaged or goes with another index: then nothing is known."""
    view = memoryview(data).cast("B")
    start = len(_MAGIC) + 8
    body = view[:-_END_BYTES]
    if len(view) != start + 8 * num_parts + _END_BYTES or bytes(view[: len(_MAGIC)]) != _MAGIC:
        return None
    stated = int.from_bytes(view[-_END_BYTES:], "little")
    if digest64(body) != stated or int.from_bytes(view[len(_MAGIC) : start], "little") != index_digest:
        return None
    return np.frombuffer(body[start:], "<u8").astype(np.uint64)
