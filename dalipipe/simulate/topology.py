"""What nodes read of each other's shards."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dalipipe.shards.logical import shared_files
from dalipipe.shards.manifest import Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossNodeReads:
    """What it costs when each of `nodes` owns a part of the data set.

    shards_of_two_nodes, cross_node_bytes: equal runs of samples; shards that more than one node reads, and bytes of
    them that a node reads which does not own the shard's beginning. largest_node: whole shards only, cut where the runs
    are nearest to a shard's end; then no byte crosses, and the fullest node has so many times the mean.
    fewest_bytes: the smaller of the two, whole shards where the fullest node has at most 1 % more than its share.
    groups: folders of shards that `pack.groups` made, each an equal share; 0 = none.
    """

    nodes: int
    shards_of_two_nodes: int
    cross_node_bytes: int
    largest_node: float
    fewest_bytes: int
    groups: int


def cross_node_reads(manifest: Manifest, num_nodes: int) -> CrossNodeReads:
    """The shards that nodes would share. Reads one shard index a node.

    Args:
        num_nodes: at least 1.
    """
    shards, num_bytes = shared_files(manifest, num_nodes)
    ends = np.array(
        [manifest.shard(i).first_sample for i in range(1, manifest.num_shards)] + [manifest.num_samples], np.int64
    )
    wanted = manifest.num_samples * np.arange(1, num_nodes) / num_nodes
    after = np.searchsorted(ends, wanted)
    before = np.maximum(after - 1, 0)
    nearest = np.where(np.abs(ends[before] - wanted) < np.abs(ends[after] - wanted), ends[before], ends[after])
    sizes = np.diff([0, *nearest.tolist(), manifest.num_samples])
    largest = round(float(sizes.max()) * num_nodes / manifest.num_samples, 4)
    return CrossNodeReads(
        nodes=num_nodes,
        shards_of_two_nodes=shards,
        cross_node_bytes=num_bytes,
        largest_node=largest,
        fewest_bytes=0 if largest <= 1.01 else num_bytes,
        groups=int(manifest.made_by.get("groups", "0")),
    )
