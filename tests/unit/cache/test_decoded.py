"""Decoded samples in shared memory."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from dalipipe.cache.config import CacheConfig, MemoryConfig, TiersConfig
from dalipipe.cache.decoded import DecodedBlock, DecodedBlocks, DecodedSamples, wants_decoded
from dalipipe.cache.inspect import clear, stat, verify
from dalipipe.errors import ConfigError
from dalipipe.telemetry import Recorder

ROOT = Path(__file__).parents[3]
IDS = np.array([40, 41, 42], np.int64)


def images(block: int = 0) -> list[np.ndarray]:
    random = np.random.default_rng(block)
    return [random.integers(0, 256, (5 + i, 7 + block % 3, 3), np.uint8) for i in range(3)]


def config(root: Path) -> CacheConfig:
    return CacheConfig(dir=str(root), tiers=TiersConfig(memory=MemoryConfig(dir=str(root / "memory"))))


def opened(root: Path, capacity: int | float | str = "1M", recipe: str = "rgb8") -> tuple[DecodedBlocks, Recorder]:
    recorder = Recorder()
    return DecodedBlocks(config(root), "a" * 32, recipe=recipe, capacity=capacity, recorder=recorder), recorder


def check(found: DecodedBlock, block: int = 0) -> str:
    assert found.ids.tolist() == IDS.tolist()
    for i, image in enumerate(images(block)):
        assert np.array_equal(found.image(i), image)
        if found.tier == "memory":
            assert not found.image(i).flags.writeable
            assert not found.image(i).flags.owndata
    return found.tier


def refuse() -> tuple[np.ndarray, list[np.ndarray]]:
    raise AssertionError("decoded again")


def test_the_first_decodes_and_all_others_map_the_same_pixels(tmp_path: Path) -> None:
    one, _ = opened(tmp_path)
    other, counts = opened(tmp_path)
    assert check(one.get(3, lambda: (IDS, images()))) == "decoded"
    assert check(one.get(3, refuse)) == check(other.get(3, refuse)) == "memory"
    assert counts.snapshot()["blocks_hit.decoded"] == 1
    assert opened(tmp_path, recipe="grey8")[0].contains(3) is False


def test_views_outlive_the_file_and_the_cache(tmp_path: Path) -> None:
    decoded, _ = opened(tmp_path)
    decoded.get(0, lambda: (IDS, images()))
    found = decoded.get(0, refuse)
    image = found.image(1)
    decoded.close()
    assert clear(config(tmp_path)).blocks == 1
    del found
    assert np.array_equal(image, images()[1])


def test_what_is_kept_is_plain_arrow_and_is_counted_checked_and_cleared(tmp_path: Path) -> None:
    decoded, _ = opened(tmp_path)
    decoded.get(0, lambda: (IDS, images()))
    path = next(path for path in (tmp_path / "memory").rglob("0") if path.is_file())
    table = pa.ipc.open_file(path.read_bytes()[:-16]).read_all()
    assert table.column("id").to_pylist() == IDS.tolist()
    assert stat(config(tmp_path)).sets[0].in_use
    assert verify(config(tmp_path)).corrupt == 0
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert verify(config(tmp_path)).corrupt == 1
    assert check(decoded.get(0, lambda: (IDS, images()))) == "decoded"
    assert check(decoded.get(0, refuse)) == "memory"


def test_a_full_budget_decodes_without_keeping_and_a_clear_makes_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    decoded, recorder = opened(tmp_path, capacity=5000)
    with caplog.at_level(logging.WARNING):
        for block in range(8):
            check(decoded.get(block, lambda block=block: (IDS, images(block))), block)  # type: ignore[misc]
    report = stat(config(tmp_path))
    assert 0 < report.bytes <= 5000
    assert recorder.snapshot()["decoded_not_kept"] == 8 - report.blocks
    assert caplog.text.count("use their budget") == 1
    clear(config(tmp_path), force=True)
    decoded.get(7, lambda: (IDS, images(7)))
    assert check(decoded.get(7, refuse), 7) == "memory"


def test_threads_that_ask_at_once_decode_once(tmp_path: Path) -> None:
    decoded, recorder = opened(tmp_path)
    barrier, tiers = threading.Barrier(4), []

    def get() -> None:
        barrier.wait(10)
        tiers.append(check(decoded.get(0, lambda: (IDS, images()))))

    threads = [threading.Thread(target=get) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(tiers) == ["decoded", "memory", "memory", "memory"]
    assert recorder.snapshot()["blocks_decoded"] == 1


def test_a_failing_decode_goes_through_and_leaves_nothing(tmp_path: Path) -> None:
    decoded, _ = opened(tmp_path)
    with pytest.raises(AssertionError, match="decoded again"):
        decoded.get(0, refuse)
    assert not decoded.contains(0)
    assert check(decoded.get(0, lambda: (IDS, images()))) == "decoded"


def test_a_recipe_names_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="recipe"):
        opened(tmp_path, recipe="../elsewhere")


OTHER_JOB = """
import json, sys
from pathlib import Path
from tests.unit.cache.test_decoded import check, opened, refuse
decoded, recorder = opened(Path(sys.argv[1]))
print(json.dumps([check(decoded.get(block, refuse), block) for block in range(3)]))
"""


def test_a_second_job_decodes_nothing(tmp_path: Path) -> None:
    decoded, _ = opened(tmp_path)
    for block in range(3):
        decoded.get(block, lambda block=block: (IDS, images(block)))  # type: ignore[misc]
    done = subprocess.run(
        [sys.executable, "-c", OTHER_JOB, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert json.loads(done.stdout) == ["memory"] * 3


WRITER = """
import sys
from pathlib import Path
import numpy as np
from tests.unit.cache.test_decoded import samples
def stop(point):
    if point == sys.argv[2]:
        print(point, flush=True)
        sys.stdin.read()
