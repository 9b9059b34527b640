"""Manifests over tars that exist: read in place, checked, merged, exported to DALI."""

from __future__ import annotations

import shutil
import tarfile

import numpy as np
import pytest

from dalipipe.errors import ConfigError, ManifestError, SourceError, TargetExistsError
from dalipipe.packing.config import IndexConfig
from dalipipe.packing.index import index
from dalipipe.packing.merge import merge
from dalipipe.packing.repair import repair
from dalipipe.packing.verify import verify
from dalipipe.storage.store import StorageConfig
from tests.support.archives import write_tar
from tests.support.images import jpeg_bytes
from tests.unit.packing.reading import contents, open_manifest, read_back, run_pack
from tests.unit.packing.test_sources import IMAGES, expected, samples


def run_index(source, target="", **changed):
    return index(str(source), str(target), IndexConfig(**changed), StorageConfig())


@pytest.fixture
def tars(tmp_path):
    for i, form in enumerate((tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT)):
        write_tar(tmp_path / f"tars/part-{i}.tar", samples(20, first=20 * i), form=form)
    return tmp_path / "tars"


def test_tars_are_read_where_they_lie(tars):
    before = contents(tars)
    report = run_index(tars)
    assert (report.samples, report.shards, report.checksums) == (60, 3, False)
    assert report.bytes == sum(map(len, before.values()))
    assert read_back(tars) == expected(60)
    manifest = open_manifest(tars)
    assert [f.name for f in manifest.fields] == ["image", "label", "text"]
    assert manifest.locate(np.arange(60)).sizes.tolist() == [[60, 80]] * 60
    after = contents(tars)
    assert {name: after[name] for name in before} == before
    found = verify(str(tars), StorageConfig(), decode="all")
    assert (found.errors, found.samples) == ([], 60)
    assert found.without_checksum >= manifest.num_blocks


def test_beside_the_tars_and_with_checksums(tars, tmp_path):
    before = contents(tars)
    report = run_index(tars, tmp_path / "set", checksums=True)
    assert report.bytes_read == report.bytes
    assert contents(tars) == before
    assert set(contents(tmp_path / "set")) >= {"manifest.json", "shards.arrow"}
    assert open_manifest(tmp_path / "set").shard(0).name == "../tars/part-0.tar"
    assert read_back(tmp_path / "set") == expected(60)
    found = verify(str(tmp_path / "set"), StorageConfig())
    assert (found.errors, found.without_checksum) == ([], 0)
    data = bytearray(before["part-1.tar"])
    data[3000] ^= 1
    (tars / "part-1.tar").write_bytes(data)
    found = verify(str(tmp_path / "set"), StorageConfig())
    assert "part-1.tar: bytes [" in found.errors[0]


def test_only_headers_are_read_of_tars_with_large_members(tmp_path):
    image = jpeg_bytes(1, height=900, width=1200, quality=98)
    write_tar(tmp_path / "t/a.tar", [(f"{i}.jpg", image) for i in range(8)])
    report = run_index(tmp_path / "t", window_bytes=2048)
    assert report.samples == 8
    assert report.bytes_read < report.bytes / 50
    assert open_manifest(tmp_path / "t").locate(np.arange(8)).sizes.tolist() == [[900, 1200]] * 8


def test_checksums_are_added_and_it_stays_the_same_data_set(tars):
    before = run_index(tars)
    found = verify(str(tars), StorageConfig(), add_checksums=True)
    assert (found.without_checksum, found.checksums_added) == (0, 60)
    assert open_manifest(tars).identity == before.identity
    assert verify(str(tars), StorageConfig(), add_checksums=True).checksums_added == 0
    assert read_back(tars) == expected(60)
    (tars / "part-1.tar.sums").write_bytes(b"not checksums")
    assert verify(str(tars), StorageConfig()).without_checksum == 20
    whole = (tars / "part-0.tar").read_bytes()
    (tars / "part-0.tar").write_bytes(whole[:3000] + bytes([whole[3000] ^ 1]) + whole[3001:])
    found = verify(str(tars), StorageConfig())
    assert "part-0.tar: bytes [" in found.errors[0]
    assert "the index states" in found.errors[0]
    # Made again over tars that were replaced on purpose, it knows none of the old checksums.
    assert run_index(tars, overwrite=True).identity == before.identity
    found = verify(str(tars), StorageConfig(), add_checksums=True)
    assert (found.errors, found.checksums_added) == ([], 60)


