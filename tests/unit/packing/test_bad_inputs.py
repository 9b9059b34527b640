"""Lakes as they are: links in circles, files without permission, empty ones, odd names, files that change."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from dalipipe.errors import CorruptSampleError, DalipipeError, PackError, SourceError
from dalipipe.packing.config import PackConfig
from dalipipe.packing.run import pack
from dalipipe.storage.store import StorageConfig
from tests.support.archives import write_tar
from tests.support.images import jpeg_bytes, write_image_tree
from tests.unit.packing.reading import contents, read_back, run_pack


def test_links_in_circles_end(tmp_path):
    write_image_tree(tmp_path / "src", num_images=6)
    (tmp_path / "src/class_0/again").symlink_to(tmp_path / "src/class_0")
    (tmp_path / "src/class_1/up").symlink_to(tmp_path / "src")
    (tmp_path / "src/class_2/self.jpg").symlink_to("self.jpg")
    (tmp_path / "src/class_2/one").symlink_to("other")
    (tmp_path / "src/class_2/other").symlink_to("one")
    assert run_pack(tmp_path / "src", tmp_path / "out").samples == 6


def test_a_link_to_a_file_elsewhere_is_a_file(tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "a.jpg").write_bytes(jpeg_bytes(1))
    (tmp_path / "src/b.jpg").symlink_to(tmp_path / "a.jpg")
    run_pack(tmp_path / "src", tmp_path / "out")
    assert read_back(tmp_path / "out") == {"b": {"image": jpeg_bytes(1)}}


def test_a_link_to_nothing_is_named_or_left_aside(tmp_path):
    write_image_tree(tmp_path / "src", num_images=3)
    (tmp_path / "src/class_0/gone.jpg").symlink_to(tmp_path / "nowhere.jpg")
    assert run_pack(tmp_path / "src", tmp_path / "out").samples == 3


@pytest.mark.parametrize("what", ["file", "folder"])
def test_permission_denied_is_an_error_that_names_the_place(what):
    """In a process without the rights of root, which nothing is denied to."""
    with tempfile.TemporaryDirectory(prefix="dalipipe-denied-") as name:
        root = Path(name)
        for folder in (root, root / "out"):
            folder.mkdir(exist_ok=True)
            folder.chmod(0o777)
        write_image_tree(root / "src", num_images=6)
        write_image_tree(root / "fine", num_images=2)
        locked = root / "src/class_1"
        locked = next(locked.glob("*.jpg")) if what == "file" else locked
        locked.chmod(0)
        done = subprocess.run(
            [sys.executable, "-c", WITHOUT_RIGHTS, *(str(root / name) for name in ("src", "out", "fine", "first"))],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "PYTHONDONTWRITEBYTECODE": "1"},
            timeout=60,
        )
        locked.chmod(0o755)
        assert done.returncode == 7, done.stderr
        assert "AccessDeniedError" in done.stdout
        assert locked.name in done.stdout
        assert not (root / "out/manifest.json").exists()


WITHOUT_RIGHTS = """
import os, sys
from dalipipe.errors import DalipipeError
from tests.unit.packing.reading import run_pack
run_pack(sys.argv[3], sys.argv[4])  # brings every module before the rights are gone
if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
try:
    run_pack(sys.argv[1], sys.argv[2])
except DalipipeError as error:
    print(type(error).__name__, error)
    sys.exit(7)
