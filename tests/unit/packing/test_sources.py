"""Packing what is not class folders: tars of every kind, tables of labels, Parquet with images."""

from __future__ import annotations

import gzip
import json
import subprocess
import tarfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dalipipe.errors import ConfigError, CorruptSampleError, PackError, SourceError
from dalipipe.packing.config import ColumnsConfig, IndexConfig, PackConfig
from dalipipe.packing.index import index
from dalipipe.packing.run import pack
from dalipipe.packing.verify import verify
from dalipipe.storage.store import StorageConfig
from tests.support.archives import write_tar
from tests.unit.packing.reading import contents, open_manifest, read_back, run_pack
from tests.unit.packing.samples import IMAGES, expected, samples


@pytest.mark.parametrize(
    ("name", "mode", "form"),
    [
        ("a.tar", "w", tarfile.PAX_FORMAT),
        ("a.tar", "w", tarfile.GNU_FORMAT),
        ("a.tar.gz", "w:gz", tarfile.PAX_FORMAT),
        ("a.tgz", "w:gz", tarfile.GNU_FORMAT),
        ("a.tar.bz2", "w:bz2", tarfile.PAX_FORMAT),
        ("a.tar.xz", "w:xz", tarfile.GNU_FORMAT),
    ],
)
@pytest.mark.parametrize("shuffle", [True, False])
def test_tars_of_every_kind(tmp_path, name, mode, form, shuffle):
    write_tar(tmp_path / "src" / name, samples(30), mode=mode, form=form)
    report = run_pack(tmp_path / "src", tmp_path / "out", kind="tars", shuffle=shuffle)
    assert report.samples == 30
    assert read_back(tmp_path / "out") == expected(30)
    assert verify(str(tmp_path / "out"), StorageConfig(), decode="all").errors == []
    assert not (tmp_path / "out/.pack/runs").exists() or not list((tmp_path / "out/.pack/runs").iterdir())
    if not shuffle:
        assert list(read_back(tmp_path / "out")) == list(expected(30))


@pytest.mark.parametrize(
    "options", [["--format=gnu"], ["--format=pax"], ["--format=ustar"], ["--format=v7"], ["-z"], ["--format=pax", "-J"]]
)
def test_archives_of_gnu_tar(tmp_path, options):
    """With folders, owners, times and `./` before every name, in the order of the folder."""
    for name, data in samples(25):
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    (tmp_path / "src").mkdir()
    target = tmp_path / "src" / ("a.tar.gz" if "-z" in options else "a.tar.xz" if "-J" in options else "a.tar")
    subprocess.run(["tar", "cf", target, *options, "-C", tmp_path / "tree", "."], check=True)
    run_pack(tmp_path / "src", tmp_path / "out", kind="tars")
    assert read_back(tmp_path / "out") == expected(25)


def test_shards_of_webdataset(tmp_path):
    from webdataset import ShardWriter

    (tmp_path / "src").mkdir()
    with ShardWriter(f"{tmp_path}/src/%04d.tar", maxcount=10, verbose=0) as writer:
        for i in range(25):
            image = IMAGES[i % len(IMAGES)]
            writer.write({"__key__": f"d/k{i:03d}", "jpg": image, "cls": i % 3, "txt": f"t{i}"})
    run_pack(tmp_path / "src", tmp_path / "out", kind="tars")
    assert read_back(tmp_path / "out") == expected(25)
    index(str(tmp_path / "src"), "", IndexConfig(), StorageConfig())
    assert read_back(tmp_path / "src") == expected(25)


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_long_and_foreign_names_in_tars(tmp_path, form):
    names = ["a" * 150, "dir/" + "b" * 120, "画像", "with space", "./dotted/slash", "n\nl"]
    write_tar(tmp_path / "src/a.tar", [(f"{name}.jpg", IMAGES[0]) for name in names], form=form)
    run_pack(tmp_path / "src", tmp_path / "out", kind="tars")
    keys = set(read_back(tmp_path / "out"))
    assert {"a" * 150, "dir/" + "b" * 120, "画像", "with space", "dotted/slash"} < keys
    assert len(keys) == len(names)
    assert all(key.isprintable() for key in keys)


def test_members_out_of_order_are_joined_by_key(tmp_path):
    members = samples(20)
    mixed = [m for ending in (".txt", ".cls", ".jpg") for m in members if m[0].endswith(ending)]
    write_tar(tmp_path / "src/a.tar", mixed)
    run_pack(tmp_path / "src", tmp_path / "out", kind="tars")
    assert read_back(tmp_path / "out") == expected(20)


