from __future__ import annotations

import json
import threading
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dalipipe.errors import ManifestError
from dalipipe.shards import Manifest, digest64
from dalipipe.shards.assembly import ManifestBuilder
from dalipipe.shards.index import Rows, part_rows
from tests.support.shards import Folder, write_dataset

SAMPLES = st.lists(
    st.lists(st.tuples(st.binary(min_size=0, max_size=1200), st.booleans()), min_size=1, max_size=7),
    min_size=1,
    max_size=4,
)


def samples_of(drawn: list[list[tuple[bytes, bool]]]) -> list[list[tuple[str, dict[str, bytes]]]]:
    shards, i = [], 0
    for shard in drawn:
        shards.append([])
        for content, labelled in shard:
            shards[-1].append((f"k{i}", {"jpg": content, **({"cls": str(i).encode()} if labelled else {})}))
            i += 1
    return shards


@settings(max_examples=60, deadline=None)
@given(drawn=SAMPLES, block_samples=st.integers(1, 12), seed=st.integers(0, 99))
def test_locate_finds_exactly_the_bytes_written_whatever_crosses_what(drawn, block_samples, seed):
    shards = samples_of(drawn)
    written = [sample for shard in shards for sample in shard]
    folder = write_dataset(shards, block_samples=block_samples)
    manifest = Manifest.open(folder.read, max_open_indices=2)
    ids = np.random.default_rng(seed).integers(0, len(written), 2 * len(written))

    located = manifest.locate(ids)

    blocks = {b: folder.block(manifest, b) for b in range(manifest.num_blocks)}
    assert located.blocks.tolist() == [i // block_samples for i in ids]
    assert manifest.keys(ids) == [written[i][0] for i in ids]
    for field, extension in (("image", "jpg"), ("label", "cls")):
        for i, block, offset, size in zip(ids, located.blocks, *located.fields.get(field, ([], [])), strict=False):
            expected = written[i][1].get(extension)
            if expected is None:
                assert (offset, size) == (-1, -1)
            else:
                assert blocks[block][offset : offset + size] == expected
    assert located.sizes.tolist() == [[i % 50, i % 70] for i in ids]


@settings(max_examples=40, deadline=None)
@given(drawn=SAMPLES, block_samples=st.integers(1, 12))
def test_extents_carry_the_digest_of_their_bytes_and_cover_every_sample_once(drawn, block_samples):
    shards = samples_of(drawn)
    folder = write_dataset(shards, block_samples=block_samples)
    manifest = Manifest.open(folder.read)
    covered = {}
    for block in range(manifest.num_blocks):
        extents = manifest.extents(block)
        assert manifest.block_bytes(block) == sum(e.stop - e.start for e in extents)
        for extent in extents:
            assert digest64(folder.files[extent.shard][extent.start : extent.stop]) == extent.digest
            assert covered.get(extent.shard, 0) == extent.start
            covered[extent.shard] = extent.stop
    assert covered == {name: len(data) - 1024 for name, data in folder.files.items() if name.endswith(".tar")}


@given(first=st.integers(0, 1000), num=st.integers(1, 200), block=st.integers(1, 64))
def test_part_rows_cut_at_multiples_of_k_and_nowhere_else(first, num, block):
    ranges = part_rows(first, num, block)
    assert [a for a, _ in ranges] == [0, *(b for _, b in ranges[:-1])]
    assert ranges[-1][1] == num
    assert all((first + b) % block == 0 for _, b in ranges[:-1])
    assert all(1 <= b - a <= block for a, b in ranges)


@pytest.fixture
def folder() -> Folder:
    shards = [[(f"k{i}-{j}", {"jpg": bytes([i]) * (50 * j + 1), "cls": b"1"}) for j in range(5)] for i in range(3)]
    return write_dataset(shards, block_samples=4, classes=("ant", "bee"))


def test_properties(folder):
    manifest = Manifest.open(folder.read)
    assert (manifest.num_samples, manifest.num_shards, manifest.num_blocks, manifest.block_samples) == (15, 3, 4, 4)
    assert manifest.kind == "images"
    assert manifest.classes == ("ant", "bee")
    assert {f.name: f.extensions for f in manifest.fields} == {"image": ("jpg",), "label": ("cls",)}
    assert manifest.shape.num_blocks == 4
    assert manifest.block_samples_range(3) == (12, 15)
    shard = manifest.shard(1)
    assert (shard.name, shard.first_sample, shard.num_samples) == ("s1.tar", 5, 5)
    assert shard.digest == digest64(folder.files["s1.tar"])
    assert manifest.num_bytes == sum(len(d) for n, d in folder.files.items() if n.endswith(".tar"))
    with pytest.raises(IndexError, match=r"block 4 is not in \[0, 4\)"):
        manifest.extents(4)
    with pytest.raises(IndexError, match=r"not all in \[0, 15\)"):
        manifest.locate(np.asarray([3, 15]))
    assert manifest.locate(np.asarray([], np.int64)).blocks.shape == (0,)


def test_identity_names_content_and_nothing_else(folder):
    def identity(shards, **changed):
        return Manifest.open(write_dataset(shards, **{"block_samples": 2, **changed}).read).identity

    one = [[("a", {"jpg": b"x"}), ("b", {"jpg": b"y"})]]
    assert identity(one) == identity(one, made_by={"plan": "other"})
    others = [
        identity([[("a", {"jpg": b"x"}), ("c", {"jpg": b"y"})]]),
        identity([[("a", {"jpg": b"x"}), ("b", {"jpg": b"z"})]]),
        identity([[("a", {"jpg": b"x"})], [("b", {"jpg": b"y"})]]),
        identity(one, block_samples=1),
        identity(one, classes=("c",)),
    ]
    assert len({identity(one), *others}) == 6


def test_identity_is_pinned(folder):
    """Caches on disk are named after it: a change of this value orphans all of them and needs a new version."""
    assert Manifest.open(folder.read).identity == "d39d010ef8614be0387e614c9bb19ccc"


def test_a_folder_without_a_manifest_is_not_a_dataset(folder):
    del folder.files["manifest.json"]
    with pytest.raises(ManifestError, match=r"no manifest\.json.*not a data set.*dalipipe pack"):
        Manifest.open(folder.read)


@dataclass
class Damage:
    file: str
    change: object
    message: str


DAMAGES = {
    "torn header": Damage("manifest.json", lambda d: d[: len(d) // 2], r"manifest\.json is not JSON .*torn"),
    "empty header": Damage("manifest.json", lambda d: b"", r"manifest\.json is not JSON .*0 bytes"),
    "binary header": Damage("manifest.json", lambda d: b"\xff\xfe\0", r"manifest\.json is not JSON"),
    "not a manifest": Damage("manifest.json", lambda d: b"[1, 2]", r'expected "format": "dalipipe-manifest"'),
    "other version": Damage(
        "manifest.json",
        lambda d: d.replace(b'"version": 1', b'"version": 2'),
        r"has version 2, this .* reads version 1",
    ),
    "missing entry": Damage("manifest.json", lambda d: d.replace(b"num_shards", b"num_cards"), r"lacks .*num_shards"),
    "garbled entry": Damage(
        "manifest.json",
        lambda d: json.dumps({**json.loads(d), "fields": 3}).encode(),
        r"manifest\.json lacks or garbles",
    ),
    "zero K": Damage(
        "manifest.json",
        lambda d: d.replace(b'"block_samples": 4', b'"block_samples": 0'),
        r"block_samples .* at least 1",
    ),
    "other K": Damage(
        "manifest.json", lambda d: d.replace(b'"block_samples": 4', b'"block_samples": 5'), r"does not belong"
    ),
    "other counts": Damage(
        "manifest.json", lambda d: d.replace(b'"num_samples": 15', b'"num_samples": 16'), r"states .*16.*has .*15"
    ),
    "torn shards": Damage("shards.arrow", lambda d: d[:-20], r"shards\.arrow has digest .* bytes found.* states"),
    "empty shards": Damage("shards.arrow", lambda d: b"", r"shards\.arrow has digest .* bytes found.* states"),
    "no shards": Damage("shards.arrow", None, r"manifest\.json is there but shards\.arrow is not"),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_a_damaged_manifest_says_which_file_and_what_was_expected(folder, case):
    damage = DAMAGES[case]
    if damage.change is None:
        del folder.files[damage.file]
    else:
        changed = damage.change(folder.files[damage.file])
        assert changed != folder.files[damage.file]
        folder.files[damage.file] = changed
    with pytest.raises(ManifestError, match=damage.message):
        Manifest.open(folder.read)


def test_shards_of_another_dataset_are_refused(folder):
    other = [[(f"k{i}-{j}", {"jpg": bytes([i + 1]) * (50 * j + 1), "cls": b"1"}) for j in range(5)] for i in range(3)]
    folder.files["shards.arrow"] = write_dataset(other, block_samples=4).files["shards.arrow"]
    with pytest.raises(ManifestError, match=r"shards\.arrow has digest .*of another data set"):
        Manifest.open(folder.read)


@settings(max_examples=60, deadline=None)
@given(
    at=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), file=st.sampled_from(["shards.arrow", "s1.tar.idx"])
)
def test_a_flipped_bit_is_always_found(at, bit, file):
    shards = [[(f"k{i}-{j}", {"jpg": b"x" * j, "cls": b"1"}) for j in range(5)] for i in range(3)]
    folder = write_dataset(shards, block_samples=4)
    data = bytearray(folder.files[file])
    data[int(at * len(data))] ^= 1 << bit
    folder.files[file] = bytes(data)
    with pytest.raises(ManifestError, match=file):
        Manifest.open(folder.read).locate(np.arange(15))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda files: files.pop("s1.tar.idx"), r"index s1\.tar\.idx is missing.*pack again"),
        (
            lambda files: files.update({"s1.tar.idx": files["s1.tar.idx"][:-9]}),
            r"s1\.tar\.idx has digest .* bytes found",
        ),
        (lambda files: files.update({"s1.tar.idx": files["s0.tar.idx"]}), r"s1\.tar\.idx has digest"),
    ],
)
def test_a_damaged_index_is_found_on_first_use_and_others_still_work(folder, damage, message):
    damage(folder.files)
    manifest = Manifest.open(folder.read)
    manifest.locate(np.asarray([0, 14]))
    with pytest.raises(ManifestError, match=message):
        manifest.locate(np.asarray([7]))