"""


@pytest.mark.parametrize("data", [b"", b"\0", b"\xff\xd8\xff"])
def test_empty_and_nearly_empty_files(tmp_path, data):
    write_image_tree(tmp_path / "src", num_images=3)
    (tmp_path / "src/class_0/z.jpg").write_bytes(data)
    with pytest.raises(CorruptSampleError, match=r"class_0/z\.jpg is corrupt"):
        run_pack(tmp_path / "src", tmp_path / "out")
    assert run_pack(tmp_path / "src", tmp_path / "out", drop_corrupt=True).samples == 3


def test_names_with_spaces_newlines_and_unicode(tmp_path):
    folder = tmp_path / "src" / "a class"
    folder.mkdir(parents=True)
    names = [
        b"with space.jpg",
        b"new\nline.jpg",
        "ünï-画.jpg".encode(),
        b"tab\t.jpg",
        b"-rf.jpg",
        b"#x?.jpg",
    ]
    for number, name in enumerate(names):
        (folder / os.fsdecode(name)).write_bytes(jpeg_bytes(number))
    run_pack(tmp_path / "src", tmp_path / "out")
    found = read_back(tmp_path / "out")
    assert sorted(s["image"] for s in found.values()) == sorted(jpeg_bytes(i) for i in range(len(names)))
    assert {"a class/with space", "a class/ünï-画", "a class/-rf", "a class/#x?"} < set(found)
    listed = subprocess.run(["tar", "tf", tmp_path / "out/shard-000000.tar"], capture_output=True, check=True).stdout
    assert len(listed.splitlines()) == 2 * len(names)


def test_a_name_that_is_no_text_is_refused_by_name(tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / os.fsdecode(b"\xff\xfe.jpg")).write_bytes(jpeg_bytes(1))
    with pytest.raises(DalipipeError, match=r"\\xff\\xfe\.jpg': the file name is not UTF-8.*rename it"):
        run_pack(tmp_path / "src", tmp_path / "out")


def test_a_file_that_changes_all_the_time(tmp_path):
    """Either a version of it that was there arrives whole, or packing says that it changed: never a mix."""
    write_image_tree(tmp_path / "src", num_images=60, num_classes=0)
    restless = tmp_path / "src/a.jpg"
    versions = [jpeg_bytes(i, height=50 + 10 * i, width=70) for i in range(4)]
    restless.write_bytes(versions[0])
    stop = threading.Event()

    def change() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            restless.write_bytes(versions[number % 4])

    thread = threading.Thread(target=change)
    thread.start()
    try:
        outcomes = set()
        for attempt in range(6):
            try:
                run_pack(tmp_path / "src", tmp_path / f"out{attempt}")
            except (PackError, CorruptSampleError, SourceError) as error:
                assert "a.jpg" in str(error)
                outcomes.add("said")
            else:
                assert read_back(tmp_path / f"out{attempt}")["a"]["image"] in versions
                outcomes.add("whole")
    finally:
        stop.set()
        thread.join(10)
    assert outcomes <= {"said", "whole"}


def test_a_tar_that_changes_after_it_was_opened(tmp_path):
    """Its members would be read where they lay before."""
    path = tmp_path / "src/a.tar"
    members = [(f"{i}.txt", b"a" * 1000) for i in range(20)]
    write_tar(path, members)

    def rewrite(what, done, total):
        if what == "opening" and done == total:
            write_tar(path, [(name, b"b" * 1000) for name, _ in members])

    config = PackConfig(kind="tars", workers=1)
    with pytest.raises(PackError, match=r"a\.tar changed while it was packed"):
        pack(str(path.parent), str(tmp_path / "out"), config, StorageConfig(), stage=rewrite)
    assert not (tmp_path / "out/manifest.json").exists()
    assert run_pack(path.parent, tmp_path / "out", kind="tars").samples == 20
    assert {sample["text"] for sample in read_back(tmp_path / "out").values()} == {b"b" * 1000}


def test_two_images_in_one_sample_of_a_tar(tmp_path):
    image = jpeg_bytes(1)
    write_tar(tmp_path / "src/a.tar", [("a.jpg", image), ("a.png", image), ("b.jpg", image)])
    with pytest.raises(CorruptSampleError, match=r"a\.tar:a: has jpg, png, two of which are one field"):
        run_pack(tmp_path / "src", tmp_path / "out", kind="tars")
    run_pack(tmp_path / "src", tmp_path / "out", kind="tars", drop_corrupt=True)
    assert read_back(tmp_path / "out") == {"b": {"image": image}}
    assert "two of which are one field" in (tmp_path / "out/quarantine.jsonl").read_text()


def test_a_disk_without_nameless_files(tmp_path, monkeypatch):
    """As NFS and many FUSE mounts are: nothing is lost but the promise that a killed writer leaves no file."""
    write_image_tree(tmp_path / "src", num_images=40)
    run_pack(tmp_path / "src", tmp_path / "with", resize=64)
    real, refused = os.open, []

    def without(path, flags, *rest, **named):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            refused.append(path)
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return real(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", without)
    run_pack(tmp_path / "src", tmp_path / "without", resize=64)
    monkeypatch.undo()
    assert refused
    assert contents(tmp_path / "without") == contents(tmp_path / "with")


def test_a_fifo_and_a_device_are_no_images(tmp_path):
    write_image_tree(tmp_path / "src", num_images=3)
    os.mkfifo(tmp_path / "src/class_0/pipe.jpg")
    assert run_pack(tmp_path / "src", tmp_path / "out").samples == 3
