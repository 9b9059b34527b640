"""A pack that was killed, in a real process by SIGKILL, continues and ends in the same bytes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dalipipe.errors import CorruptSampleError, ManifestError, PackError, TargetExistsError
from dalipipe.packing.config import PackConfig
from dalipipe.packing.run import pack
from dalipipe.packing.target import Target
from dalipipe.packing.verify import verify
from dalipipe.shards import Manifest
from dalipipe.storage.open import open_store
from dalipipe.storage.store import StorageConfig
from tests.support.images import write_image_tree
from tests.support.waiting import wait_until

NUM_IMAGES = 400

CHILD = """
import os, signal, sys
from dalipipe.packing.config import PackConfig
from dalipipe.packing.run import pack
from dalipipe.storage.store import StorageConfig

def die_at(done, total):
    if done >= int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    config = PackConfig(shard_bytes="1MiB", workers=int(sys.argv[4]), check="header")
    pack(sys.argv[1], sys.argv[2], config, StorageConfig(), progress=die_at)
"""


@pytest.fixture(scope="module")
def lake(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("lake")
    write_image_tree(root, num_images=NUM_IMAGES)
    return root


@pytest.fixture(scope="module")
def whole(lake, tmp_path_factory) -> dict[str, bytes]:
    target = tmp_path_factory.mktemp("whole") / "out"
    run_pack(lake, target)
    return contents(target)


def run_pack(source: Path, target: Path, **changed):
    config = PackConfig(**{"shard_bytes": "1MiB", "workers": 1, "check": "header", **changed})
    return pack(str(source), str(target), config, StorageConfig())


def contents(target: Path) -> dict[str, bytes]:
    store = open_store(str(target))
    return {info.key: bytes(store.read(info.key)) for info in store.list()}


def start_child(tmp_path: Path, lake: Path, target: Path, *, die_at: int, workers: int) -> subprocess.Popen[bytes]:
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    command = [sys.executable, str(script), str(lake), str(target), str(die_at), str(workers)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    return subprocess.Popen(command, env=environment)


def refuses_to_open(target: Path) -> bool:
    try:
        Manifest.open(open_store(str(target)).read)
    except ManifestError:
        return True
    return False


@pytest.mark.parametrize("die_at", [1, 200, NUM_IMAGES])
def test_killed_between_shards(tmp_path, lake, whole, die_at):
    target = tmp_path / "out"
    child = start_child(tmp_path, lake, target, die_at=die_at, workers=1)
    assert child.wait(timeout=60) == -signal.SIGKILL
    assert refuses_to_open(target)
    finished = {p: p.stat().st_mtime_ns for p in target.glob("*.tar")}
    assert finished

    report = run_pack(lake, target)

    assert report.samples == NUM_IMAGES
    assert contents(target) == whole
    assert {p: p.stat().st_mtime_ns for p in finished} == finished, "finished shards are reused"


def test_killed_at_any_moment_with_workers(tmp_path, lake, whole):
    target = tmp_path / "out"
    child = start_child(tmp_path, lake, target, die_at=10**9, workers=2)
    wait_until(lambda: child.poll() is not None or list(target.glob(".pack/*.done")), "a finished shard")
    child.kill()
    child.wait(timeout=60)
    run_pack(lake, target)
    assert contents(target) == whole


@pytest.mark.parametrize("stopped_before", ["manifest.json", "quarantine.jsonl", "shards.arrow", ".pack/plan.json"])
def test_stopped_before_any_of_the_last_files(tmp_path, lake, whole, monkeypatch, stopped_before):
    """The states a kill can leave around publication: every put and delete before `stopped_before`, none after."""
    target = tmp_path / "out"
    store_type = type(open_store(str(target)))
    for verb in ("put", "delete"):
        original = getattr(store_type, verb)

        def stop(self, key, *rest, _original=original, _verb=verb, **options):
            first_write_of_plan = key == ".pack/plan.json" and _verb == "put"
            first_delete_of_manifest = key == "manifest.json" and _verb == "delete"
            if key == stopped_before and not first_write_of_plan and not first_delete_of_manifest:
                raise KeyboardInterrupt
            return _original(self, key, *rest, **options)

        monkeypatch.setattr(store_type, verb, stop)
    with pytest.raises(KeyboardInterrupt):
        run_pack(lake, target)
    monkeypatch.undo()
    published = stopped_before == ".pack/plan.json"
    assert refuses_to_open(target) != published

    report = run_pack(lake, target)

    assert report.already_packed == published
    assert contents(target) == whole


def test_leftovers_of_another_plan_are_removed(tmp_path, lake, whole):
    target = tmp_path / "out"
    child = start_child(tmp_path, lake, target, die_at=200, workers=1)
    child.wait(timeout=60)
    (target / "mine.txt").write_text("stays")
    run_pack(lake, target, seed=5, shard_bytes="4MiB")
    other = contents(target)
    assert set(other) == {"manifest.json", "shards.arrow", "shard-000000.tar", "shard-000000.tar.idx", "mine.txt"}
    assert other["shard-000000.tar"] != whole["shard-000000.tar"]


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-30], lambda data: b"", lambda data: data[:40] + b"x" + data[41:]]
)
def test_a_damaged_done_record_only_costs_its_shard(tmp_path, lake, whole, damage):
    target = tmp_path / "out"
    child = start_child(tmp_path, lake, target, die_at=200, workers=1)
    child.wait(timeout=60)
    record = target / ".pack/shard-000001.tar.done"
    record.write_bytes(damage(record.read_bytes()))
    run_pack(lake, target)
    assert contents(target) == whole


def test_another_pack_that_ends_first_is_named(tmp_path, lake):
    def other_ends(done, total):
        if done == total:
            for record in (tmp_path / "out/.pack").glob("*.done"):
                record.unlink()

    config = PackConfig(shard_bytes="1MiB", workers=1, check="header")
    with pytest.raises(PackError, match="another pack writes there"):
        pack(str(lake), str(tmp_path / "out"), config, StorageConfig(), progress=other_ends)
    run_pack(lake, tmp_path / "out")


def test_two_packs_into_one_folder_at_once_and_the_first_is_named(tmp_path, lake, whole):
    refusals = []

    def other_comes(done, _total):
        if not refusals:
            for options in ({"seed": 5}, {"seed": 5, "overwrite": True}, {}):
                with pytest.raises(
                    TargetExistsError, match=r"another pack is at work in .*plan [0-9a-f]{32}"
                ) as refusal:
                    run_pack(lake, tmp_path / "out", **options)
                refusals.append(refusal)

    config = PackConfig(shard_bytes="1MiB", workers=1, check="header")
    pack(str(lake), str(tmp_path / "out"), config, StorageConfig(), progress=other_comes)
    assert len(refusals) == 3
    assert contents(tmp_path / "out") == whole


def test_a_target_without_locks_is_taken_over_on_demand_only(tmp_path, lake):
    target = f"memory://claimed-{tmp_path.name}"
    tried = []

    def other_comes(_done, _total):
        if not tried:
            tried.append(1)
            with pytest.raises(TargetExistsError, match=r"taken by a pack of another .*pack\.overwrite=true or remove"):
                run_pack(lake, target, seed=5)
            run_pack(lake, target, seed=5, overwrite=True)

    config = PackConfig(shard_bytes="1MiB", workers=1, check="none")
    with pytest.raises(PackError, match="was taken over by another pack"):
        pack(str(lake), target, config, StorageConfig(), progress=other_comes)
    assert run_pack(lake, target, seed=5).already_packed
    assert verify(target, StorageConfig(), decode="none").errors == []


def test_a_pack_that_ended_while_another_began_is_kept(tmp_path, lake, whole, monkeypatch):
    original = Target.packed_before

    def first_ends(self, *, overwrite):
        found = original(self, overwrite=overwrite)
        monkeypatch.undo()
        run_pack(lake, tmp_path / "out")
        return found

    monkeypatch.setattr(Target, "packed_before", first_ends)
    with pytest.raises(TargetExistsError, match="already holds a data set"):
        run_pack(lake, tmp_path / "out", seed=5)
    assert {k: v for k, v in contents(tmp_path / "out").items() if not k.startswith(".pack/")} == whole
    assert run_pack(lake, tmp_path / "out").already_packed


def test_a_pack_that_met_a_corrupt_image_continues_with_drop_corrupt(tmp_path):
    source, target = tmp_path / "src", tmp_path / "out"
    files = write_image_tree(source, num_images=200, num_classes=0)
    files[190].write_bytes(b"junk")
    with pytest.raises(CorruptSampleError):
        run_pack(source, target, shuffle=False)
    first = (target / "shard-000000.tar").stat().st_mtime_ns
    report = run_pack(source, target, shuffle=False, drop_corrupt=True)
    assert (report.samples, report.quarantined) == (199, 1)
    assert (target / "shard-000000.tar").stat().st_mtime_ns == first
    assert run_pack(source, target, shuffle=False, drop_corrupt=True).quarantined == 1
