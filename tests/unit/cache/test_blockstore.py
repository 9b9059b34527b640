from __future__ import annotations

import errno
import logging
import os
import time
from pathlib import Path

import numpy as np
import pytest

from dalipipe import filelocks
from dalipipe.cache import publish
from dalipipe.cache.blockstore import BlockStore, boot_time_s
from dalipipe.cache.locks import lock_block
from dalipipe.cache.mapping import map_path
from dalipipe.errors import CacheTimeoutError
from tests.support.waiting import wait_until

DATA = memoryview(bytes(range(256)) * 40).toreadonly()


def store(folder: Path, **options: object) -> BlockStore:
    folder.mkdir(exist_ok=True)
    return BlockStore(folder, **options)  # type: ignore[arg-type]


def test_what_is_written_is_read_and_nothing_else_is_there(tmp_path: Path) -> None:
    blocks = store(tmp_path)
    assert blocks.open(700, len(DATA)) is None
    blocks.write(700, DATA)
    assert blocks.open(700, len(DATA)) == DATA
    assert blocks.contains(700)
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()] == ["1/700"]


def test_a_second_writer_keeps_the_first_file(tmp_path: Path) -> None:
    blocks = store(tmp_path)
    blocks.write(1, DATA)
    inode = blocks.path(1).stat().st_ino
    blocks.write(1, DATA)
    assert blocks.path(1).stat().st_ino == inode


def test_a_held_view_keeps_its_bytes_when_the_block_is_unlinked(tmp_path: Path) -> None:
    blocks = store(tmp_path)
    blocks.write(1, DATA)
    view = blocks.open(1, len(DATA))
    assert view is not None
    blocks.path(1).unlink()
    assert view == DATA
    assert not blocks.contains(1)


def test_open_views_hold_no_file_descriptors_and_unmap_when_dead(tmp_path: Path) -> None:
    blocks = store(tmp_path)
    blocks.write(1, DATA)
    mapped = str(blocks.path(1))
    num_descriptors = len(list(Path("/proc/self/fd").iterdir()))
    views = [np.frombuffer(blocks.open(1, len(DATA)) or b"", np.uint8) for _ in range(50)]
    assert len(list(Path("/proc/self/fd").iterdir())) <= num_descriptors
    assert mapped in Path("/proc/self/maps").read_text()
    views.clear()
    assert mapped not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("keep_mtime", [True, False])
def test_flipped_bytes_are_found(tmp_path: Path, keep_mtime: bool) -> None:
    store(tmp_path).write(1, DATA)
    path = store(tmp_path).path(1)
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(100)
        file.write(b"\xff\xfe")
    boot_s = boot_time_s()
    if keep_mtime:
        # Only the age tells: the file is older than this start of the host.
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        boot_s = time.time() + 60
    assert store(tmp_path, boot_s=boot_s).open(1, len(DATA)) is None
    assert not path.exists()


def test_a_sound_file_from_before_the_start_is_checked_once(tmp_path: Path) -> None:
    store(tmp_path).write(1, DATA)
    boot_s = time.time()
    blocks = store(tmp_path, boot_s=boot_s)
    old = blocks.path(1).stat().st_ctime_ns
    wait_until(lambda: time.time() > boot_s + 0.02)  # what is touched now has a later time: the kernel's clock ticks
    assert blocks.open(1, len(DATA)) == DATA
    checked = blocks.path(1).stat().st_ctime_ns
    assert checked > old
    assert blocks.open(1, len(DATA)) == DATA
    assert blocks.path(1).stat().st_ctime_ns == checked


def test_what_a_power_cut_left_of_a_file_is_found(tmp_path: Path) -> None:
    """The name survived and the pages did not: the right size and time, all or some of it zeros."""
    for block, zeroed in ((1, slice(0, None)), (2, slice(4096, 8192))):
        store(tmp_path).write(block, DATA)
        path = store(tmp_path).path(block)
        before = path.stat()
        torn = bytearray(path.read_bytes())
        torn[zeroed] = bytes(len(torn[zeroed]))
        path.write_bytes(torn)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        started_s = time.time() + 60
        assert store(tmp_path, boot_s=started_s).open(block, len(DATA)) is None
        assert not path.exists()


@pytest.mark.parametrize("num_bytes", [0, 5, len(DATA)])
def test_a_file_of_the_wrong_size_is_dropped(tmp_path: Path, num_bytes: int) -> None:
    blocks = store(tmp_path)
    blocks.write(1, DATA)
    os.truncate(blocks.path(1), num_bytes)
    assert blocks.open(1, len(DATA)) is None
    assert not blocks.contains(1)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_failed_write_leaves_nothing(tmp_path: Path, number: int) -> None:
    written = 0

    def write(descriptor: int, data: memoryview) -> int:
        nonlocal written
        if written:
            raise OSError(number, os.strerror(number))
        written += os.write(descriptor, data[:1000])
        return written

    blocks = store(tmp_path, write=write)
    with pytest.raises(OSError, match=os.strerror(number)):
        blocks.write(1, DATA)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_without_o_tmpfile_blocks_are_renamed_into_place_and_it_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real_open = os.open

    def no_tmpfile(path: object, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "no O_TMPFILE here")
        return real_open(path, flags, mode)  # type: ignore[arg-type]

    monkeypatch.setattr(publish.os, "open", no_tmpfile)
    publish._say_no_tmpfile.cache_clear()
    blocks = store(tmp_path)
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / ".2.0123456789abcdef").write_bytes(b"of a killed writer")
    with caplog.at_level(logging.WARNING):
        blocks.write(1, DATA)
        blocks.write(2, DATA)
    assert blocks.open(1, len(DATA)) == DATA
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["1", "2"]
    assert len([r for r in caplog.records if "O_TMPFILE" in r.message]) == 1


def test_without_locks_of_open_files_blocks_still_come_and_it_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unsupported(descriptor: int, command: int, argument: bytes) -> bytes:
        raise OSError(errno.EINVAL, "no such lock")

    monkeypatch.setattr(filelocks.fcntl, "fcntl", unsupported)
    filelocks._say_no_locks.cache_clear()
    blocks = store(tmp_path)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            lock = blocks.lock(1, wait_s=1)
            assert lock is not None
            lock.release()
    assert len([r for r in caplog.records if "locks" in r.message]) == 1


def test_a_lock_excludes_other_openings_and_a_wait_has_a_deadline(tmp_path: Path) -> None:
    path = tmp_path / "locks"
    held = lock_block(path, 7, wait_s=0, done=lambda: False)
    assert held is not None
    other = lock_block(path, 8, wait_s=0, done=lambda: False)
    assert other is not None
    with pytest.raises(CacheTimeoutError, match=r"block 65543.*cache.wait_s"):
        lock_block(path, 7 + 65536, wait_s=0.01, done=lambda: False)
    assert lock_block(path, 7, wait_s=10, done=lambda: True) is None
    held.release()
    held.release()
    again = lock_block(path, 7, wait_s=0, done=lambda: False)
    assert again is not None
    again.release()
    other.release()


def test_mapping_an_empty_or_absent_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(OSError):
        map_path(tmp_path / "empty")
    with pytest.raises(FileNotFoundError):
        map_path(tmp_path / "absent")
