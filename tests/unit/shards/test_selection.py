"""Parts of a data set by name."""

from __future__ import annotations

import numpy as np
import pytest

from dalipipe.errors import ConfigError
from dalipipe.shards import Manifest
from dalipipe.shards.selection import select
from tests.support.shards import write_dataset

CLASSES = ("cat", "dog")


@pytest.fixture(scope="module")
def manifest() -> Manifest:
    """Shards s0 to s3 of 10 samples, blocks of 4: the last block of s0 and of s2 reaches into the next shard."""
    numbers = iter(range(40))
    shards = [
        [(f"{CLASSES[(i := next(numbers)) % 3 == 0]}/{i}", {"jpg": b"x", "cls": b"0"}) for _ in range(10)]
        for _ in range(4)
    ]
    return Manifest.open(write_dataset(shards, block_samples=4, classes=CLASSES).read)


@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        ("s0.tar", ((0, 3),)),
        ("s1.tar", ((3, 5),)),
        ("s[01].tar", ((0, 5),)),
        ("s[02].tar", ((0, 3), (5, 8))),
        ("*", ((0, 10),)),
    ],
)
def test_shards_select_the_blocks_that_begin_in_them(
    manifest: Manifest, name: str, blocks: tuple[tuple[int, int], ...]
) -> None:
    chosen = select(manifest, name)
    assert chosen.samples is None
    assert chosen.blocks == blocks


def test_a_class_selects_its_samples_wherever_they_lie(manifest: Manifest) -> None:
    chosen = select(manifest, "dog")
    assert chosen.blocks == ()
    assert chosen.samples is not None
    assert chosen.samples.tolist() == list(range(0, 40, 3))
    assert chosen.samples.dtype == np.int64


def test_what_names_nothing_is_refused_with_the_nearest(manifest: Manifest) -> None:
    with pytest.raises(ConfigError, match=r"data.repeat.dgo: no shard and no class of that name; nearest: dog"):
        select(manifest, "dgo")
    with pytest.raises(ConfigError, match=r"nearest: s\d\.tar"):
        select(manifest, "s7.tar")


def test_a_class_that_no_key_names_and_a_name_with_two_meanings_are_refused() -> None:
    folder = write_dataset([[("k0", {"jpg": b"x"})]], block_samples=1, classes=("cat", "s0.tar"))
    plain = Manifest.open(folder.read)
    with pytest.raises(ConfigError, match="no sample's key begins with 'cat/'"):
        select(plain, "cat")
    with pytest.raises(ConfigError, match="a class of that name and 1 shards"):
        select(plain, "s0.tar")


def test_a_shard_in_which_no_block_begins_is_refused() -> None:
    folder = write_dataset([[("a", {"jpg": b"x"})], [("b", {"jpg": b"x"})]], block_samples=4)
    with pytest.raises(ConfigError, match="no block of 4 samples begins in that shard"):
        select(Manifest.open(folder.read), "s1.tar")
