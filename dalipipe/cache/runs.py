"""Blocks that lie one behind the other in a shard, so that one request can bring them all."""

from __future__ import annotations

from collections.abc import Sequence

from dalipipe.cache.lake import BlockMap
from dalipipe.shards.virtual import is_virtual

MAX_RUN_BLOCKS = 256
"""More are not read at once, however small they are: each is a file and a view of its own."""


def run_of(manifest: BlockMap, blocks: Sequence[int], most_bytes: int) -> list[int]:
    """The first of `blocks`, and those after it that one request brings with it.

    The run ends before a block whose number does not follow, that crosses into another shard or lies in one, that does
    not begin where the one before ends, or with which it would be longer than `most_bytes`. Virtual shards have no
    runs: what lies behind them are many files in any case.

    Args:
        blocks: at least one. Only where there are more may an index be read.

    Raises:
        ManifestError, StorageError: an index cannot be read.
    """
    run = [blocks[0]]
    if len(blocks) == 1 or blocks[1] != blocks[0] + 1:
        return run
    parts = manifest.extents(blocks[0])
    if len(parts) != 1 or is_virtual(parts[0].shard):
        return run
    shard, start, at = parts[0].shard, parts[0].start, parts[0].stop
    for block in blocks[1:MAX_RUN_BLOCKS]:
        if block != run[-1] + 1:
            break
        parts = manifest.extents(block)
        if len(parts) != 1 or parts[0].shard != shard or parts[0].start != at or parts[0].stop - start > most_bytes:
            break
        at = parts[0].stop
        run.append(block)
    return run