def test_duplicate_keys_within_and_between_tars_are_kept_apart(tmp_path):
    twice = [("k.jpg", IMAGES[0]), ("k.cls", b"0"), ("k.jpg", IMAGES[1]), ("k.cls", b"1")]
    write_tar(tmp_path / "src/a.tar", twice)
    write_tar(tmp_path / "src/b.tar", [("k.jpg", IMAGES[2]), ("k.cls", b"2")])
    run_pack(tmp_path / "src", tmp_path / "out", kind="tars", shuffle=False)
    found = read_back(tmp_path / "out")
    assert [(s["image"], s["label"]) for s in found.values()] == [(IMAGES[i], b"%d" % i) for i in range(3)]
    assert next(iter(found)) == "k"


def test_dots_in_names(tmp_path):
    write_tar(tmp_path / "src/a.tar", [("x.v1.jpg", IMAGES[0]), ("x.v2.jpg", IMAGES[1]), ("x.json", b"{}")])
    run_pack(tmp_path / "src", tmp_path / "first", kind="tars")
    assert read_back(tmp_path / "first") == {"x": {"v1.jpg": IMAGES[0], "v2.jpg": IMAGES[1], "json": b"{}"}}
    run_pack(tmp_path / "src", tmp_path / "last", kind="tars", dots="last")
    assert read_back(tmp_path / "last") == {
        "x_v1": {"image": IMAGES[0]},
        "x_v2": {"image": IMAGES[1]},
        "x": {"json": b"{}"},
    }


def test_one_pass_and_two_passes_give_the_same_bytes(tmp_path):
    for i in range(3):
        write_tar(tmp_path / f"src/{i}.tar", samples(60, first=60 * i))
    sets = {}
    for passes, workers in (("1", 1), ("2", 1), ("2", 2)):
        target = tmp_path / f"{passes}-{workers}"
        run_pack(tmp_path / "src", target, kind="tars", passes=passes, workers=workers)
        sets[passes, workers] = contents(target)
    assert sets["1", 1] == sets["2", 1] == sets["2", 2]
    assert open_manifest(tmp_path / "1-1").num_samples == 180


def test_two_passes_over_a_target_that_is_no_folder(tmp_path):
    """Runs at a remote target are gathered a piece a shard; here the target is a fsspec store in this process."""
    import fsspec

    for i in range(2):
        write_tar(tmp_path / f"src/{i}.tar", samples(90, first=90 * i))
    target = f"memory://packed-{tmp_path.name}"
    run_pack(tmp_path / "src", target, kind="tars", passes="2")
    run_pack(tmp_path / "src", tmp_path / "out", kind="tars", passes="1")
    files = fsspec.filesystem("memory")
    root = target.removeprefix("memory:/")
    held = {name.removeprefix(f"{root}/"): files.cat(name) for name in files.find(root)}
    assert held == contents(tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("a.tar", lambda data: data[:5000], r"a\.tar is damaged: .*(cut short|passes the end)"),
        ("a.tar", lambda data: b"\x01" * 2048, r"a\.tar is damaged: no tar header at byte 0"),
        ("a.tar.gz", lambda data: data[: len(data) // 2], r"a\.tar\.gz is damaged: its compressed stream is broken"),
        ("a.tar.gz", lambda data: data[:900] + b"\0" * 400 + data[1300:], r"a\.tar\.gz is damaged: "),
        ("a.tar", gzip.compress, r"a\.tar is damaged: .* it is compressed: name it \.tar\.gz"),
        ("a.tar", lambda data: b"", r"a\.tar is damaged: it is empty \(0 bytes\)"),
        ("a.tar.gz", lambda data: b"\x28\xb5\x2f\xfd" + data, "zstd"),
    ],
)
def test_damaged_tars_are_named(tmp_path, name, damage, message):
    path = write_tar(tmp_path / "src" / name, samples(9), mode="w:gz" if name.endswith("gz") else "w")
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(SourceError, match=message):
        run_pack(tmp_path / "src", tmp_path / "out", kind="tars")
    assert not (tmp_path / "out/manifest.json").exists()


@pytest.mark.parametrize("name", ["../../etc/x.jpg", "/etc/x.jpg", "a/../../x.jpg"])
def test_members_that_lead_out_of_their_folder(tmp_path, name):
    write_tar(tmp_path / "src/a.tar", [(name, IMAGES[0]), *samples(3)])
    with pytest.raises(CorruptSampleError, match=r"a\.tar:.*leads out of its folder.*pack\.drop_corrupt=true"):
        run_pack(tmp_path / "src", tmp_path / "out", kind="tars")
    report = run_pack(tmp_path / "src", tmp_path / "out", kind="tars", drop_corrupt=True)
    assert (report.samples, report.quarantined) == (3, 1)
    assert read_back(tmp_path / "out") == expected(3)
    assert name in json.loads((tmp_path / "out/quarantine.jsonl").read_text())["path"]


def test_a_corrupt_image_in_a_tar_is_named_by_tar_and_key(tmp_path):
    write_tar(tmp_path / "src/a.tar", [*samples(3), ("bad.jpg", b"no image")])
    with pytest.raises(CorruptSampleError, match=r"a\.tar:bad is corrupt: not an image"):
        run_pack(tmp_path / "src", tmp_path / "out", kind="tars")
    assert run_pack(tmp_path / "src", tmp_path / "out", kind="tars", drop_corrupt=True).quarantined == 1
    assert read_back(tmp_path / "out") == expected(3)


def test_a_tar_that_changes_after_it_was_listed(tmp_path):
    path = write_tar(tmp_path / "src/a.tar", samples(9))

    listed = PackConfig(kind="tars", shard_bytes="1MiB", workers=1, check="none")
    from dalipipe.packing import run as packing

    def change_after_listing(store, config, report):
        found = original(store, config, report)
        write_tar(path, samples(12))
        return found

    original = packing.discover
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "discover", change_after_listing)
        with pytest.raises(PackError, match=r"a\.tar changed while it was packed: \d+ bytes listed, \d+ now"):
            pack(str(tmp_path / "src"), str(tmp_path / "out"), listed, StorageConfig())


