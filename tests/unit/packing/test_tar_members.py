"""What a tar holds besides samples, or lacks: counted, or refused by name."""

from __future__ import annotations

import subprocess
import tarfile

import pytest

from dalipipe.errors import CorruptSampleError, SourceError
from dalipipe.packing.config import IndexConfig
from dalipipe.packing.index import index
from dalipipe.storage.store import StorageConfig
from tests.support.archives import write_tar
from tests.unit.packing.reading import read_back, run_pack
from tests.unit.packing.samples import IMAGES, expected, samples


@pytest.mark.parametrize("passes", ["1", "2"])
def test_links_folders_and_meta_members_are_left_aside_and_counted(tmp_path, passes):
    (tmp_path / "src").mkdir()
    with tarfile.open(tmp_path / "src/a.tar", "w") as tar:
        for name, kind in (("dir", tarfile.DIRTYPE), ("l.jpg", tarfile.SYMTYPE), ("pipe.x", tarfile.FIFOTYPE)):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "elsewhere"
            tar.addfile(info)
    write_tar(tmp_path / "src/b.tar", [("__meta__.json", b"{}"), ("README", b"x"), (".hidden.jpg", b""), *samples(2)])
    kinds = {"folder": 1, "hidden": 1, "meta": 1, "no extension": 1, "pipe": 1, "symbolic link": 1}
    for again in (False, True):
        report = run_pack(tmp_path / "src", tmp_path / "out", kind="tars", passes=passes)
        assert (report.already_packed, report.skipped, report.skipped_kinds) == (again, 6, kinds)
    assert read_back(tmp_path / "out") == expected(2)


@pytest.mark.parametrize("passes", ["1", "2"])
@pytest.mark.parametrize("form", ["gnu", "pax", "v7"])
def test_a_second_name_of_a_file_is_a_sample_too(tmp_path, form, passes):
    """GNU tar writes it as a hard link to the member before it, which holds nothing itself."""
    long = "n" * (120 if form != "v7" else 20)
    tree = tmp_path / "tree/d"
    tree.mkdir(parents=True)
    (tree / f"{long}.jpg").write_bytes(IMAGES[0])
    for name in ("z.jpg", "zz.jpg"):
        (tree / name).hardlink_to(tree / f"{long}.jpg")
    (tmp_path / "src").mkdir()
    names = [f"./d/{name}.jpg" for name in (long, "z", "zz")]
    tar = ["tar", "cf", tmp_path / "src/a.tar", f"--format={form}", "-C", tmp_path / "tree", *names]
    subprocess.run(tar, check=True)
    run_pack(tmp_path / "src", tmp_path / "out", kind="tars", passes=passes)
    assert read_back(tmp_path / "out") == {f"d/{name}": {"image": IMAGES[0]} for name in (long, "z", "zz")}
    with pytest.raises(SourceError, match=r"cannot be read in place: './d/z\.jpg' is a hard link to .*2 such"):
        index(str(tmp_path / "src"), str(tmp_path / "index"), IndexConfig(), StorageConfig())


def test_a_hard_link_to_nothing_is_data_that_is_lost(tmp_path):
    (tmp_path / "src").mkdir()
    with tarfile.open(tmp_path / "src/b.tar", "w") as tar:
        info = tarfile.TarInfo("h.jpg")
        info.type, info.linkname = tarfile.LNKTYPE, "elsewhere.jpg"
        tar.addfile(info)
    write_tar(tmp_path / "src/a.tar", samples(3))
    with pytest.raises(CorruptSampleError, match=r"b\.tar:h\.jpg: is a hard link to 'elsewhere\.jpg', which no member"):
        run_pack(tmp_path / "src", tmp_path / "out", kind="tars")
    assert run_pack(tmp_path / "src", tmp_path / "out", kind="tars", drop_corrupt=True).quarantined == 1
    assert read_back(tmp_path / "out") == expected(3)