@pytest.mark.parametrize("whole_copy", [True, False])
def test_added_checksums_tell_a_whole_copy_from_another(tars, tmp_path, whole_copy):
    before = run_index(tars)
    verify(str(tars), StorageConfig(), add_checksums=True)
    shutil.copytree(tars, tmp_path / "copy")
    damaged = [tars / "part-1.tar"] + [tmp_path / "copy/part-1.tar"] * (not whole_copy)
    for number, path in enumerate(damaged):
        data = bytearray(path.read_bytes())
        data[3000 + number] ^= 1
        path.write_bytes(data)
    found = verify(str(tars), StorageConfig())
    mended = repair(str(tars), StorageConfig(), found, copy=str(tmp_path / "copy"))
    if whole_copy:
        assert (mended.shards_fetched, mended.identity) == (["part-1.tar"], before.identity)
        assert read_back(tars) == expected(60)
    else:
        assert (mended.shards_fetched, mended.shards_dropped) == ([], ["part-1.tar"])
    after = verify(str(tars), StorageConfig(), add_checksums=True)
    assert (after.errors, after.without_checksum) == ([], 0)


def test_an_index_that_is_made_again_leaves_an_indexed_set_what_it_was(tars):
    before = run_index(tars)
    verify(str(tars), StorageConfig(), add_checksums=True)
    (tars / "part-2.tar.idx").write_bytes(b"torn")
    found = verify(str(tars), StorageConfig())
    assert found.damaged == {2: False}
    mended = repair(str(tars), StorageConfig(), found)
    assert (mended.indices_made, mended.identity) == (["part-2.tar.idx"], before.identity)
    after = verify(str(tars), StorageConfig())
    assert (after.errors, after.without_checksum) == ([], 0)
    assert read_back(tars) == expected(60)


def test_dali_reads_the_index_that_is_exported(tars):
    from nvidia.dali import fn, pipeline_def

    run_index(tars, dali=True)
    lines = (tars / "part-0.idx").read_text().splitlines()
    assert lines[0] == "v1.2 20"
    assert lines[1].split()[:2] == ["jpg", "1536" if (tars / "part-0.tar").read_bytes()[156:157] == b"x" else "512"]

    @pipeline_def(batch_size=20, num_threads=1, device_id=None, prefetch_queue_depth=1)
    def pipe():
        return tuple(
            fn.readers.webdataset(
                paths=[str(tars / "part-0.tar")], index_paths=[str(tars / "part-0.idx")], ext=["jpg", "cls"]
            )
        )

    built = pipe()
    built.build()
    images, labels = built.run()
    found = [(bytes(np.asarray(images[i])), bytes(np.asarray(labels[i]))) for i in range(20)]
    assert found == [(IMAGES[i % 12], b"%d" % (i % 3)) for i in range(20)]


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([("a.jpg", b"x"), ("b.jpg", b"y"), ("a.cls", b"1")], r"'a' do not lie side by side.*pack=tars"),
        ([("a.jpg", b"x"), ("a.jpg", b"y")], r"the key comes twice; pack it"),
        ([("a.jpg", b"x"), ("a.png", b"y")], r"has jpg, png, two of which are the same field"),
        ([("../a.jpg", b"x")], r"leads out of its folder"),
    ],
)
def test_tars_that_cannot_be_read_in_place(tmp_path, members, message):
    write_tar(tmp_path / "t/x.tar", members)
    with pytest.raises(SourceError, match=message):
        run_index(tmp_path / "t")
    assert not (tmp_path / "t/manifest.json").exists()


def test_an_empty_tar_is_named_and_members_that_are_no_data_are_counted(tmp_path):
    write_tar(tmp_path / "t/x.tar", [("README", b"x"), ("__meta__.json", b"{}"), ("a.jpg", IMAGES[0])])
    report = run_index(tmp_path / "t")
    assert (report.samples, report.skipped, report.skipped_kinds) == (1, 2, {"meta": 1, "no extension": 1})
    (tmp_path / "t/y.tar").touch()
    with pytest.raises(SourceError, match=r"y\.tar cannot be indexed: it is empty \(0 bytes\)"):
        run_index(tmp_path / "t", overwrite=True)


