from __future__ import annotations

import io
import json
import subprocess
import tarfile
from pathlib import Path

import numpy as np
import pytest

import dalipipe.packing.images
from dalipipe.errors import (
    ConfigError,
    CorruptSampleError,
    NoSpaceError,
    PackError,
    SourceError,
    TargetExistsError,
)
from dalipipe.packing.config import PackConfig
from dalipipe.packing.inspect import info
from dalipipe.packing.run import PackReport, pack
from dalipipe.packing.verify import verify
from dalipipe.shards import Manifest
from dalipipe.storage.store import StorageConfig
from tests.support.archives import write_tar
from tests.support.images import jpeg_bytes, textured_image, write_image_tree

NUM_IMAGES = 260


@pytest.fixture(scope="module")
def lake(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("lake")
    write_image_tree(root, num_images=NUM_IMAGES)
    return root


def run_pack(source: Path, target: Path, **changed) -> PackReport:
    config = PackConfig(**{"shard_bytes": "1MiB", "workers": 1, "check": "header", **changed})
    return pack(str(source), str(target), config, StorageConfig())


def open_manifest(target: Path) -> Manifest:
    return Manifest.open(lambda name: (target / name).read_bytes())


def contents(target: Path) -> dict[str, bytes]:
    return {str(p.relative_to(target)): p.read_bytes() for p in sorted(target.rglob("*")) if p.is_file()}


def read_back(target: Path) -> dict[str, tuple[bytes, bytes | None]]:
    """key -> (image, label) of every sample, read as the loader does: by block, offset and size."""
    manifest = open_manifest(target)
    ids = np.arange(manifest.num_samples)
    located = manifest.locate(ids)
    found = {}
    for i, key in enumerate(manifest.keys(ids)):
        extents = manifest.extents(int(located.blocks[i]))
        block = b"".join((target / e.shard).read_bytes()[e.start : e.stop] for e in extents)
        parts = [block[o[i] : o[i] + s[i]] for o, s in (located.fields[f.name] for f in manifest.fields)]
        found[key] = (parts[0], parts[1] if len(parts) > 1 else None)
    return found


def in_source(lake: Path, *, without: tuple[str, ...] = ()) -> dict[str, tuple[bytes, bytes | None]]:
    classes = sorted(p.name for p in lake.iterdir() if p.is_dir())
    return {
        str(p.relative_to(lake).with_suffix("")): (p.read_bytes(), str(classes.index(p.parent.name)).encode())
        for p in lake.rglob("*.jpg")
        if str(p.relative_to(lake)) not in without
    }


def test_every_image_and_label_arrives_and_verifies(lake, tmp_path):
    report = run_pack(lake, tmp_path / "out", check="decode")
    manifest = open_manifest(tmp_path / "out")
    assert (report.samples, report.shards, report.quarantined, report.skipped) == (NUM_IMAGES, 3, 0, 0)
    assert report.identity == manifest.identity
    assert report.bytes == manifest.num_bytes == sum(p.stat().st_size for p in (tmp_path / "out").glob("*.tar"))
    assert manifest.classes == ("class_0", "class_1", "class_2")
    assert manifest.block_samples == 2
    assert read_back(tmp_path / "out") == in_source(lake)
    found = verify(str(tmp_path / "out"), StorageConfig(), decode="all")
    assert (found.samples, found.shards, found.errors, found.whole) == (NUM_IMAGES, 3, [], True)


def test_the_index_knows_the_upright_size(tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "src/a.jpg").write_bytes(jpeg_bytes(1, height=40, width=60, orientation=6))
    (tmp_path / "src/b.jpg").write_bytes(jpeg_bytes(2, height=40, width=60))
    run_pack(tmp_path / "src", tmp_path / "out", shuffle=False)
    manifest = open_manifest(tmp_path / "out")
    assert manifest.locate(np.asarray([0, 1])).sizes.tolist() == [[60, 40], [40, 60]]
    assert [f.name for f in manifest.fields] == ["image"]
    assert manifest.classes == ()


def test_output_is_the_same_bytes_for_any_number_of_workers(lake, tmp_path):
    run_pack(lake, tmp_path / "one", workers=1)
    run_pack(lake, tmp_path / "two", workers=2)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert set(contents(tmp_path / "one")) == {
        "manifest.json",
        "shards.arrow",
        *(f"shard-00000{i}.tar{e}" for i in range(3) for e in ("", ".idx")),
    }


def test_gnu_tar_and_webdataset_read_the_shards(lake, tmp_path):
    from webdataset.tariterators import group_by_keys, tar_file_expander

    run_pack(lake, tmp_path / "out")
    source = in_source(lake)
    out = tmp_path / "extracted"
    out.mkdir()
    seen = {}
    for shard in sorted((tmp_path / "out").glob("*.tar")):
        subprocess.run(["tar", "xf", shard, "-C", out], check=True)
        stream = [{"url": shard.name, "stream": io.BytesIO(shard.read_bytes())}]
        seen |= {s["__key__"]: (s["jpg"], s["cls"]) for s in group_by_keys(tar_file_expander(stream))}
    assert seen == source
    for key, (image, label) in source.items():
        assert (out / f"{key}.jpg").read_bytes() == image
        assert (out / f"{key}.cls").read_bytes() == label


def test_shuffle_mixes_classes_and_the_seed_decides(lake, tmp_path):
    run_pack(lake, tmp_path / "a")
    run_pack(lake, tmp_path / "b", seed=1)
    run_pack(lake, tmp_path / "sorted", shuffle=False)
    keys = {name: open_manifest(tmp_path / name).keys(np.arange(NUM_IMAGES)) for name in ("a", "b", "sorted")}
    assert keys["sorted"] == sorted(keys["a"]) == sorted(keys["b"])
    assert keys["a"] != keys["b"]
    assert len({key.partition("/")[0] for key in keys["a"][:12]}) == 3


def test_long_and_foreign_names(tmp_path):
    name = "画像-" + "é" * 60
    folder = tmp_path / "src" / ("class " + "x" * 120)
    folder.mkdir(parents=True)
    (folder / f"{name}.jpg").write_bytes(jpeg_bytes(1))
    (folder / "dots.in.name.jpg").write_bytes(jpeg_bytes(2))
    run_pack(tmp_path / "src", tmp_path / "out")
    assert set(read_back(tmp_path / "out")) == {f"{folder.name}/{name}", f"{folder.name}/dots_in_name"}
    with tarfile.open(tmp_path / "out/shard-000000.tar") as tar:
        assert f"{folder.name}/{name}.jpg" in tar.getnames()
    assert verify(str(tmp_path / "out"), StorageConfig()).errors == []


BAD = {
    "cut": (lambda good: good[: len(good) // 2], r"jpeg is cut short at \d+ bytes: it has no end marker"),
    "no end marker": (lambda good: good[:-2], "no end marker"),
    "empty": (lambda good: b"", r"empty \(0 bytes\)"),
    "html": (lambda good: b"<html>404 Not Found</html>", "not an image: unknown first bytes b'<html>40'"),
    "header only": (lambda good: good[:60], "jpeg header cut short at 60 bytes"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_corrupt_image_is_named_with_its_reason_and_the_remedy(tmp_path, kind):
    damage, reason = BAD[kind]
    write_image_tree(tmp_path / "src", num_images=6)
    bad = tmp_path / "src/class_1/image_00004.jpg"
    bad.write_bytes(damage(bad.read_bytes()))
    with pytest.raises(
        CorruptSampleError, match=rf"class_1/image_00004\.jpg is corrupt: .*{reason}.*pack\.drop_corrupt=true"
    ):
        run_pack(tmp_path / "src", tmp_path / "out")
    assert not (tmp_path / "out/manifest.json").exists()


def test_decoding_finds_what_the_header_does_not_show(tmp_path):
    write_image_tree(tmp_path / "src", num_images=6)
    bad = tmp_path / "src/class_1/image_00004.jpg"
    png = io.BytesIO()
    textured_image(4).save(png, "PNG")
    bad.write_bytes(png.getvalue()[: len(png.getvalue()) // 2])
    assert run_pack(tmp_path / "src", tmp_path / "header").samples == 6
    with pytest.raises(CorruptSampleError, match=r"image_00004\.jpg is corrupt"):
        run_pack(tmp_path / "src", tmp_path / "out", check="decode")
    assert run_pack(tmp_path / "src", tmp_path / "none", check="none").samples == 6
    errors = verify(str(tmp_path / "header"), StorageConfig(), decode="all").errors
    assert len(errors) == 1
    assert "shard-000000.tar: image of sample 'class_1/image_00004' at bytes [" in errors[0]


def test_dropped_images_are_listed_and_the_blocks_after_them_still_match(lake, tmp_path):
    source = tmp_path / "src"
    write_image_tree(source, num_images=NUM_IMAGES)
    bad = {"class_0/image_00003.jpg": b"", "class_2/image_00125.jpg": b"no image", "class_1/image_00010.jpg": b"x"}
    for path, content in bad.items():
        (source / path).write_bytes(content)
    report = run_pack(source, tmp_path / "out", drop_corrupt=True, block_bytes="70kB")
    assert (report.samples, report.quarantined) == (NUM_IMAGES - 3, 3)
    manifest = open_manifest(tmp_path / "out")
    assert manifest.block_samples == 7
    assert any(manifest.shard(i).first_sample % 7 for i in range(1, manifest.num_shards))
    assert read_back(tmp_path / "out") == in_source(source, without=tuple(bad))
    assert verify(str(tmp_path / "out"), StorageConfig(), decode="sample").errors == []
    listed = [json.loads(line) for line in (tmp_path / "out/quarantine.jsonl").read_text().splitlines()]
    assert [entry["path"] for entry in listed] == sorted(bad)
    assert listed[0]["reason"] == "empty (0 bytes)"
    assert listed[1]["num_bytes"] == 1
    assert info(manifest)["quarantined"] == 3


def test_a_shard_whose_images_are_all_dropped_is_left_out(tmp_path):
    source = tmp_path / "src"
    files = write_image_tree(source, num_images=200, num_classes=0)
    for path in files[:130]:
        path.write_bytes(b"\xff\xd8" + bytes(9000))
    report = run_pack(source, tmp_path / "out", drop_corrupt=True, shuffle=False)
    assert report.samples == 70
    assert {key for key in contents(tmp_path / "out") if key.endswith(".tar")} == {"shard-000001.tar"}
    assert verify(str(tmp_path / "out"), StorageConfig()).errors == []
    assert set(read_back(tmp_path / "out")) == {path.stem for path in files[130:]}


def test_a_source_of_nothing_but_corrupt_images(tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "src/a.jpg").write_bytes(b"junk")
    with pytest.raises(SourceError, match=r"every one of the 1 images .* a\.jpg: not an image"):
        run_pack(tmp_path / "src", tmp_path / "out", drop_corrupt=True)


def test_packing_again_is_answered_at_once(lake, tmp_path):
    first = run_pack(lake, tmp_path / "out")
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("*")}
    again = run_pack(lake, tmp_path / "out", workers=2)
    assert again.already_packed
    assert not first.already_packed
    assert (again.samples, again.shards, again.bytes, again.identity) == (
        *(first.samples, first.shards, first.bytes, first.identity),
    )
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("*")} == before


def test_packing_again_mends_a_missing_shard(lake, tmp_path):
    run_pack(lake, tmp_path / "out")
    before = contents(tmp_path / "out")
    (tmp_path / "out/shard-000001.tar").unlink()
    assert not run_pack(lake, tmp_path / "out").already_packed
    assert contents(tmp_path / "out") == before


def test_another_dataset_at_the_target_is_refused_and_kept(lake, tmp_path):
    run_pack(lake, tmp_path / "out")
    before = contents(tmp_path / "out")
    (tmp_path / "src").mkdir()
    (tmp_path / "src/a.jpg").write_bytes(jpeg_bytes(1))
    with pytest.raises(
        TargetExistsError, match=rf"already holds a data set \({NUM_IMAGES} samples.*pack\.overwrite=true"
    ):
        run_pack(tmp_path / "src", tmp_path / "out")
    with pytest.raises(TargetExistsError):
        run_pack(lake, tmp_path / "out", seed=1)
    assert contents(tmp_path / "out") == before

    (tmp_path / "out/notes.txt").write_text("mine")
    assert run_pack(tmp_path / "src", tmp_path / "out", overwrite=True).samples == 1
    assert set(contents(tmp_path / "out")) == {
        *("manifest.json", "shards.arrow", "shard-000000.tar", "shard-000000.tar.idx", "notes.txt"),
    }


def test_tars_of_someone_else_are_not_replaced(lake, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/shard-000000.tar").write_bytes(b"precious")
    with pytest.raises(TargetExistsError, match=r"holds 1 tars without a manifest \(such as shard-000000\.tar\)"):
        run_pack(lake, tmp_path / "out")
    assert contents(tmp_path / "out") == {"shard-000000.tar": b"precious"}


def test_a_damaged_manifest_at_the_target_is_not_replaced_silently(lake, tmp_path):
    run_pack(lake, tmp_path / "out")
    (tmp_path / "out/manifest.json").write_bytes(b"{")
    with pytest.raises(TargetExistsError, match=r"holds a damaged data set .*pack\.overwrite=true"):
        run_pack(lake, tmp_path / "out")
    assert run_pack(lake, tmp_path / "out", overwrite=True).samples == NUM_IMAGES


def test_source_and_target_must_differ(lake):
    with pytest.raises(ConfigError, match="source and target are both"):
        run_pack(lake, lake)


def test_source_and_target_must_differ_by_any_name(lake, tmp_path):
    (tmp_path / "link").symlink_to(lake)
    for target in (tmp_path / "link", f"{lake}/../{lake.name}", f"file://{lake}/."):
        with pytest.raises(ConfigError, match="source and target are both"):
            run_pack(lake, target)


def test_tars_are_not_packed_into_their_own_source(tmp_path):
    write_tar(tmp_path / "src/a.tar", [("a.jpg", jpeg_bytes(1))])
    with pytest.raises(ConfigError, match="lies in the source"):
        run_pack(tmp_path / "src", tmp_path / "src/out", kind="tars")
    assert run_pack(tmp_path / "src", tmp_path / "src2", kind="tars").samples == 1


def test_progress_counts_samples(lake, tmp_path):
    seen = []
    config = PackConfig(shard_bytes="1MiB", workers=1, check="none")
    pack(str(lake), str(tmp_path / "out"), config, StorageConfig(), progress=lambda *counts: seen.append(counts))
    assert seen[0] == (0, NUM_IMAGES)
    assert seen[-1] == (NUM_IMAGES, NUM_IMAGES)
    assert seen == sorted(seen)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda path: path.unlink(), SourceError, r"class_1/image_00004\.jpg was listed but is gone"),
        (lambda path: path.write_bytes(jpeg_bytes(99)), PackError, r"image_00004\.jpg changed .* bytes listed"),
    ],
)
def test_an_image_that_changes_meanwhile(tmp_path, change, error, message):
    write_image_tree(tmp_path / "src", num_images=6)
    config = PackConfig(workers=1, check="none")

    def meanwhile(_done: int, _total: int) -> None:
        path = tmp_path / "src/class_1/image_00004.jpg"
        if path.exists():
            change(path)

    with pytest.raises(error, match=message):
        pack(str(tmp_path / "src"), str(tmp_path / "out"), config, StorageConfig(), progress=meanwhile)
    assert not (tmp_path / "out/manifest.json").exists()


def test_a_full_disk_says_how_much_is_needed_and_finished_shards_are_kept(lake, tmp_path, monkeypatch):
    """Writing to /dev/full is a real ENOSPC of the kernel."""
    open_temporary = dalipipe.packing.images.temporary_file
    opened = []

    def second_is_full(target):
        opened.append(target)
        return open_temporary(target) if len(opened) != 2 else Path("/dev/full").open("wb")

    with monkeypatch.context() as patch:
        patch.setattr("dalipipe.packing.images.temporary_file", second_is_full)
        with pytest.raises(
            NoSpaceError, match=rf"shard-000001\.tar .*needs about 2\.\d MB \(\d+ bytes\) at {tmp_path}"
        ):
            run_pack(lake, tmp_path / "out")
    assert "manifest.json" not in contents(tmp_path / "out")
    kept = (tmp_path / "out/shard-000000.tar").stat().st_mtime_ns
    run_pack(lake, tmp_path / "out")
    assert (tmp_path / "out/shard-000000.tar").stat().st_mtime_ns == kept
    run_pack(lake, tmp_path / "whole")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
