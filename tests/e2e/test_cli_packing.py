"""From tars that exist to a data set that trains, on the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dalipipe.cli import main
from tests.support.archives import write_tar
from tests.support.images import jpeg_bytes

Run = Callable[..., Any]


@pytest.fixture
def dalipipe(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a verb in this process; gives its JSON, or what it said when it should fail."""

    def run(*words: str, expect: int = 0) -> Any:
        code = main([*words, "--json"])
        shown = capsys.readouterr()
        assert code == expect, shown.err
        return json.loads(shown.out) if code == 0 else shown.err

    return run


@pytest.fixture
def tars(tmp_path: Path) -> Path:
    """Two tars of red and blue images; label 0 is red."""
    for number, colour in enumerate(("red", "blue")):
        members = []
        for i in range(30):
            path = tmp_path / "one.jpg"
            Image.new("RGB", (64, 48), colour).save(path, "JPEG")
            members += [(f"{colour}{i}.jpg", path.read_bytes()), (f"{colour}{i}.cls", b"%d" % number)]
        write_tar(tmp_path / f"tars/{colour}.tar", members)
    return tmp_path / "tars"


def test_index_verify_repair_merge_and_preview(dalipipe, tars, tmp_path):
    found = dalipipe("index", str(tars), "index.dali=true")
    assert (found["samples"], found["shards"], found["checksums"]) == (60, 2, False)
    assert (tars / "red.idx").read_text().startswith("v1.2 30\n")
    checked = dalipipe("verify", str(tars), "workers=1")
    assert (checked["num_errors"], checked["without_checksum"]) == (0, 60)
    mended = dalipipe("verify", str(tars), "repair=true", "workers=1")
    assert (mended["checksums_added"], mended["without_checksum"]) == (60, 0)
    assert "repaired" not in mended
    assert dalipipe("info", str(tars))["identity"] == found["identity"]

    write_tar(tmp_path / "more/x.tar", [(f"k{i}.jpg", jpeg_bytes(i)) for i in range(5)] + [("k9.cls", b"1")])
    packed = dalipipe("pack", "pack=tars", f"source={tmp_path / 'more'}", f"target={tmp_path / 'packed'}")
    assert packed["samples"] == 6
    merged = dalipipe("merge", f"sources=[{tars},{tmp_path / 'packed'}]", f"target={tmp_path / 'all'}")
    assert merged["samples"] == 66
    facts = dalipipe("info", str(tmp_path / "all"), "nodes=2")
    assert (facts["samples"], facts["nodes"], facts["shards_of_two_nodes"]) == (66, 2, 1)
    assert 0 < facts["cross_node_bytes"] < facts["bytes"]

    out = tmp_path / "sheet.png"
    keys = [f"preview.out={out}", "preview.images=20", "preview.columns=5", f"cache.dir={tmp_path / 'cache'}"]
    shown = dalipipe("preview", str(tars), *keys, "graph.size=40", "device=cpu")
    assert shown == {"out": str(out), "images": 20}
    sheet = np.asarray(Image.open(out).convert("RGB"))
    colours = [sheet[20 + row * 58, 20 + column * 44] for row in range(4) for column in range(5)]
    reds = sum(c[0] > 240 and c[2] < 15 for c in colours)
    blues = sum(c[2] > 240 and c[0] < 15 for c in colours)
    assert reds + blues == 20
    assert min(reds, blues) > 2


def test_wrong_usage_says_what_is_right(dalipipe, tars, tmp_path):
    for words, message in [
        (["index"], "index needs source=URL"),
        (["merge", f"sources=[{tars}]"], "merge needs sources=[URL,URL] and target=URL"),
        (["preview", "preview.images=0", f"data.url={tars}"], "preview.images=0"),
        (["verify", str(tars), f"repair_from={tars}"], "goes with repair=true"),
        (["verify", str(tars), "checksums=some"], "checksums='some' is not one of none, kept, all"),
        (["verify", str(tars), "checksums=kept", "repair=true"], "use checksums=all"),
        (["verify", str(tars), "checksums=kept", "cache.dir=''"], "name it with cache.dir"),
        (
            ["pack", f"source={tars}", f"target={tmp_path / 'o'}", "engine=slurm"],
            "engine='slurm' is not one of local, ray",
        ),
        (["pack", f"source={tars}", f"target={tmp_path / 'o'}", "pack=tarballs"], "tarballs"),
    ]:
        done = dalipipe(*words, expect=2)
        assert message in done
    done = dalipipe("pack", f"source={tars}", f"target={tmp_path / 'o'}", expect=1)
    assert "use pack=tars for the tars in it" in done


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_ray_from_the_command_line(dalipipe, tars, tmp_path):
    pytest.importorskip("ray", reason="dalipipe[ray] is not installed")
    keys = ["pack=tars", f"source={tars}", "pack.check=header"]
    on_ray = dalipipe("pack", *keys, f"target={tmp_path / 'ray'}", "engine=ray", "pack.workers=2")
    here = dalipipe("pack", *keys, f"target={tmp_path / 'here'}", "pack.workers=1")
    assert on_ray["identity"] == here["identity"]
