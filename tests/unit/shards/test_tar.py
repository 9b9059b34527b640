from __future__ import annotations

import io
import subprocess
import tarfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dalipipe.errors import IntegrityError
from dalipipe.shards.digest import Digest64, Digest128, digest64
from dalipipe.shards.fields import field_of, fields_of
from dalipipe.shards.tar import TarWriter, member_header, sample_bytes, scan_entries, walk_tar

LONG = "class/" + "sub folder/" * 20 + "naïve-файл-画像-" + "x" * 90
SAMPLES = [
    ("plain", {"jpg": b"\xff\xd8" * 300, "cls": b"7"}),
    ("empty", {"jpg": b"", "json": b"{}"}),
    ("exact", {"jpg": b"z" * 512}),
    (LONG, {"jpg": b"long", "txt": "höhe".encode()}),
    ("n" * 96, {"jpg": b"1"}),
    ("n" * 97, {"jpg": b"2"}),
]


def written(samples=SAMPLES):
    stream = io.BytesIO()
    writer = TarWriter(stream)
    extents = [writer.add(key, members) for key, members in samples]
    writer.finish()
    return stream.getvalue(), extents, writer


def test_extents_say_where_the_bytes_are():
    data, extents, writer = written()
    assert writer.offset == len(data)
    assert writer.digest == digest64(data)
    assert [e.start for e in extents] == [0, *(e.stop for e in extents[:-1])]
    for extent, (key, members) in zip(extents, SAMPLES, strict=True):
        assert list(extent.members) == sorted(members)
        assert extent.stop - extent.start == sample_bytes(key, {e: len(m) for e, m in members.items()})
        for extension, (offset, size) in extent.members.items():
            assert data[offset : offset + size] == members[extension]


def test_gnu_tar_extracts_every_name_and_byte(tmp_path):
    data, _, _ = written()
    (tmp_path / "s.tar").write_bytes(data)
    out = tmp_path / "out"
    out.mkdir()
    done = subprocess.run(["tar", "xf", tmp_path / "s.tar", "-C", out], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    for key, members in SAMPLES:
        for extension, content in members.items():
            assert (out / f"{key}.{extension}").read_bytes() == content


def test_webdataset_reads_the_samples():
    from webdataset.tariterators import group_by_keys, tar_file_expander

    data, _, _ = written()
    # Its reader by URL never closes the file, which the suite's warnings would report.
    found = list(group_by_keys(tar_file_expander([{"url": "s.tar", "stream": io.BytesIO(data)}])))
    assert [f["__key__"] for f in found] == [key for key, _ in SAMPLES]
    for sample, (_, members) in zip(found, SAMPLES, strict=True):
        assert {e: sample[e] for e in members} == members


def test_members_carry_nothing_of_this_machine_or_moment():
    data, _, _ = written()
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        for member in tar:
            assert (member.mtime, member.uid, member.gid, member.mode) == (0, 0, 0, 0o644)
            assert (member.uname, member.gname) == ("", "")


def test_cut_gives_the_digest_of_what_lies_between():
    stream = io.BytesIO()
    writer = TarWriter(stream)
    cuts = []
    for key, members in SAMPLES:
        start = writer.offset
        writer.add(key, members)
        cuts.append((start, writer.offset, writer.cut()))
    for start, stop, digest in cuts:
        assert digest64(stream.getvalue()[start:stop]) == digest


NAMES = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="/."), min_size=1, max_size=150)


@settings(max_examples=60, deadline=None)
@given(samples=st.lists(st.tuples(NAMES, st.binary(max_size=1500)), max_size=6))
def test_the_walker_finds_what_the_writer_and_tarfile_know(samples):
    data, extents, _ = written([(key, {"jpg": content}) for key, content in samples])
    members = list(walk_tar(data))
    assert [m.name for m in members] == [f"{key}.jpg" for key, _ in samples]
    assert [data[m.offset : m.offset + m.num_bytes] for m in members] == [content for _, content in samples]
    assert [(m.start, m.stop) for m in members] == [(e.start, e.stop) for e in extents]
    with tarfile.open(fileobj=io.BytesIO(data)) as reference:
        assert [(m.name, m.offset_data) for m in reference] == [(m.name, m.offset) for m in members]


@pytest.mark.parametrize("fmt", [tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT])
def test_the_walker_reads_tars_of_others(fmt):
    stream = io.BytesIO()
    names = ["a.jpg", "folder/" * 12 + "x" * 60 + ".jpg"]
    with tarfile.open(fileobj=stream, mode="w", format=fmt) as tar:
        folder = tarfile.TarInfo("folder")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        for name in names:
            info = tarfile.TarInfo(name)
            info.size = 3
            tar.addfile(info, io.BytesIO(b"abc"))
    assert [m.name for m in walk_tar(stream.getvalue())] == names


