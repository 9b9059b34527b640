"""Logical shards: every sample in exactly one of them, wherever the files' ends lie."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dalipipe.shards import Manifest
from dalipipe.shards.logical import logical_files, shared_files
from dalipipe.shards.tar import walk_tar
from tests.support.shards import write_dataset

SHARDS = st.lists(st.lists(st.integers(0, 4000), min_size=1, max_size=9), min_size=1, max_size=6)


def dataset(shards):
    samples = [
        [(f"s{n}/k{i}", {"jpg": b"x" * size, "cls": b"1"}) for i, size in enumerate(sizes)]
        for n, sizes in enumerate(shards)
    ]
    folder = write_dataset(samples, block_samples=3)
    return folder, Manifest.open(folder.read), [key for one in samples for key, _ in one]


@given(shards=SHARDS, target=st.integers(1, 20_000))
def test_pieces_hold_every_sample_once_and_in_order(shards, target):
    folder, manifest, keys = dataset(shards)
    logical = manifest.logical_shards(target)
    found = []
    for number, one in enumerate(logical):
        assert one.number == number
        assert one.stop_sample >= one.first_sample
        assert bool(one.pieces) == (one.stop_sample > one.first_sample)
        members = [m.name for p in one.pieces for m in walk_tar(folder.files[p.name][p.start : p.stop])]
        mine = [name.removesuffix(".jpg") for name in members if name.endswith(".jpg")]
        assert mine == keys[one.first_sample : one.stop_sample]
        found += mine
    assert found == keys
    assert sum(one.num_bytes for one in logical) == manifest.num_bytes


def test_a_sample_larger_than_the_target_leaves_the_next_pieces_empty():
    _, manifest, keys = dataset([[0], [1025, 0, 0, 0]])
    logical = manifest.logical_shards(2504)
    assert sum(one.stop_sample - one.first_sample for one in logical) == len(keys)


def test_one_huge_tar_and_many_tiny_ones_are_cut_alike():
    sizes = [1000] * 240
    for shards in ([sizes], [sizes[i : i + 2] for i in range(0, 240, 2)]):
        _, manifest, _ = dataset(shards)
        logical = manifest.logical_shards(manifest.num_bytes // 8)
        assert len(logical) == 8
        assert all(28 <= one.stop_sample - one.first_sample <= 32 for one in logical)


def test_negative_numbers_and_bad_targets():
    _, manifest, _ = dataset([[10] * 6])
    logical = manifest.logical_shards(3000)
    assert logical[-1] == list(logical)[-1]
    with pytest.raises(IndexError):
        logical[len(logical)]
    with pytest.raises(ValueError, match="target_bytes=0"):
        manifest.logical_shards(0)


@given(sizes=st.lists(st.integers(0, 500), min_size=1, max_size=60), target=st.integers(1, 3000))
def test_files_that_were_never_packed(sizes, target):
    names = [f"f{i}" for i in range(len(sizes))]
    logical = logical_files(names, sizes, target)
    assert [piece.name for one in logical for piece in one.pieces] == names
    assert all(one.pieces for one in logical)
    assert (logical[0].first_sample, logical[-1].stop_sample) == (0, len(sizes))
    if len(logical) > 1:
        assert max(one.num_bytes for one in logical) <= sum(sizes) / len(logical) + max(sizes) + len(logical) * max(
            sizes
        )


def test_files_that_two_nodes_read():
    _, manifest, _ = dataset([[1000] * 8, [1000] * 8])
    assert shared_files(manifest, 2) == (0, 0)
    files, num_bytes = shared_files(manifest, 4)
    assert files == 2
    assert 0 < num_bytes < manifest.num_bytes / 2 + 2048