samples(Path(sys.argv[1]), probe=stop).keep(7, np.zeros((40, 30, 3), np.uint8))
"""


def samples(root: Path, *, probe: Callable[[str], None] = lambda _point: None) -> DecodedSamples:
    memory = MemoryConfig(dir=str(root / "memory"), decoded="10kB", keep=True)
    cache = CacheConfig(dir=str(root), tiers=TiersConfig(memory=memory))
    return DecodedSamples(cache, "a" * 32, recorder=Recorder(), probe=probe)


@pytest.mark.parametrize("point", ["writing", "written", "linked"])
def test_a_killed_writer_leaves_a_whole_sample_or_none_and_never_more_than_the_budget(
    tmp_path: Path, point: str
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path), point], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline().decode().strip() == point
        writer.kill()
    image = np.full((40, 30, 3), 9, np.uint8)
    kept = samples(tmp_path)
    names = {path.name for path in (tmp_path / "memory").rglob("*") if path.is_file()}
    assert names == ({"keep", "locks", "usage", "7"} if point == "linked" else {"keep", "locks", "usage"})
    for sample_id in (7, 8, 9):
        kept.keep(sample_id, image)  # no lock is left over
    found = kept.find(7)
    assert found is not None
    assert (found == (0 if point == "linked" else 9)).all()
    assert stat(config(tmp_path)).bytes <= 10_000
    assert verify(config(tmp_path)).corrupt == 0


def test_the_budget_of_decoded_samples_is_a_size() -> None:
    assert not wants_decoded(CacheConfig())
    assert wants_decoded(CacheConfig(tiers=TiersConfig(memory=MemoryConfig(decoded=0.1))))
    with pytest.raises(ConfigError, match=r"cache\.tiers\.memory\.decoded"):
        wants_decoded(CacheConfig(tiers=TiersConfig(memory=MemoryConfig(decoded="plenty"))))
