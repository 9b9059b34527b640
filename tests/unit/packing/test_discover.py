from __future__ import annotations

import tarfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dalipipe.errors import SourceError
from dalipipe.packing.discover import discover, unique_keys
from dalipipe.storage.open import open_store


def make(root, *paths):
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(path.encode())
    return open_store(str(root))


def test_class_folders(tmp_path):
    store = make(tmp_path, "dog/b.JPEG", "ant/deep/er/a.png", "dog/a.jpg", "cow/x.webp")
    listing = discover(store)
    assert listing.classes == ("ant", "cow", "dog")
    assert [(s.name, s.key, s.members[1].data, s.members[0].extension) for s in listing.samples] == [
        ("ant/deep/er/a.png", "ant/deep/er/a", b"0", "png"),
        ("cow/x.webp", "cow/x", b"1", "webp"),
        ("dog/a.jpg", "dog/a", b"2", "jpg"),
        ("dog/b.JPEG", "dog/b", b"2", "jpeg"),
    ]
    assert [s.members[0].num_bytes for s in listing.samples] == [len(s.name) for s in listing.samples]


def test_a_flat_folder_has_no_labels(tmp_path):
    listing = discover(make(tmp_path, "b.jpg", "a.jpg"))
    assert listing.classes == ()
    assert [(s.key, len(s.members)) for s in listing.samples] == [("a", 1), ("b", 1)]


def test_what_is_no_image_is_counted(tmp_path):
    store = make(
        tmp_path, "c/a.jpg", "c/a.txt", "c/b.txt", "c/anim.gif", ".cache/x.jpg", "c/.DS_Store", "c/._a.jpg", "c/README"
    )
    assert discover(store).skipped == {".gif": 1, ".txt": 2, "hidden": 3, "no extension": 1}


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ((), r"holds no image: looked for bmp, jp2, .* found nothing at all: is it a folder that exists"),
        (("a/x.gif", "a/y.gif", "a/z.txt"), r"holds no image: .* found 2 \.gif, 1 \.txt"),
        (("a.jpg", "c/b.jpg", "c/d.jpg"), r"1 images beside its class folders \(such as 'a\.jpg'\) and 2 in them"),
    ],
)
def test_sources_that_cannot_be_packed(tmp_path, paths, message):
    with pytest.raises(SourceError, match=message):
        discover(make(tmp_path, *paths))


def test_a_missing_source_is_named(tmp_path):
    with pytest.raises(SourceError, match=r"/nowhere"):
        discover(open_store(str(tmp_path / "nowhere")))


def test_the_digest_notices_names_sizes_and_rewrites(tmp_path):
    store = make(tmp_path, "c/a.jpg", "c/b.jpg", "c/notes.txt")
    first = discover(store).digest
    assert discover(store).digest == first
    (tmp_path / "c/notes.txt").write_bytes(b"other")
    assert discover(store).digest == first
    (tmp_path / "c/a.jpg").write_bytes(b"C/A.JPG")
    second = discover(store).digest
    (tmp_path / "c/a.jpg").rename(tmp_path / "c/z.jpg")
    assert len({first, second, discover(store).digest}) == 3


PATHS = st.lists(
    st.text(st.sampled_from("ab./\n é\ud800-_"), min_size=1, max_size=8).map(lambda s: f"{s}.jpg"),
    unique=True,
    max_size=30,
)


@given(paths=PATHS)
def test_keys_are_unique_and_can_be_written_and_split(paths):
    keys = unique_keys(paths)
    assert len(set(keys)) == len(keys)
    for key in keys:
        key.encode()
        assert "." not in key.rpartition("/")[2]
        assert key.isprintable()
        tarfile.TarInfo(f"{key}.jpg").tobuf(tarfile.PAX_FORMAT)


def test_keys_keep_names_where_they_can():
    assert unique_keys(["n01/a.jpg", "n01/b.v2.jpg", "v1.0/c.jpg"]) == ["n01/a", "n01/b_v2", "v1.0/c"]
    first, second = unique_keys(["c/a.jpg", "c/a.png"])
    assert first == "c/a"
    assert second.startswith("c/a-")
