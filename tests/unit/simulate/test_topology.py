"""What nodes read of each other's shards."""

from __future__ import annotations

import pytest

from dalipipe.shards import Manifest
from dalipipe.simulate.topology import cross_node_reads
from tests.support.shards import write_dataset


def manifest_of(sizes: list[int], groups: int = 0) -> Manifest:
    """Shards of so many samples each."""
    shards = [[(f"{shard}-{i}", {"jpg": b"x" * 600}) for i in range(size)] for shard, size in enumerate(sizes)]
    made_by = {"groups": str(groups)} if groups else {}
    folder = write_dataset(shards, block_samples=2, made_by=made_by)
    return Manifest.open(folder.read)


def test_nodes_that_own_whole_shards_read_nothing_of_each_other() -> None:
    found = cross_node_reads(manifest_of([4, 4, 4, 4], groups=2), 2)
    assert (found.shards_of_two_nodes, found.cross_node_bytes, found.fewest_bytes) == (0, 0, 0)
    assert found.largest_node == 1.0
    assert (found.nodes, found.groups) == (2, 2)


@pytest.mark.parametrize(("sizes", "nodes", "shared", "largest"), [([4, 4, 4], 2, 1, 8 / 6), ([9, 1, 1, 1], 4, 1, 3.0)])
def test_runs_that_cut_shards_cross_nodes_and_whole_shards_are_uneven(
    sizes: list[int], nodes: int, shared: int, largest: float
) -> None:
    found = cross_node_reads(manifest_of(sizes), nodes)
    assert found.shards_of_two_nodes == shared
    assert found.cross_node_bytes == found.fewest_bytes > 0
    assert found.largest_node == pytest.approx(largest, abs=1e-4)


def test_one_node_shares_with_nobody() -> None:
    found = cross_node_reads(manifest_of([3, 5]), 1)
    assert (found.shards_of_two_nodes, found.largest_node, found.fewest_bytes) == (0, 1.0, 0)
