from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dalipipe.errors import ConfigError
from dalipipe.packing.config import PackConfig
from dalipipe.packing.plan import balanced_cuts, block_samples, check_config, make_plan, shuffled


@given(weights=st.lists(st.integers(1, 10_000), min_size=1, max_size=300), parts=st.integers(1, 40))
def test_cuts_are_whole_and_balanced(weights, parts):
    parts = min(parts, len(weights))
    cuts = balanced_cuts(np.asarray(weights, np.int64), parts)
    assert cuts[0] == 0
    assert cuts[-1] == len(weights)
    assert (np.diff(cuts) >= 1).all()
    loads = [sum(weights[a:b]) for a, b in pairwise(cuts)]
    room = [w for (a, b), w in zip(pairwise(cuts), loads, strict=True) if b - a > 1]
    assert max(room, default=0) <= sum(weights) / parts + 2 * max(weights)


@given(num=st.integers(1, 400), seed=st.integers(-5, 2**70))
def test_shuffle_is_a_permutation_of_the_names_and_the_seed(num, seed):
    paths = [f"c/{i}.jpg" for i in range(num)]
    order = shuffled(paths, seed)
    assert sorted(order.tolist()) == list(range(num))
    assert order.tolist() == shuffled(paths, seed).tolist()


def test_shuffle_mixes_and_one_file_more_moves_no_other():
    paths = [f"c/{i:04d}.jpg" for i in range(1000)]
    order = shuffled(paths, 0)
    assert abs(np.corrcoef(order, np.arange(1000))[0, 1]) < 0.1
    assert order.tolist() != shuffled(paths, 1).tolist()
    fewer = shuffled(paths[:-1], 0)
    assert fewer.tolist() == [i for i in order.tolist() if i != 999]
    # Pinned: another order would make another data set of the same source.
    assert shuffled([f"{i}.jpg" for i in range(8)], 0).tolist() == [1, 6, 0, 4, 2, 3, 5, 7]


def test_plan_deals_every_sample_once_into_the_fewest_shards():
    paths = [f"c/{i:04d}.jpg" for i in range(500)]
    sizes = np.random.default_rng(0).integers(5_000, 15_000, 500)
    plan = make_plan(paths, sizes, members=np.full(len(paths), 2), config=PackConfig(shard_bytes="1MiB"))
    assert sorted(plan.order.tolist()) == list(range(500))
    assert plan.num_shards == -(-plan.num_bytes // 2**20) == 6
    loads = [sizes[plan.order[a:b]].sum() for a, b in pairwise(plan.cuts)]
    assert max(loads) < 1.05 * min(loads)
    unshuffled = make_plan(
        paths, sizes, members=np.full(len(paths), 1), config=PackConfig(shard_bytes="1MiB", shuffle=False)
    )
    assert unshuffled.order.tolist() == list(range(500))


def test_one_sample_makes_one_shard():
    plan = make_plan(["a.jpg"], np.asarray([10**7]), members=np.asarray([1]), config=PackConfig(shard_bytes="1MiB"))
    assert (plan.num_shards, plan.block_samples, plan.cuts.tolist()) == (1, 1, [0, 1])


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ((1_281_167, 280, 147 * 10**9, "auto"), 36),  # ImageNet: 4 MiB of 115 kB images
        ((3_200, 1, 10_000 * 3_200, "auto"), 100),  # a 32nd of a shard
        ((3, 1, 10**6, "auto"), 1),
        ((1000, 10, 10**9, "1MiB"), 1),
        ((1000, 10, 10**7, "1MiB"), 100),  # no more than a shard
        ((1000, 1, 10**7, 50_000), 5),
    ],
)
def test_block_samples(args, expected):
    assert block_samples(*args) == expected


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"shard_bytes": "1kB"}, r"pack\.shard_bytes='1kB' must be 1MiB to 4GiB"),
        ({"shard_bytes": "5GiB"}, r"pack\.shard_bytes='5GiB' must be"),
        ({"block_bytes": 0}, r"pack\.block_bytes=0 must be 'auto', or at least 1"),
        ({"block_bytes": "1GiB"}, r"pack\.block_bytes='1GiB' must be"),
        ({"block_bytes": "lots"}, r"pack\.block_bytes='lots' is not a size"),
        ({"check": "deocde"}, r"pack\.check='deocde' is not one of decode, header, none"),
        ({"kind": "tarballs"}, r"pack\.kind='tarballs' is not one of images, tars"),
        ({"groups": 4, "shuffle": False}, r"pack\.groups=4 needs pack\.shuffle=true"),
        ({"quality": 0}, r"pack\.quality=0 1 to 100"),
        ({"reencode": "gif"}, r"pack\.reencode='gif' is not one of '', jpeg, jpg, webp, png"),
        ({"device": "cuda:0"}, r"pack\.device='cuda:0': .* with pack\.reencode=jpeg"),
        ({"kind": "tars", "labels": "a.csv"}, r"pack\.labels='a\.csv' goes with image files"),
        ({"workers": -1}, r"pack\.workers=-1 must be at least 0"),
    ],
)
def test_configurations_that_cannot_work_are_refused(changed, message):
    with pytest.raises(ConfigError, match=message):
        check_config(PackConfig(**changed))