def test_other_sources_that_cannot_be_indexed(tmp_path, tars):
    with pytest.raises(SourceError, match="nowhere holds no tar"):
        run_index(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceError, match="holds no tar"):
        run_index(tmp_path / "empty")
    write_tar(tmp_path / "gz/a.tar.gz", samples(2), mode="w:gz")
    with pytest.raises(SourceError, match=r"1 tars .* are compressed, such as a\.tar\.gz.*pack=tars"):
        run_index(tmp_path / "gz")
    with pytest.raises(ConfigError, match=r"index\.window_bytes=10 must be at least 512"):
        run_index(tars, window_bytes=10)
    with pytest.raises(ConfigError, match=r"index\.dots='second'"):
        run_index(tars, dots="second")
    run_index(tars)
    with pytest.raises(TargetExistsError, match=r"index\.overwrite=true"):
        run_index(tars)
    assert run_index(tars, overwrite=True, dots="last").samples == 60


def test_names_that_an_index_cannot_hold(tmp_path):
    write_tar(tmp_path / "bytes/a.tar", [("\udcff.jpg", IMAGES[0])])
    write_tar(tmp_path / "space/a.tar", [("a b.jpg", IMAGES[0])])
    with pytest.raises(SourceError, match="is not UTF-8"):
        index(str(tmp_path / "bytes"), "", IndexConfig(), StorageConfig())
    with pytest.raises(SourceError, match=r"holds a space .* leave index\.dali out"):
        index(str(tmp_path / "space"), "", IndexConfig(dali=True), StorageConfig())
    assert index(str(tmp_path / "space"), "", IndexConfig(), StorageConfig()).samples == 1


def test_dots_in_base_names(tmp_path):
    write_tar(tmp_path / "t/a.tar", [("x.v1.jpg", IMAGES[0]), ("x.v2.jpg", IMAGES[1])])
    run_index(tmp_path / "t", dots="last")
    assert read_back(tmp_path / "t") == {"x.v1": {"image": IMAGES[0]}, "x.v2": {"image": IMAGES[1]}}
    assert verify(str(tmp_path / "t"), StorageConfig(), decode="all").errors == []


@pytest.fixture
def two_sets(tmp_path):
    write_tar(tmp_path / "src/a.tar", samples(60))
    run_pack(tmp_path / "src", tmp_path / "one", kind="tars", block_bytes="20kB")
    write_tar(tmp_path / "other/b.tar", [(f"o{i}.jpg", IMAGES[i % 12]) for i in range(40)])
    run_pack(tmp_path / "other", tmp_path / "deep/er/two", kind="tars", block_bytes="8kB")
    return tmp_path


def test_merge_reads_as_one_set_without_copying(two_sets):
    one, two, target = two_sets / "one", two_sets / "deep/er/two", two_sets / "all"
    report = merge([str(one), str(two)], str(target), StorageConfig())
    assert report.samples == 100
    assert read_back(target) == read_back(one) | read_back(two)
    assert not list(target.rglob("*.tar"))
    assert 0 < report.blocks_without_checksum <= report.blocks
    found = verify(str(target), StorageConfig(), decode="sample")
    assert (found.errors, found.samples) == ([], 100)
    assert sum(one.num_bytes for one in open_manifest(target).logical_shards(10**5)) == report.bytes
    whole = merge([str(one), str(two)], str(target), StorageConfig(), checksums=True, overwrite=True)
    assert whole.blocks_without_checksum == 0
    assert verify(str(target), StorageConfig()).without_checksum == 0


def test_a_merged_set_merges_again(two_sets):
    merge([str(two_sets / "one"), str(two_sets / "deep/er/two")], str(two_sets / "m/all"), StorageConfig())
    write_tar(two_sets / "third/c.tar", [(f"t{i}.jpg", IMAGES[i % 12]) for i in range(7)])
    run_index(two_sets / "third")
    report = merge([str(two_sets / "m/all"), str(two_sets / "third")], str(two_sets / "more"), StorageConfig())
    assert report.samples == 107
    assert read_back(two_sets / "more") == read_back(two_sets / "m/all") | read_back(two_sets / "third")