def test_what_was_damaged_on_the_way_is_read_again(folder):
    manifest = Manifest.open(folder.read)
    seen = set()

    def read(name):
        data = folder.read(name)
        if name in seen:
            return data
        seen.add(name)
        return data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]

    again = Manifest.open(read)
    ids = np.arange(manifest.num_samples)
    assert again.identity == manifest.identity
    assert again.keys(ids) == manifest.keys(ids)


def test_a_stale_copy_of_an_index_gives_way_to_the_lake(folder):
    manifest = Manifest.open(folder.read, lambda name: b"an old copy")
    assert manifest.keys(np.arange(2)) == Manifest.open(folder.read).keys(np.arange(2))


def test_open_indices_are_capped_and_read_through_the_given_reader(folder):
    asked = []

    def read_index(name):
        asked.append(name)
        return folder.read(name)

    manifest = Manifest.open(folder.read, read_index, max_open_indices=1)
    assert asked == []
    for ids in ([0, 1], [2], [7], [0]):
        manifest.locate(np.asarray(ids))
    assert asked == ["s0.tar.idx", "s1.tar.idx", "s0.tar.idx"]


def test_threads_share_a_manifest(folder):
    manifest = Manifest.open(folder.read, max_open_indices=1)
    expected = manifest.locate(np.arange(15)).fields["image"][0].tolist()
    found = []

    def use():
        found.extend(manifest.locate(np.arange(15)).fields["image"][0].tolist() == expected for _ in range(20))

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert found == [True] * 80


def test_builder_refuses_a_wrong_number_of_digests():
    rows = Rows(
        keys=["a"],
        starts=np.asarray([0]),
        stops=np.asarray([1024]),
        fields={"image": (np.asarray([512]), np.asarray([3]))},
        sizes=np.zeros((1, 2), np.int32),
    )
    builder = ManifestBuilder(kind="images", classes=(), block_samples=4)
    with pytest.raises(ValueError, match="digests"):
        builder.add(name="s", num_bytes=1, digest=0, rows=rows, part_digests=[1, 2], extensions=["jpg"])
