"""Folders of images that were never packed: a manifest over them, and everything that a data set can do."""

from __future__ import annotations

import json
import os

import pytest

import dalipipe as dp
from dalipipe.cli import main
from dalipipe.errors import ConfigError, IntegrityError, ManifestError, ObjectNotFoundError, SourceError
from dalipipe.packing.config import IndexConfig
from dalipipe.packing.index import index
from dalipipe.packing.merge import merge
from dalipipe.packing.repair import repair
from dalipipe.packing.verify import open_linked, verify
from dalipipe.storage.store import StorageConfig
from tests.support.images import jpeg_bytes, write_image_tree
from tests.unit.packing.reading import contents, open_manifest, read_back, run_pack

NUM = 130


def run_index(source, target="", **changed):
    return index(str(source), str(target), IndexConfig(**{"shard_bytes": "1MiB", **changed}), StorageConfig())


@pytest.fixture
def lake(tmp_path):
    write_image_tree(tmp_path / "lake", num_images=NUM)
    return tmp_path / "lake"


def test_it_is_what_packing_would_write_without_a_copy(lake, tmp_path):
    before = contents(lake)
    report = run_index(lake, tmp_path / "deep/set")
    run_pack(lake, tmp_path / "packed", check="none")
    assert (report.samples, report.bytes_read, report.checksums) == (NUM, 0, False)
    assert contents(lake) == before
    packed, manifest = open_manifest(tmp_path / "packed"), open_manifest(tmp_path / "deep/set")
    assert manifest.num_shards == packed.num_shards >= 2
    assert (manifest.classes, manifest.num_blocks) == (packed.classes, packed.num_blocks)
    store = open_linked(str(tmp_path / "deep/set"), StorageConfig())
    for number in range(packed.num_shards):
        whole = (tmp_path / "packed" / packed.shard(number).name).read_bytes()
        name = manifest.shard(number).name
        assert bytes(store.read(name)) == whole
        assert store.head(name).num_bytes == len(whole)
        for start, stop in ((0, 1), (511, 513), (700, 90_000), (len(whole) - 1500, len(whole)), (5, 5)):
            assert bytes(store.read(name, start, stop)) == whole[start:stop]
            into = memoryview(bytearray(b"x" * (stop - start)))
            assert bytes(store.read(name, start, stop, into=into)) == whole[start:stop]
    assert read_back(tmp_path / "deep/set") == read_back(tmp_path / "packed")
    with pytest.raises(ConfigError, match="cannot be written"):
        store.put(manifest.shard(0).name, b"")


def test_it_trains_and_the_cache_holds_what_it_read(lake, tmp_path):
    assert run_index(lake).samples == NUM  # beside the images
    keys = [f"data.url={lake}", f"cache.dir={tmp_path / 'cache'}", "device=cpu", "graph.size=32"]
    with dp.load("train", [*keys, "loader.batch_size=10", "graph.num_threads=1"]) as loader:
        for _ in range(2):
            batches = list(loader)
            assert sorted(int(i) for batch in batches for i in batch["id"]) == list(range(NUM))
            assert {int(label) for batch in batches for label in batch["label"]} == {0, 1, 2}
        assert loader.stats()["bytes_written"]["node"] > 0
    # The images are all in the cache now: what is gone from the folder is not missed there.
    for path in lake.glob("class_1/*.jpg"):
        path.unlink()
    with dp.load("train", [*keys, "loader.batch_size=10", "graph.num_threads=1", "prefetch.cold_steps=0"]) as loader:
        assert sorted(int(i) for batch in loader for i in batch["id"]) == list(range(NUM))


def test_it_mixes_with_a_packed_set(lake, tmp_path):
    run_index(lake, tmp_path / "raw")
    run_pack(lake, tmp_path / "packed", check="none")
    keys = [f"cache.dir={tmp_path / 'cache'}", "device=cpu", "graph.size=32", "loader.batch_size=10"]
    with dp.load("train", [f"data.mix={{{tmp_path / 'raw'}:0.5,{tmp_path / 'packed'}:0.5}}", *keys]) as loader:
        ids = {int(i) for batch in loader for i in batch["id"]}
        assert loader.stats()["quarantined"] == 0
    assert min(ids) < NUM <= max(ids), "samples of both"


def test_logical_shards_are_persisted(lake, tmp_path):
    run_index(lake, tmp_path / "set")
    manifest = open_manifest(tmp_path / "set")
    pieces = [piece for shard in manifest.logical_shards(300_000) for piece in shard.pieces]
    assert sum(piece.stop - piece.start for piece in pieces) == manifest.num_bytes
    store = open_linked(str(tmp_path / "set"), StorageConfig())
    joined = b"".join(bytes(store.read(piece.name, piece.start, piece.stop)) for piece in pieces)
    run_pack(lake, tmp_path / "packed", check="none")
    assert joined == b"".join(path.read_bytes() for path in sorted((tmp_path / "packed").glob("*.tar")))


def test_a_file_that_changes_or_goes_is_named(lake, tmp_path):
    run_index(lake, tmp_path / "set")
    changed, gone = sorted(lake.glob("class_0/*"))[0], sorted(lake.glob("class_1/*"))[0]
    changed.write_bytes(changed.read_bytes() + b"more")
    gone.unlink()
    found = verify(str(tmp_path / "set"), StorageConfig())
    assert found.num_errors == 2
    assert all(sum(path.name in error for error in found.errors) == 1 for path in (changed, gone))
    with pytest.raises(ManifestError, match="Restore them, or run `dalipipe index` again"):
        repair(str(tmp_path / "set"), StorageConfig(), found)
    with pytest.raises(IntegrityError, match=rf"{changed.name} has \d+ bytes, it had \d+ when it was indexed"):
        read_all(tmp_path / "set", until=IntegrityError)
    with pytest.raises(ObjectNotFoundError, match=rf"{gone.name}.*it was there when it was indexed"):
        read_all(tmp_path / "set", until=ObjectNotFoundError)


