from __future__ import annotations

from pathlib import Path

import pytest

from dalipipe.errors import ConfigError
from dalipipe.packing.config import PackConfig
from dalipipe.packing.inspect import info
from dalipipe.packing.run import pack
from dalipipe.packing.verify import MAX_LISTED_ERRORS, verify
from dalipipe.shards import Manifest
from dalipipe.storage.store import StorageConfig
from tests.support.faultproxy import FolderServer
from tests.support.images import write_image_tree
from tests.support.shards import write_dataset


@pytest.fixture
def dataset(tmp_path) -> Path:
    write_image_tree(tmp_path / "src", num_images=200)
    target = tmp_path / "out"
    pack(str(tmp_path / "src"), str(target), PackConfig(shard_bytes="1MiB", workers=1, check="none"), StorageConfig())
    return target


def open_manifest(target: Path) -> Manifest:
    return Manifest.open(lambda name: (target / name).read_bytes())


def check(target: Path, **options):
    return verify(str(target), StorageConfig(), **options)


def test_a_whole_dataset(dataset):
    seen = []
    report = check(dataset, decode="sample", progress=lambda *counts: seen.append(counts))
    assert (report.samples, report.shards, report.num_errors, report.errors) == (200, 2, 0, [])
    total = sum(p.stat().st_size for p in dataset.glob("*.tar"))
    assert seen[-1] == (total, total)
    assert seen == sorted(seen)


def test_parts_that_lie_one_behind_the_other_are_read_together(dataset):
    num_parts = sum(len(open_manifest(dataset).index(number).parts.starts) for number in range(2))
    server = FolderServer(dataset)
    try:
        report = verify(server.url, StorageConfig(hedge=False))
    finally:
        server.stop()
    assert report.whole
    reads = [one for one in server.requests if one.method == "GET" and one.target.endswith(".tar")]
    assert len(reads) == 4  # the blocks of each shard, and its end
    assert num_parts > 4 * len(reads)


def test_every_flipped_byte_is_found_and_placed(dataset):
    shard = dataset / "shard-000001.tar"
    sound = shard.read_bytes()
    manifest = open_manifest(dataset)
    for at in (0, 600, len(sound) // 2, len(sound) - 1025, len(sound) - 1):
        damaged = bytearray(sound)
        damaged[at] ^= 4
        shard.write_bytes(damaged)
        report = check(dataset)
        assert report.num_errors == 1, at
        error = report.errors[0]
        assert "shard-000001.tar" in error
        assert "copy it again" in error
        start, stop = map(int, error.partition("bytes [")[2].partition(")")[0].split(", "))
        assert start <= at < stop
        assert stop - start < len(sound) / 10
    assert manifest.num_shards == 2


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / "shard-000000.tar").unlink(), "shard-000000.tar"),
        (lambda d: truncate(d / "shard-000000.tar"), r"bytes, the manifest states"),
        (lambda d: (d / "shard-000000.tar.idx").unlink(), "the index shard-000000.tar.idx is missing"),
        (lambda d: truncate(d / "shard-000000.tar.idx"), "shard-000000.tar.idx has digest"),
        (lambda d: truncate(d / "manifest.json"), "manifest.json is not JSON"),
        (lambda d: (d / "manifest.json").unlink(), "not a data set"),
    ],
)
def test_damage_is_reported_not_raised(dataset, damage, message):
    damage(dataset)
    report = check(dataset)
    assert report.num_errors == len(report.errors) == 1
    assert not report.whole
    assert message in report.errors[0]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def test_without_an_index_the_shard_is_still_checked(dataset):
    (dataset / "shard-000000.tar.idx").unlink()
    damaged = bytearray((dataset / "shard-000000.tar").read_bytes())
    damaged[5000] ^= 1
    (dataset / "shard-000000.tar").write_bytes(damaged)
    errors = check(dataset).errors
    assert len(errors) == 2
    assert "idx" in errors[0]
    assert "shard-000000.tar has digest" in errors[1]


def test_an_index_that_does_not_fit_its_tar(tmp_path):
    """Digests match here: only walking the members shows it."""
    folder = write_dataset([[("a", {"jpg": b"x" * 700}), ("b", {"jpg": b"y"})]], block_samples=4)
    other = write_dataset([[("a", {"jpg": b"x" * 700}), ("c", {"jpg": b"y"})]], block_samples=4)
    manifest = Manifest.open(folder.read)
    assert [e.key(1) for e in (manifest.index(0), Manifest.open(other.read).index(0))] == ["b", "c"]
    renamed = folder.files["s0.tar"].replace(b"b.jpg\0", b"c.jpg\0")
    assert renamed != folder.files["s0.tar"]
    for name, data in {**folder.files, "s0.tar": renamed}.items():
        (tmp_path / name).write_bytes(data)
    assert "have digest" in check(tmp_path).errors[0]


def test_errors_are_counted_beyond_those_listed(tmp_path):
    num = MAX_LISTED_ERRORS + 20
    folder = write_dataset([[(f"k{i}", {"jpg": b"no image"}) for i in range(num)]], block_samples=8)
    for name, data in folder.files.items():
        (tmp_path / name).write_bytes(data)
    report = check(tmp_path, decode="all")
    assert (report.num_errors, len(report.errors)) == (num, MAX_LISTED_ERRORS)
    assert check(tmp_path, decode="sample").num_errors == 8, "one image of 8 of the 15 blocks"
    assert check(tmp_path, decode="none").num_errors == check(tmp_path).num_errors == 0
    assert check(tmp_path, decode=True).num_errors == num


def test_an_unknown_depth_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="decode='some' is not one of none, sample, all"):
        check(tmp_path, decode="some")


def test_info_says_what_is_there(dataset):
    facts = info(Manifest.open(lambda name: (dataset / name).read_bytes()))
    assert (facts["samples"], facts["shards"], facts["num_classes"]) == (200, 2, 3)
    assert facts["fields"] == ["image (jpg)", "label (cls)"]
    assert facts["bytes"] == sum(p.stat().st_size for p in dataset.glob("*.tar"))
    assert facts["smallest_shard_bytes"] <= facts["largest_shard_bytes"] <= 1.1 * 2**20
    assert facts["blocks"] == -(-200 // facts["block_samples"])
