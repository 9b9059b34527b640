"""The command line on real files: what it prints, what it exits with, and what it leaves behind."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dalipipe.cli import main
from tests.conftest import NUM_IMAGES
from tests.support.images import jpeg_bytes, write_image_tree
from tests.support.waiting import wait_until

SMALL = ("pack.shard_bytes=1MiB", "pack.workers=1")


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(words)
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def run_json(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    code, out, err = run(capsys, *words, "--json")
    assert code == 0, err
    return json.loads(out)


def test_pack_info_verify(capsys: pytest.CaptureFixture[str], lake: Path, tmp_path: Path) -> None:
    target = tmp_path / "set"
    packed = run_json(capsys, "pack", f"source={lake}", f"target={target}", "pack=images", *SMALL)
    assert packed["samples"] == NUM_IMAGES
    assert packed["shards"] == len(list(target.glob("*.tar"))) >= 2
    info = run_json(capsys, "info", str(target))
    assert info["samples"] == NUM_IMAGES
    assert info["url"] == str(target)
    found = run_json(capsys, "verify", f"data.url={target}", "decode=all")
    assert (found["samples"], found["shards"], found["errors"]) == (NUM_IMAGES, packed["shards"], [])
    code, out, _ = run(capsys, "info", f"data.url={target}")
    assert code == 0
    assert str(NUM_IMAGES) in out


def test_packing_again_is_done_at_once_and_another_set_is_refused(
    capsys: pytest.CaptureFixture[str], lake: Path, tmp_path: Path
) -> None:
    target = tmp_path / "set"
    words = ("pack", f"source={lake}", f"target={target}", *SMALL)
    run_json(capsys, *words)
    before = {path.name: path.read_bytes() for path in target.glob("*") if path.is_file()}
    assert run_json(capsys, *words)["already_packed"] is True
    write_image_tree(tmp_path / "other", num_images=4)
    code, _, err = run(capsys, "pack", f"source={tmp_path / 'other'}", f"target={target}", *SMALL)
    assert code == 1
    assert "pack.overwrite=true" in err
    assert {path.name: path.read_bytes() for path in target.glob("*") if path.is_file()} == before
    code, _, _ = run(capsys, "pack", f"source={tmp_path / 'other'}", f"target={target}", *SMALL, "pack.overwrite=true")
    assert code == 0
    assert run_json(capsys, "verify", str(target), "decode=all")["samples"] == 4


def test_bad_sources(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "set"
    code, _, err = run(capsys, "pack", f"source={tmp_path / 'nowhere'}", f"target={target}")
    assert (code, str(tmp_path / "nowhere") in err) == (1, True)
    (tmp_path / "empty").mkdir()
    code, _, err = run(capsys, "pack", f"source={tmp_path / 'empty'}", f"target={target}")
    assert (code, str(tmp_path / "empty") in err) == (1, True)
    write_image_tree(tmp_path / "lake", num_images=6)
    victim = sorted((tmp_path / "lake").rglob("*.jpg"))[3]
    victim.write_bytes(jpeg_bytes(3)[:800])
    code, _, err = run(capsys, "pack", f"source={tmp_path / 'lake'}", f"target={target}", *SMALL)
    assert code == 1
    assert victim.name in err
    assert "pack.drop_corrupt=true" in err
    assert not (target / "manifest.json").exists()
    code, out, _ = run(
        capsys, "pack", f"source={tmp_path / 'lake'}", f"target={target}", *SMALL, "pack.drop_corrupt=true"
    )
    assert code == 0
    assert "1 corrupt" in out
    assert victim.name in (target / "quarantine.jsonl").read_text()


# Root reads everything; without these two capabilities (override and read search) it is held to the mode bits.
DROP_OVERRIDE = """
import ctypes
libc, header, data = ctypes.CDLL(None), (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
assert libc.capget(header, data) == 0
data[0] &= ~0b110
data[1] &= ~0b110
assert libc.capset(header, data) == 0
"""


def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    write_image_tree(tmp_path / "lake", num_images=6)
    victim = sorted((tmp_path / "lake").rglob("*.jpg"))[2]
    victim.chmod(0)
    words = ["pack", f"source={tmp_path / 'lake'}", f"target={tmp_path / 'set'}", *SMALL]
    code = f"{DROP_OVERRIDE}\nimport sys\nfrom dalipipe.cli import main\nsys.exit(main({words!r}))"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1, done.stderr
    assert victim.name in done.stderr
    assert "ermission" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "set/manifest.json").exists()


def test_a_full_disk_is_named_and_nothing_is_published(lake: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", small], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        words = [sys.executable, "-m", "dalipipe", "pack", f"source={lake}", f"target={small / 'set'}", *SMALL]
        done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=100)
        assert done.returncode == 1
        assert str(small) in done.stderr
        assert "space" in done.stderr
        assert "Traceback" not in done.stderr
        assert not (small / "set/manifest.json").exists()
    finally:
        subprocess.run(["umount", small], check=True)


def test_damage_is_found_and_exits_with_1(capsys: pytest.CaptureFixture[str], packed: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(packed, broken)
    shard = sorted(broken.glob("*.tar"))[1]
    data = bytearray(shard.read_bytes())
    data[5000] ^= 1
    shard.write_bytes(data)
    code, out, err = run(capsys, "verify", str(broken), "--json")
    assert code == 1
    assert json.loads(out)["num_errors"] >= 1
    assert shard.name in json.dumps(json.loads(out)["errors"])
    (broken / "manifest.json").write_text("{")
    code, _, err = run(capsys, "info", str(broken))
    assert (code, "manifest.json" in err) == (1, True)


def test_bench_and_spin(capsys: pytest.CaptureFixture[str], packed: Path, tmp_path: Path) -> None:
    words = (str(packed), f"cache.dir={tmp_path}", "graph.size=32", "loader.batch_size=16", "bench.warmup_steps=2")
    result = run_json(capsys, "bench", *words, "bench.step_s=0.01")
    assert {"images_per_s", "cpu_s_per_1k", "au", "wall_s", "stage_s", "first_batch_s"} <= set(result)
    assert result["images"] == (NUM_IMAGES // 16 - 2) * 16
    assert 0 < result["au"] <= 1
    spun = run_json(capsys, "spin", *words, "bench.step_s=0.01", "bench.epochs=2")
    assert 0 < spun["share"] <= 1.2
    code, _, err = run(capsys, "spin", *words)
    assert (code, "bench.step_s" in err) == (2, True)
    stat = run_json(capsys, "cache", "stat", f"cache.dir={tmp_path}")
    assert stat["blocks"] > 0
    assert {"bytes", "blocks", "corrupt", "budget_bytes"} <= set(stat)
    assert run_json(capsys, "cache", "verify", f"cache.dir={tmp_path}")["corrupt"] == 0
    run_json(capsys, "cache", "clear", f"cache.dir={tmp_path}")
    assert run_json(capsys, "cache", "stat", f"cache.dir={tmp_path}")["blocks"] == 0


def test_demo(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "dalipipe", "demo", f"dir={tmp_path / 'demo'}", "images=512", "--json"]
    done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=110, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["samples"] == 512
    assert result["shards"] >= 4
    first, second = result["epochs"]
    assert second["loss_last"] < first["loss_first"]
    assert first["lake_bytes"] > 0
    assert (second["lake_bytes"], second["cache_hit"]) == (0, 1.0)
    for epoch in (first, second):
        assert sum(epoch["rows"].values()) == pytest.approx(epoch["wall_s"])
    assert result["spin"]["images_per_s"] > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["demo"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("precious")
    words[4] = f"dir={tmp_path / 'mine'}"
    refused = subprocess.run(words, check=False, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 2
    assert (tmp_path / "mine/thesis.txt").read_text() == "precious"


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A lake of 450 images, enough for several shards, and what packing it gives: `lake` and `whole`."""
    root = tmp_path_factory.mktemp("many")
    write_image_tree(root / "lake", num_images=450)
    subprocess.run(_pack_words(root, root / "whole"), check=True, capture_output=True, timeout=100)
    return root


def _pack_words(root: Path, target: Path) -> list[str]:
    words = [sys.executable, "-m", "dalipipe", "pack", f"source={root / 'lake'}", f"target={target}"]
    return [*words, "pack.shard_bytes=1MiB", "pack.workers=2"]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_pack_publishes_nothing_and_is_finished_by_the_same_command(
    many: Path, tmp_path: Path, signum: signal.Signals
) -> None:
    target = tmp_path / "set"
    words = _pack_words(many, target)
    victim = subprocess.Popen(words, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        wait_until(lambda: list(target.glob("*.tar")), "a first shard", process=victim)
        assert victim.poll() is None, "it was done before it could be interrupted"
        victim.send_signal(signum)
        assert victim.wait(10) == (130 if signum == signal.SIGINT else -signum)
    finally:
        victim.kill()
    assert not (target / "manifest.json").exists()
    wait_until(lambda: not _group_lives(victim.pid), "the end of its workers", timeout_s=10)
    subprocess.run(words, check=True, capture_output=True, timeout=100)
    assert _files(target) == _files(many / "whole")


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _files(folder: Path) -> dict[str, bytes]:
    # A kill between the writing of a file and its renaming leaves one hidden temporary, which no store ever lists.
    return {
        path.name: path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.startswith(".tmp-")
    }


def _start_bench(packed: Path, root: Path) -> subprocess.Popen[str]:
    (root / "memory").mkdir(parents=True)
    words = ["bench", str(packed), f"cache.dir={root / 'cache'}", "graph.size=32", "loader.batch_size=16"]
    words += [f"storage.budget_dir={root / 'budget'}", f"cache.tiers.memory.dir={root / 'memory'}"]
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "dalipipe",
            *words,
            "cache.tiers.memory.capacity=0.1",
            "bench.epochs=1000",
            "bench.step_s=0.05",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _assert_nothing_is_left(victim: subprocess.Popen[str], err: str, root: Path, signum: signal.Signals) -> None:
    # How it ended, in one look, so that a failure says all of it.
    how = "terminated" if signum == signal.SIGTERM else "interrupted"
    assert (victim.returncode, err) == (128 + signum, f"dalipipe: {how}\n")
    assert not _group_lives(victim.pid)
    assert not list((root / "memory").iterdir())
    assert not (root / "budget").exists() or not list((root / "budget").iterdir())
    names = [path.name for path in (root / "cache").rglob("*") if path.is_file()]
    assert all(name.isdigit() or name == "locks" or name.endswith(".idx") for name in names), names


@pytest.mark.parametrize(("signum", "times"), [(signal.SIGINT, 1), (signal.SIGTERM, 3)])
def test_a_signal_in_the_middle_of_a_run_leaves_nothing(
    packed: Path, tmp_path: Path, signum: signal.Signals, times: int
) -> None:
    with _start_bench(packed, tmp_path) as victim:
        try:
            wait_until(lambda: list(tmp_path.glob("memory/*/[0-9]*/[0-9]*")), "a first block", process=victim)
            for _ in range(times):
                victim.send_signal(signum)
            _, err = victim.communicate(timeout=60)
        finally:
            victim.kill()
    _assert_nothing_is_left(victim, err, tmp_path, signum)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_at_any_moment_leaves_nothing(packed: Path, tmp_path: Path, signum: signal.Signals) -> None:
    chance = random.Random(signum)
    for number in range(15):
        root = tmp_path / str(number)
        with _start_bench(packed, root) as victim:
            try:
                time.sleep(chance.uniform(0.5, 5))  # during imports, opening, the first batch, a later epoch
                for _ in range(chance.choice((1, 1, 2, 4))):
                    victim.send_signal(signum)
                    time.sleep(chance.uniform(0, 0.2))
                _, err = victim.communicate(timeout=60)
            finally:
                victim.kill()
        _assert_nothing_is_left(victim, err, root, signum)


def test_the_cache_is_warmed_and_then_serves_a_job_without_the_lake(
    packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = (f"cache.dir={tmp_path}", "cache.tiers.node.capacity=1G")
    warmed = run_json(capsys, "cache", "warm", f"data.url={packed}", *cache)
    assert warmed["blocks"] == warmed["fetched_blocks"] > 0
    assert warmed["left_blocks"] == 0
    assert run_json(capsys, "cache", "warm", f"data.url={packed}", *cache)["fetched_blocks"] == 0
    stat = run_json(capsys, "cache", "stat", *cache)
    assert (stat["blocks"], stat["bytes"]) == (warmed["blocks"], warmed["bytes"])
    assert stat["budget_bytes"] == 10**9
    assert stat["resident_bytes"] <= stat["bytes"]
    assert stat["held_bytes"] == stat["held_unnamed_bytes"] == 0
    words = (str(packed), *cache, "graph.size=32", "loader.batch_size=16", "bench.warmup_steps=2")
    assert run_json(capsys, "bench", *words)["bytes_read"]["lake"] == 0
    code, _, err = run(capsys, "cache", "warm", f"data.url={packed}", *cache, "cache.policy=stream")
    assert code == 2
    assert "nothing to warm" in err