def test_the_wrong_kind_says_which_one_fits(tmp_path):
    write_tar(tmp_path / "src/a.tar", samples(2))
    with pytest.raises(SourceError, match="use pack=tars"):
        run_pack(tmp_path / "src", tmp_path / "out")
    (tmp_path / "img").mkdir()
    (tmp_path / "img/a.jpg").write_bytes(IMAGES[0])
    with pytest.raises(SourceError, match=r"holds no tar: .* found 1 \.jpg; .*pack=images"):
        run_pack(tmp_path / "img", tmp_path / "out", kind="tars")


TABLES = {
    "labels.csv": 'file_name,label,caption,stars\na.jpg,dog,a dog,3\nb.jpg,cat,"a cat, asleep",5\n',
    "labels.tsv": "file_name\tlabel\tcaption\tstars\na.jpg\tdog\ta dog\t3\nb.jpg\tcat\ta cat, asleep\t5\n",
    "labels.jsonl": '{"file_name": "a.jpg", "label": "dog", "caption": "a dog", "stars": 3}\n'
    '{"file_name": "b.jpg", "label": "cat", "caption": "a cat, asleep", "stars": 5}\n',
}


def flat(root, table: str, text: str | None = None):
    root.mkdir()
    for number, name in enumerate(("a.jpg", "b.jpg", "unnamed.jpg")):
        (root / name).write_bytes(IMAGES[number])
    if text is None:
        rows = [json.loads(line) for line in TABLES["labels.jsonl"].splitlines()]
        pq.write_table(pa.Table.from_pylist(rows), root / table)
    else:
        (root / table).write_text(text)
    return root


@pytest.mark.parametrize("table", [*TABLES, "labels.parquet"])
def test_a_table_gives_labels_captions_and_the_rest(tmp_path, table):
    source = flat(tmp_path / "src", table, TABLES.get(table))
    report = run_pack(source, tmp_path / "out", labels=table)
    assert (report.samples, report.skipped_kinds["not in the table"]) == (2, 1)
    assert open_manifest(tmp_path / "out").classes == ("cat", "dog")
    found = read_back(tmp_path / "out")
    assert {k: (v["image"], v["label"], v["text"], json.loads(v["json"])) for k, v in found.items()} == {
        "a": (IMAGES[0], b"1", b"a dog", {"stars": 3}),
        "b": (IMAGES[1], b"0", b"a cat, asleep", {"stars": 5}),
    }


def test_numbers_stay_the_labels_they_are(tmp_path):
    source = flat(tmp_path / "src", "l.csv", "path,cls\na.jpg,7\nb.jpg,2\n")
    run_pack(source, tmp_path / "out", labels="l.csv")
    assert open_manifest(tmp_path / "out").classes == ()
    assert [s["label"] for s in read_back(tmp_path / "out").values()].count(b"7") == 1


