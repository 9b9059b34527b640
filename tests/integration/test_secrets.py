"""A data set behind a URL with a password: no verb, log, traceback, run folder, cache or manifest repeats it."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest

import dalipipe as dp
from dalipipe.cli import main
from dalipipe.errors import DalipipeError
from tests.support.webserver import WebServer, web_server

SECRET = "hunter2"


@pytest.fixture(scope="module")
def server(packed: Path) -> Iterator[WebServer]:
    files = [path for path in packed.rglob("*") if path.is_file() and ".pack" not in path.parts]
    with web_server({f"set/{path.relative_to(packed)}": path.read_bytes() for path in files}) as server:
        yield server


@pytest.fixture
def url(server: WebServer) -> str:
    return server.url.replace("://", f"://me:{SECRET}@") + "/set"


def leaks(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]


def test_no_verb_repeats_it(
    url: str, server: WebServer, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DALIPIPE_LOG", "DEBUG")
    cache, run = f"cache.dir={tmp_path / 'cache'}", f"run_dir={tmp_path / 'run'}"
    small = ["graph.size=32", "loader.batch_size=10", "device=cpu", "bench.steps=5"]
    gone = ["storage.retries=0", "prefetch.cold_steps=0"]
    runs: list[tuple[int, list[str]]] = [
        (0, ["info", url]),
        (0, ["info", url, "--json"]),
        (0, ["verify", url, "workers=1"]),
        (0, ["verify", url, "workers=1", "decode=none", "--json"]),
        (1, ["merge", f"sources=[{url},/none]", f"target={tmp_path / 'merged'}"]),
        (0, ["bench", url, *small, cache, run]),
        (0, ["doctor", "env", f"data.url={url}", "torch=false"]),
        (0, ["cache", "warm", f"data.url={url}", cache]),
        (1, ["info", f"{url}/none"]),
        (2, ["info", f"{url}?sig={SECRET}"]),
        (1, ["pack", f"source={url}", f"target={tmp_path / 'to'}", "pack.workers=1"]),
        (1, ["bench", f"{url}/none", *small, cache, *gone]),
        (2, ["bench", url, f"data.urll={url}"]),
        (2, ["bench", f"graph.size=[{url}"]),
    ]
    told = {}
    for expected, words in runs:
        code = main(words)
        shown = capfd.readouterr()
        told[" ".join(words)] = shown.out + shown.err
        if words[0] != "merge":
            assert code == expected, (words, shown.err[-2000:])
    assert [words for words, text in told.items() if SECRET in text] == []
    assert any("://***@" in text for text in told.values())
    assert leaks(tmp_path) == []
    assert "://***@" in (tmp_path / "run" / "config.json").read_text()


def test_a_lake_that_breaks_in_the_middle_of_a_run_does_not_tell_it(
    url: str, server: WebServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    words = [f"data.url={url}", f"cache.dir={tmp_path / 'cache'}", f"run_dir={tmp_path / 'run'}", "device=cpu"]
    words += ["graph.size=32", "loader.batch_size=10", "storage.retries=0", "prefetch.cold_steps=0"]
    names = [name for name in server.objects if name.endswith(".tar")]
    server.faults = {name: [500] * 1000 for name in names}
    try:
        with dp.load("train", words) as loader, pytest.raises(DalipipeError) as caught:
            list(loader)
    finally:
        server.faults = {}
    text = "".join(traceback.format_exception(caught.value)) + caplog.text
    assert "://***@" in text
    assert SECRET not in text
    assert leaks(tmp_path) == []