def test_the_walker_names_the_byte_where_a_tar_is_damaged():
    data, extents, _ = written()
    broken = bytearray(data)
    broken[extents[1].start] ^= 1
    with pytest.raises(IntegrityError, match=rf"no tar header at byte {extents[1].start}: its checksum"):
        list(walk_tar(broken))
    with pytest.raises(IntegrityError, match=r"tar member at byte 0 .* passes the end at 600"):
        list(walk_tar(data[:600]))
    with pytest.raises(IntegrityError, match=r"tar header at byte 0 is cut short \(100 of 512 bytes\)"):
        list(walk_tar(data[:100]))
    with pytest.raises(IntegrityError, match="not octal"):
        list(walk_tar(b"\xff" * 512))


@pytest.mark.parametrize("size", [b"-0000001000", b"-0000000001", b"0o1_7"])
def test_a_size_that_is_no_plain_octal_number_is_damage_and_ends_the_walk(size):
    header = bytearray(member_header("a.jpg", 0))
    header[124:136] = size.ljust(12, b"\0")
    header[148:156] = b"%06o\0 " % (sum(header[:148]) + 8 * ord(" ") + sum(header[156:]))
    with pytest.raises(IntegrityError, match="no tar header at byte 512: its number fields are not octal"):
        for number, _ in enumerate(walk_tar(member_header("b.jpg", 0) + bytes(header) + bytes(1024))):
            assert number < 10


def test_numbers_in_pax_records_of_any_length_are_no_crash():
    def walked(records):
        header = bytearray(member_header("x", len(records)))
        header[156:157] = b"x"
        header[148:156] = b"%06o\0 " % (sum(header[:148]) + 8 * ord(" ") + sum(header[156:]))
        data = bytes(header) + records + bytes(-len(records) % 512)
        return [m.name for m in walk_tar(data + member_header("a.jpg", 0) + bytes(1024))]

    with pytest.raises(IntegrityError, match="passes the end"):
        walked(b"5011 size=" + b"9" * 5000 + b"\n")
    assert walked(b"9" * 5000 + b" path=b\n") == ["a.jpg"]


def test_digests_in_pieces_equal_the_whole():
    data = bytes(range(256)) * 50
    pieces, wide = Digest64(), Digest128()
    for start in range(0, len(data), 999):
        pieces.update(data[start : start + 999])
        wide.update(memoryview(data)[start : start + 999])
    assert pieces.value == digest64(data) == digest64(memoryview(data))
    assert 0 <= pieces.value < 2**64
    whole = Digest128()
    whole.update(data)
    assert wide.hex == whole.hex
    assert len(wide.hex) == 32
    assert digest64(b"") == 0x2D06800538D394C2  # the value that the xxHash specification states


def test_fields_of_extensions():
    assert [field_of(e) for e in ("JPEG", "png", "cls", "json", "txt", "npy")] == [
        *("image", "image", "label", "json", "text", "npy")
    ]
    assert [(f.name, f.extensions) for f in fields_of(["png", "cls", "jpg"])] == [
        ("image", ("jpg", "png")),
        ("label", ("cls",)),
    ]


@given(
    name=st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=130),
    num_bytes=st.integers(0, 2**36),
)
def test_headers_are_those_of_the_standard_library(name, num_bytes):
    info = tarfile.TarInfo(name)
    info.size, info.mode = num_bytes, 0o644
    assert member_header(name, num_bytes) == info.tobuf(format=tarfile.PAX_FORMAT, encoding="utf-8", errors="strict")


def test_what_stands_behind_the_end_is_no_member_and_is_never_an_error() -> None:
    one, end = member_header("a.jpg", 0), bytes(1024)
    many = (one + end) * 3000
    assert [m.name for m in walk_tar(many)] == ["a.jpg"]
    entries = list(scan_entries(lambda a, b: many[a:b], len(many)))
    assert [getattr(entry, "kind", "member") for entry in entries] == ["member", *["behind the end"] * 2999]
    for behind in (b"x" * 700, one[:300], member_header("b.jpg", 9999), bytes(3 << 20) + one):
        data = one + end + behind
        assert len(list(scan_entries(lambda a, b, data=data: data[a:b], len(data)))) == 1
    apart = one + end + bytes(500 * 1024) + one
    assert len(list(scan_entries(lambda a, b: apart[a:b], len(apart)))) == 2