@pytest.mark.parametrize(
    "options", [["--format=gnu"], *(["--format=pax", f"--sparse-version={v}"] for v in ("0.0", "0.1", "1.0"))]
)
def test_sparse_members_are_refused_by_name(tmp_path, options):
    """GNU tar leaves the holes of such files out; one with many of them has a map in several records."""
    tree = tmp_path / "tree"
    tree.mkdir()
    with (tree / "holes.jpg").open("wb") as file:
        for number in range(40):
            file.seek(number * 2**16)
            file.write(b"x")
    (tree / "whole.jpg").write_bytes(IMAGES[0])
    (tmp_path / "src").mkdir()
    tar = ["tar", "cSf", tmp_path / "src/a.tar", *options, "-C", tree, "holes.jpg", "whole.jpg"]
    subprocess.run(tar, check=True)
    with pytest.raises(CorruptSampleError, match=r"a\.tar:holes\.jpg: is stored sparse .*pack\.drop_corrupt=true"):
        run_pack(tmp_path / "src", tmp_path / "out", kind="tars")
    report = run_pack(tmp_path / "src", tmp_path / "out", kind="tars", drop_corrupt=True)
    assert (report.quarantined, read_back(tmp_path / "out")) == (1, {"whole": {"image": IMAGES[0]}})
    with pytest.raises(SourceError, match=r"'holes\.jpg' is stored sparse"):
        index(str(tmp_path / "src"), str(tmp_path / "index"), IndexConfig(), StorageConfig())


def test_a_tar_without_an_end_is_counted_and_warned_of(tmp_path, caplog):
    path = write_tar(tmp_path / "src/a.tar", samples(5))
    write_tar(tmp_path / "src/b.tar", samples(5, first=5))
    with tarfile.open(path) as tar:
        end = tar.getmembers()[9].offset
    path.write_bytes(path.read_bytes()[:end])
    for again in (False, True):
        report = run_pack(tmp_path / "src", tmp_path / "out", kind="tars")
        assert (report.already_packed, report.samples, report.truncated) == (again, 8, 1)
    assert "1 tars of" in caplog.text
    assert "a.tar) stop without the zeros that end a tar" in caplog.text
    caplog.clear()
    found = index(str(tmp_path / "src"), str(tmp_path / "index"), IndexConfig(), StorageConfig())
    assert (found.samples, found.truncated, found.skipped) == (8, 1, 0)
    assert "a.tar) stop without" in caplog.text


@pytest.mark.parametrize("passes", ["1", "2"])
def test_members_behind_the_end_of_a_tar_are_counted_and_warned_of(tmp_path, caplog, passes):
    """`cat a.tar b.tar c.tar`: readers stop at the first end, GNU tar goes on when it is told to ignore zeros."""
    path = write_tar(tmp_path / "src/a.tar", samples(3))
    joined = b"".join(write_tar(tmp_path / f"{i}.tar", samples(i + 1, first=3 * i)).read_bytes() for i in (1, 2))
    path.write_bytes(path.read_bytes() + joined + b"no tar, and no whole record")
    write_tar(tmp_path / "src/b.tar", samples(2, first=20))
    shown = [
        len(subprocess.run(["tar", "tf", path, *more], check=False, capture_output=True).stdout.split())
        for more in ([], ["--ignore-zeros"])
    ]
    kinds = {"behind the end": shown[1] - shown[0]}
    assert kinds["behind the end"] >= 5
    for again in (False, True):
        report = run_pack(tmp_path / "src", tmp_path / "out", kind="tars", passes=passes)
        assert (report.already_packed, report.samples, report.skipped_kinds) == (again, 5, kinds)
    assert f"{shown[1] - shown[0]} members of 1 tars of" in caplog.text
    assert "of a.tar) stand behind the zeros" in caplog.text
    caplog.clear()
    found = index(str(tmp_path / "src"), str(tmp_path / "index"), IndexConfig(), StorageConfig())
    assert (found.samples, found.truncated, found.skipped_kinds) == (5, 0, kinds)
    assert "--ignore-zeros" in caplog.text
