"""What only plain files do."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from dalipipe.errors import AccessDeniedError, NoSpaceError, ObjectNotFoundError, StorageError
from dalipipe.storage import open_store


def test_put_leaves_one_file_and_follows_the_umask(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        open_store(str(tmp_path)).put("a/b", b"1")
    finally:
        os.umask(old)
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b"]
    assert (tmp_path / "a/b").stat().st_mode & 0o777 == 0o640


def test_a_file_without_a_name_becomes_the_object_and_a_named_one_is_copied(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    store = open_store(str(tmp_path / "set"))
    descriptor = os.open(tmp_path, os.O_TMPFILE | os.O_RDWR, 0o666)
    with os.fdopen(descriptor, "w+b") as file:
        file.write(b"whole")
        file.flush()
        store.put("old", b"before")
        for key in ("old", "new"):  # once it has a name, it is copied as any other
            store.put(key, Path(f"/proc/self/fd/{descriptor}"))
        inode = os.fstat(descriptor).st_ino
    assert [bytes(store.read(key)) for key in ("old", "new")] == [b"whole", b"whole"]
    assert [(tmp_path / "set" / key).stat().st_ino == inode for key in ("old", "new")] == [True, False]


def test_temporaries_of_killed_writers_are_never_listed(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/.tmp-123-ff").write_bytes(b"half")
    (tmp_path / ".tmp-folder").mkdir()
    (tmp_path / ".tmp-folder/x").write_bytes(b"half")
    (tmp_path / "a/.hidden").write_bytes(b"a file like any other")
    assert [info.key for info in open_store(str(tmp_path)).list()] == ["a/.hidden"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk_is_typed_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def full(descriptor: int, data: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(NoSpaceError, match=f"cannot write {tmp_path}/x: .*free some space"):
        open_store(str(tmp_path)).put("x", b"1")
    assert list(tmp_path.iterdir()) == []


def test_denied_access_is_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").write_bytes(b"1")

    # A real refusal needs another user; root passes every check.
    def refuse(*_: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(AccessDeniedError, match=f"cannot read {tmp_path}/x: Permission denied; check"):
        open_store(str(tmp_path)).read("x")


def test_links_are_followed_and_cannot_loop(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real/1").write_bytes(b"1")
    (tmp_path / "lake").mkdir()
    (tmp_path / "lake/linked").symlink_to(tmp_path / "real")
    (tmp_path / "real/up").symlink_to(tmp_path / "real")
    (tmp_path / "lake/2").symlink_to(tmp_path / "real/1")
    found = {info.key for info in open_store(str(tmp_path / "lake")).list()}
    assert found == {"linked/1", "2"}


def test_pipe_in_the_lake_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    store = open_store(str(tmp_path))
    assert list(store.list()) == []
    with pytest.raises(ObjectNotFoundError, match="not a file"):
        store.read("pipe")


def test_name_that_is_no_text_is_an_error_not_a_broken_manifest(tmp_path: Path) -> None:
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.jpg")).write_bytes(b"1")
    with pytest.raises(StorageError, match="not UTF-8"):
        list(open_store(str(tmp_path)).list())


def test_put_below_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"1")
    with pytest.raises(StorageError, match=f"cannot write {tmp_path}/file/x"):
        open_store(str(tmp_path)).put("file/x", b"2")


def test_put_on_a_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(StorageError, match=f"cannot write {tmp_path}/folder"):
        open_store(str(tmp_path)).put("folder", b"2")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_version_changes_with_the_content(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    store.put("x", b"1")
    first = store.head("x").etag
    store.put("x", b"2")
    assert store.head("x").etag != first


def test_if_absent_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FUSE mounts of object stores refuse hard links."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "link", refuse)
    store = open_store(str(tmp_path))
    store.put("x", b"1", if_absent=True)
    with pytest.raises(FileExistsError):
        store.put("x", b"2", if_absent=True)
    assert (tmp_path / "x").read_bytes() == b"1"