def test_merges_that_cannot_be(two_sets, tmp_path):
    one, two, target = str(two_sets / "one"), str(two_sets / "deep/er/two"), str(two_sets / "all")
    with pytest.raises(ConfigError, match="at least two data sets"):
        merge([one], target, StorageConfig())
    with pytest.raises(ConfigError, match="must all differ"):
        merge([one, one], target, StorageConfig())
    for name in ("ant", "bee"):
        (two_sets / "classes" / name).mkdir(parents=True)
        (two_sets / "classes" / name / "a.jpg").write_bytes(IMAGES[0])
    run_pack(two_sets / "classes", two_sets / "named")
    with pytest.raises(ConfigError, match=r"named has 2 classes, .*one 0, .*Pack them together, or mix them"):
        merge([one, str(two_sets / "named")], target, StorageConfig())
    merge([one, two], target, StorageConfig())
    with pytest.raises(TargetExistsError, match="overwrite=true"):
        merge([one, two], target, StorageConfig())


def test_the_loader_reads_indexed_and_merged_sets(two_sets, tmp_path):
    import dalipipe

    merge([str(two_sets / "one"), str(two_sets / "deep/er/two")], str(two_sets / "all"), StorageConfig())
    keys = [f"data.url={two_sets / 'all'}", f"cache.dir={tmp_path / 'cache'}", "data.fields=[image]", "device=cpu"]
    loader = dalipipe.load("train", [*keys, "loader.batch_size=10", "graph.size=32", "graph.num_threads=1"])
    try:
        ids = sorted(int(i) for batch in loader for i in batch["id"])
    finally:
        loader.close()
    assert ids == list(range(100))


@pytest.mark.parametrize("whole_copy", [True, False])
def test_repair_makes_it_whole_or_leaves_out_what_is_lost(two_sets, whole_copy, tmp_path):
    write_tar(two_sets / "big/a.tar", samples(300))
    good, bad = two_sets / "good", two_sets / "bad"
    run_pack(two_sets / "big", good, kind="tars")
    shutil.copytree(good, bad)
    manifest = open_manifest(good)
    assert manifest.num_shards >= 2
    first, second = manifest.shard(0).name, manifest.shard(1).name
    (bad / f"{first}.idx").unlink()
    data = bytearray((bad / second).read_bytes())
    data[len(data) // 2] ^= 8
    (bad / second).write_bytes(data)
    found = verify(str(bad), StorageConfig())
    assert found.damaged == {0: False, 1: True}
    mended = repair(str(bad), StorageConfig(), found, copy=str(good) if whole_copy else "")
    assert mended.indices_made == [f"{first}.idx"]
    assert (mended.shards_fetched, mended.shards_dropped) == (([second], []) if whole_copy else ([], [second]))
    assert (mended.identity == manifest.identity) == whole_copy
    after = verify(str(bad), StorageConfig(), decode="sample")
    assert (after.errors, after.without_checksum) == ([], 0)
    kept = read_back(bad)
    everything = read_back(good)
    assert kept.items() <= everything.items()
    assert len(kept) == 300 - (0 if whole_copy else manifest.shard(1).num_samples)


def test_nothing_whole_is_left_to_repair(two_sets):
    for shard in (two_sets / "one").glob("*.tar"):
        shard.write_bytes(b"gone")
    found = verify(str(two_sets / "one"), StorageConfig())
    with pytest.raises(ManifestError, match=r"no shard of .* is whole; give repair_from"):
        repair(str(two_sets / "one"), StorageConfig(), found)
    assert (two_sets / "one/manifest.json").exists()


def test_verify_in_parallel_finds_the_same(two_sets):
    from dalipipe.engines import LocalEngine

    write_tar(two_sets / "big/a.tar", samples(300))
    run_pack(two_sets / "big", two_sets / "set", kind="tars")
    shard = two_sets / "set/shard-000001.tar"
    data = bytearray(shard.read_bytes())
    data[700] ^= 1
    shard.write_bytes(data)
    alone = verify(str(two_sets / "set"), StorageConfig(), decode="sample")
    engine = LocalEngine(2)
    seen = []
    try:
        together = verify(
            str(two_sets / "set"), StorageConfig(), decode="sample", engine=engine, progress=lambda *at: seen.append(at)
        )
    finally:
        engine.close()
    assert together == alone
    assert together.num_errors == 1
    assert seen[-1][0] == seen[-1][1] > 0
