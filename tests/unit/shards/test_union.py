"""Several data sets read as one: every sample, block and shard is that of its own set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dalipipe.errors import ConfigError
from dalipipe.shards import Manifest
from dalipipe.shards.shape import BlockGrid, DataShape
from dalipipe.shards.union import join_manifests
from tests.support.shards import Folder, write_dataset


def dataset(name: str, num_shards: int, block_samples: int, *, label: bool = True, shard_samples: int = 7) -> Folder:
    def sample(number: int) -> tuple[str, dict[str, bytes]]:
        fields = {"jpg": f"{name}{number}".encode() * (number % 5 + 1)}
        return f"{name}/{number:04d}", fields | ({"cls": str(number % 3).encode()} if label else {})

    shards = [[sample(s * shard_samples + i) for i in range(shard_samples)] for s in range(num_shards)]
    return write_dataset(shards, block_samples=block_samples, classes=["x", "y", "z"])


def joined(**folders: Folder) -> tuple[Manifest, dict[str, Manifest], Callable[[str], bytes]]:
    def read(name: str) -> bytes:
        part, _, rest = name.partition("/")
        return folders[part].read(rest)

    parts = {name: Manifest.open(folder.read) for name, folder in folders.items()}
    return join_manifests(parts, read), parts, read


@settings(max_examples=100, deadline=None)
@given(sizes=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 9)), min_size=1, max_size=5))
def test_blocks_hold_samples_of_one_set_and_cover_all(sizes: list[tuple[int, int]]) -> None:
    shapes = [DataShape(num_samples=n, block_samples=k, num_bytes=n) for n, k in sizes]
    grid = BlockGrid(shapes)
    assert grid.num_samples == sum(n for n, _ in sizes)
    ranges = [grid.samples(block) for block in range(grid.num_blocks)]
    assert [start for start, _ in ranges] == [0, *(stop for _, stop in ranges[:-1])]
    assert ranges[-1][1] == grid.num_samples
    ids = np.arange(grid.num_samples)
    blocks, sets = grid.block_of(ids), grid.set_of(ids)
    for block, (start, stop) in enumerate(ranges):
        assert (blocks[start:stop] == block).all()
        assert np.unique(sets[start:stop]).size == 1
        assert stop - start <= shapes[int(sets[start])].block_samples
    for block in (-1, grid.num_blocks):
        with pytest.raises(IndexError, match=f"block {block} "):
            grid.samples(block)


def test_every_sample_lies_where_its_own_set_says() -> None:
    folders = {"a": dataset("a", 3, 4), "b": dataset("b", 2, 6), "c": dataset("c", 1, 3)}
    union, parts, read = joined(**folders)
    assert (union.num_samples, union.num_shards) == (42, 6)
    assert union.num_bytes == sum(part.num_bytes for part in parts.values())
    assert [union.shard(i).name for i in (0, 3, 5)] == ["a/s0.tar", "b/s0.tar", "c/s0.tar"]
    located = union.locate(np.arange(42)[::-1])
    data = {
        block: b"".join(read(extent.shard)[extent.start : extent.stop] for extent in union.extents(block))
        for block in range(union.num_blocks)
    }
    first = 0
    for name, part in parts.items():
        for number in range(part.num_samples):
            row = 41 - first - number
            for field, expected in (("image", f"{name}{number}" * (number % 5 + 1)), ("label", str(number % 3))):
                offset, size = (int(values[row]) for values in located.fields[field])
                block = data[int(located.blocks[row])]
                assert block[offset : offset + size] == expected.encode()
        first += part.num_samples
    assert union.keys(np.array([0, 21, 41])) == ["a/0000", "b/0000", "c/0006"]
    assert sum(union.block_bytes(block) for block in range(union.num_blocks)) == sum(map(len, data.values()))
    assert union.classes == ("x", "y", "z")


def test_the_identity_tells_unions_apart() -> None:
    a, b = dataset("a", 2, 4), dataset("b", 2, 4)
    identities = [
        joined(**parts)[0].identity for parts in ({"a": a, "b": b}, {"b": b, "a": a}, {"x": a, "b": b}, {"a": a})
    ]
    assert len(set(identities)) == 4
    assert joined(a=a, b=b)[0].identity == identities[0]


def test_a_field_that_one_set_lacks_is_empty_there() -> None:
    union, _, _ = joined(a=dataset("a", 1, 4), b=dataset("b", 1, 4, label=False))
    offsets, sizes = union.locate(np.array([0, 7])).fields["label"]
    assert offsets[0] > 0
    assert (int(offsets[1]), int(sizes[1])) == (-1, -1)


def test_sets_of_different_kinds_are_refused(monkeypatch: Any) -> None:
    parts = {"a": Manifest.open(dataset("a", 1, 4).read), "b": Manifest.open(dataset("b", 1, 4).read)}
    monkeypatch.setattr(Manifest, "kind", property(lambda self: "tokens" if self is parts["b"] else "images"))
    with pytest.raises(ConfigError, match="different kinds"):
        join_manifests(parts, lambda name: b"")