def read_all(target, until):
    """Reads block by block; raises the first error of the kind `until`."""
    store, manifest = open_linked(str(target), StorageConfig()), open_manifest(target)
    for block in range(manifest.num_blocks):
        for extent in manifest.extents(block):
            try:
                store.read(extent.shard, extent.start, extent.stop)
            except (IntegrityError, ObjectNotFoundError) as error:
                if isinstance(error, until):
                    raise


def test_checksums_verify_and_repair(lake, tmp_path):
    run_index(lake, tmp_path / "set")
    found = verify(str(tmp_path / "set"), StorageConfig(), decode="all", add_checksums=True)
    assert (found.errors, found.without_checksum) == ([], 0)
    (tmp_path / "set/files-000000.vtar.idx").unlink()
    mended = repair(str(tmp_path / "set"), StorageConfig(), verify(str(tmp_path / "set"), StorageConfig()))
    assert (mended.indices_made, mended.identity) == (["files-000000.vtar.idx"], mended.identity_before)
    path = sorted(lake.glob("class_2/*"))[3]
    data = bytearray(path.read_bytes())
    data[200] ^= 1
    path.write_bytes(data)
    found = verify(str(tmp_path / "set"), StorageConfig())
    assert found.num_errors == 1
    assert "the index states" in found.errors[0]
    assert run_index(lake, tmp_path / "with", checksums=True).checksums
    assert verify(str(tmp_path / "with"), StorageConfig()).without_checksum == 0
    table = tmp_path / "set/files-000000.vtar.members"
    table.write_bytes(table.read_bytes()[:-5])
    assert "members is damaged" in verify(str(tmp_path / "set"), StorageConfig()).errors[0]


def test_labels_names_and_a_merge(tmp_path):
    folder = tmp_path / "lake"
    folder.mkdir()
    names = [
        b"with space.jpg",
        b"new\nline.jpg",
        "ünï-画.jpg".encode(),
        b"a.b.c.JPG",
        b"'\"#%3F?.jpeg",
        b"x" * 150 + b".png",
    ]
    rows = []
    for number, name in enumerate(names):
        (folder / os.fsdecode(name)).write_bytes(jpeg_bytes(number))
        rows.append({"file_name": os.fsdecode(name), "label": f"class {number % 2}", "caption": f"number {number}"})
    (folder / "labels.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = run_index(folder, tmp_path / "set", labels="labels.jsonl")
    assert report.samples == len(names)
    assert open_manifest(tmp_path / "set").classes == ("class 0", "class 1")
    run_pack(folder, tmp_path / "packed", labels="labels.jsonl", check="none")
    assert read_back(tmp_path / "set") == read_back(tmp_path / "packed")
    merge([str(tmp_path / "set"), str(tmp_path / "packed")], str(tmp_path / "far/all"), StorageConfig())
    store, manifest = open_linked(str(tmp_path / "far/all"), StorageConfig()), open_manifest(tmp_path / "far/all")
    assert manifest.num_samples == 2 * len(names)
    whole = (tmp_path / "packed/shard-000000.tar").read_bytes()
    assert [bytes(store.read(manifest.shard(n).name)) for n in (0, 1)] == [whole, whole]
    assert verify(str(tmp_path / "far/all"), StorageConfig(), decode="all").errors == []


def test_what_cannot_be_indexed_so(tmp_path, lake):
    with pytest.raises(ConfigError, match=r"index\.dali=true is for tars"):
        run_index(lake, tmp_path / "set", dali=True)
    with pytest.raises(ConfigError, match=r"index\.shard_bytes='1kB' must be 1MiB to 4GiB"):
        run_index(lake, tmp_path / "set", shard_bytes="1kB")
    (lake / "beside.jpg").write_bytes(jpeg_bytes(1))
    with pytest.raises(SourceError, match="images beside its class folders"):
        run_index(lake, tmp_path / "set")
    (tmp_path / "text").mkdir()
    (tmp_path / "text/a.txt").write_text("a")
    with pytest.raises(SourceError, match="holds no tar and no image"):
        run_index(tmp_path / "text")
    (tmp_path / "text/a.parquet").write_text("a")
    with pytest.raises(SourceError, match="Parquet: its images cannot be read in place; pack them"):
        run_index(tmp_path / "text")
    with pytest.raises(ManifestError):
        open_manifest(tmp_path / "set")


def test_from_the_command_line(lake, tmp_path, capsys):
    words = [f"target={tmp_path / 'set'}", "index.shard_bytes=1MiB", "--json"]
    assert main(["index", str(lake), *words]) == 0
    done = json.loads(capsys.readouterr().out)
    assert (done["samples"], done["bytes_read"]) == (NUM, 0)
    assert main(["verify", str(tmp_path / "set"), f"cache.dir={tmp_path / 'cache'}", "--json", "workers=1"]) == 0
    checked = json.loads(capsys.readouterr().out)
    assert (checked["samples"], checked["num_errors"]) == (NUM, 0)
    assert main(["index", str(lake), *words]) == 1
    assert "index.overwrite=true" in capsys.readouterr().err