@pytest.mark.parametrize(
    ("text", "labels", "columns", "error", "message"),
    [
        ("file,label\nz.jpg,1\n", "l.csv", {}, SourceError, r"names 1 files that .* does not hold, such as 'z\.jpg'"),
        ("file,label\na.jpg,1\na.jpg,2\n", "l.csv", {}, SourceError, r"names 'a\.jpg' twice"),
        ("x,y\n1,2\n", "l.csv", {}, ConfigError, r"no column that could be the file: .* set pack\.columns\.file"),
        (
            "file,label\na.jpg,1\n",
            "l.csv",
            {"label": "z"},
            ConfigError,
            r"pack\.columns\.label='z': l\.csv has the columns label",
        ),
        ("file\n", "l.csv", {}, SourceError, "has no row"),
        ("file,label\n", "l.txt", {}, ConfigError, r"must end in \.csv"),
        ("file,label\na.jpg,1\n", "nowhere.csv", {}, SourceError, r"pack\.labels='nowhere\.csv'"),
        ("{not json\n", "l.jsonl", {}, SourceError, r"l\.jsonl' cannot be read"),
    ],
)
def test_tables_that_do_not_fit(tmp_path, text, labels, columns, error, message):  # noqa: PLR0917
    source = flat(tmp_path / "src", labels if labels != "nowhere.csv" else "l.csv", text)
    with pytest.raises(error, match=message):
        run_pack(source, tmp_path / "out", labels=labels, columns=ColumnsConfig(**columns))


@pytest.mark.parametrize("nested", [True, False])
def test_parquet_with_images(tmp_path, nested):
    rows = [
        {"image": {"bytes": IMAGES[i], "path": "x"} if nested else IMAGES[i], "label": i % 2, "text": f"t{i}"}
        for i in range(9)
    ]
    table = pa.Table.from_pylist(rows)
    features = {"info": {"features": {"label": {"names": ["zebra", "ant"]}}}}
    table = table.replace_schema_metadata({"huggingface": json.dumps(features)})
    (tmp_path / "src").mkdir()
    pq.write_table(table.slice(0, 5), tmp_path / "src/a.parquet")
    pq.write_table(table.slice(5), tmp_path / "src/b.parquet")
    assert run_pack(tmp_path / "src", tmp_path / "out", shuffle=False).samples == 9
    assert open_manifest(tmp_path / "out").classes == ("ant", "zebra")
    found = list(read_back(tmp_path / "out").values())
    assert [(s["image"], s["label"], s["text"]) for s in found] == [
        (IMAGES[i], b"01"[1 - i % 2 : 2 - i % 2], f"t{i}".encode()) for i in range(9)
    ]


def test_parquet_without_images_or_torn(tmp_path):
    (tmp_path / "src").mkdir()
    pq.write_table(pa.table({"x": [1]}), tmp_path / "src/a.parquet")
    with pytest.raises(ConfigError, match=r"no column that could be the image"):
        run_pack(tmp_path / "src", tmp_path / "out")
    (tmp_path / "src/a.parquet").write_bytes(b"PAR1junk")
    with pytest.raises(SourceError, match=r"a\.parquet cannot be read as Parquet"):
        run_pack(tmp_path / "src", tmp_path / "out")


def test_duplicates_are_left_out_and_listed(tmp_path):
    for path, image in {"a/1.jpg": 0, "a/2.jpg": 1, "b/3.jpg": 0, "b/4.jpg": 2, "b/5.jpg": 0}.items():
        (tmp_path / "src" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "src" / path).write_bytes(IMAGES[image])
    report = run_pack(tmp_path / "src", tmp_path / "out", dedup=True)
    assert (report.samples, report.duplicates) == (3, 2)
    assert set(read_back(tmp_path / "out")) == {"a/1", "a/2", "b/4"}
    listed = [json.loads(line) for line in (tmp_path / "out/duplicates.jsonl").read_text().splitlines()]
    assert listed == [{"path": "b/3.jpg", "same_as": "a/1.jpg"}, {"path": "b/5.jpg", "same_as": "a/1.jpg"}]
    assert run_pack(tmp_path / "src", tmp_path / "out", dedup=True).duplicates == 2
    assert run_pack(tmp_path / "src", tmp_path / "all").duplicates == 0


def test_groups_are_equal_folders_of_shards(tmp_path):
    write_tar(tmp_path / "src/a.tar", samples(300))
    report = run_pack(tmp_path / "src", tmp_path / "out", kind="tars", groups=2)
    manifest = open_manifest(tmp_path / "out")
    names = [manifest.shard(i).name for i in range(manifest.num_shards)]
    assert report.shards % 2 == 0
    assert [name.partition("/")[0] for name in names] == ["group-000"] * (report.shards // 2) + ["group-001"] * (
        report.shards // 2
    )
    assert read_back(tmp_path / "out") == expected(300)
    assert run_pack(tmp_path / "src", tmp_path / "out", kind="tars", groups=2).already_packed
    run_pack(tmp_path / "src", tmp_path / "out", kind="tars", overwrite=True)
    assert not list((tmp_path / "out").glob("group-*/*"))
    with pytest.raises(ConfigError, match=r"pack\.groups=1000 is more than the 300 samples"):
        run_pack(tmp_path / "src", tmp_path / "other", kind="tars", groups=1000)
