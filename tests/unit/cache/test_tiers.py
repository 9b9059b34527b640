"""Memory, node and pool together."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dalipipe.cache.config import CacheConfig, MemoryConfig, TierConfig, TiersConfig
from dalipipe.cache.inspect import clear, stat, verify
from dalipipe.cache.mapping import resident_bytes
from dalipipe.cache.open import open_cache
from dalipipe.cache.readers import Readers
from dalipipe.cache.tiered import TieredCache
from dalipipe.errors import ConfigError, StorageError
from dalipipe.shards.manifest import Manifest
from dalipipe.storage.local import LocalStore
from dalipipe.storage.store import StorageConfig
from dalipipe.telemetry import Recorder
from tests.contracts.cache import CacheContract
from tests.support.lake import MemoryLake, image_set, open_folder
from tests.unit.cache.tiers import NUM_SAMPLES, configure, open_tiers, scan


class TestAllTiers(CacheContract):
    @pytest.fixture(autouse=True)
    def _directory(self, tmp_path: Path) -> None:
        self.directory = tmp_path

    def make(self, manifest: Manifest, lake: MemoryLake) -> TieredCache:
        share = manifest.num_bytes // 4
        config = configure(self.directory, node=share, memory=share, pool=share)
        return open_tiers(manifest, lake, config)[0]


class TestPassing(CacheContract):
    """Nothing is kept; ranks of the node share what they hold."""

    @pytest.fixture(autouse=True)
    def _directory(self, tmp_path: Path) -> None:
        self.directory = tmp_path

    def make(self, manifest: Manifest, lake: MemoryLake) -> TieredCache:
        return open_tiers(manifest, lake, configure(self.directory, policy="stream"), readers=Readers(local_ranks=2))[0]


def test_tiers_are_exclusive_and_each_keeps_its_share(tmp_path: Path, manifest: Manifest, lake: MemoryLake) -> None:
    total = manifest.num_bytes
    config = configure(tmp_path, node=int(0.3 * total), memory=int(0.2 * total), pool=int(0.25 * total))
    cache, recorder = open_tiers(manifest, lake, config)
    assert set(scan(cache, manifest)) == {"lake"}
    tiers = scan(cache, manifest)
    for name, share in (("memory", 0.2), ("node", 0.3), ("pool", 0.25), ("lake", 0.25)):
        assert abs(tiers.count(name) / len(tiers) - share) < 0.04, name
    assert scan(cache, manifest) == tiers
    counts = recorder.snapshot()
    written = {name: counts[f"bytes_written.{name}"] for name in ("memory", "node", "pool")}
    assert all(0.15 * total < num_bytes < 0.31 * total for num_bytes in written.values())
    report = stat(config)
    assert {each.tier: each.bytes for each in report.sets} == {name: written[name] for name in ("memory", "node")}
    assert report.budget_bytes == int(0.3 * total) + int(0.2 * total)


def test_another_node_reads_from_the_pool_what_the_first_brought(
    tmp_path: Path, manifest: Manifest, lake: MemoryLake
) -> None:
    for node, expected in (("a", "lake"), ("b", "pool")):
        config = configure(tmp_path, node=0.5, pool=1.0)
        config = CacheConfig(dir=str(tmp_path / node), tiers=config.tiers)
        cache, recorder = open_tiers(manifest, lake, config)
        assert set(scan(cache, manifest)) == {expected}
        cache.close()
    assert set(lake.reads.values()) == {1}
    assert recorder.snapshot()["bytes_read.pool"] == sum(manifest.block_bytes(b) for b in range(manifest.num_blocks))


def test_torn_and_flipped_objects_of_the_pool_are_read_from_the_lake_and_mended(
    tmp_path: Path, manifest: Manifest, lake: MemoryLake
) -> None:
    config = configure(tmp_path, pool=1.0)
    scan(open_tiers(manifest, lake, config)[0], manifest)
    root = tmp_path / "pool" / manifest.identity / "0"
    flipped = bytearray((root / "3").read_bytes())
    flipped[7] ^= 1
    (root / "3").write_bytes(flipped)
    os.truncate(root / "4", 20)
    (root / "5").unlink()
    cache, recorder = open_tiers(manifest, lake, config)
    assert scan(cache, manifest, [2, 3, 4, 5]) == ["pool", "lake", "lake", "lake"]
    assert recorder.snapshot()["pool_corrupt"] == 2
    assert scan(cache, manifest, [3, 4, 5]) == ["pool"] * 3


def test_a_pool_that_fails_is_left_alone_for_a_while_and_said_once(
    tmp_path: Path, manifest: Manifest, lake: MemoryLake, caplog: pytest.LogCaptureFixture
) -> None:
    class Down(MemoryLake):
        def fail(self, *_: object, **__: object) -> None:
            self.calls = getattr(self, "calls", 0) + 1
            raise StorageError("the pool is down")

        read = put = fail  # type: ignore[assignment]

    down = Down(image_set(NUM_SAMPLES, num_bytes=60))
    recorder = Recorder()
    config = configure(tmp_path, pool=1.0)
    cache = open_cache(manifest, lake, config, recorder, pool=down)
    with caplog.at_level(logging.WARNING):
        assert set(scan(cache, manifest)) == {"lake"}
    assert down.calls == 1
    assert recorder.snapshot()["pool_failures"] == 1
    assert len([record for record in caplog.records if "pool" in record.message]) == 1


def test_the_last_job_of_a_node_frees_the_memory_unless_it_is_to_be_kept(
    tmp_path: Path, manifest: Manifest, lake: MemoryLake
) -> None:
    def held_bytes() -> int:
        return sum(
            path.stat().st_size for path in (tmp_path / "memory").rglob("*") if path.name.isdigit() and path.is_file()
        )

    config = configure(tmp_path, memory=manifest.num_bytes)
    first, second = (open_tiers(manifest, lake, config)[0] for _ in range(2))
    scan(first, manifest)
    assert set(scan(second, manifest)) == {"memory"}
    view = second.get(0)
    first.close()
    assert held_bytes()
    second.close()
    assert not held_bytes()
    assert len(view.memory)
    kept = open_tiers(manifest, lake, configure(tmp_path, memory=manifest.num_bytes, keep=True))[0]
    scan(kept, manifest)
    kept.close()
    assert held_bytes()
    assert clear(config).blocks == manifest.num_blocks


def test_a_wait_without_an_end_or_a_beginning_is_refused(tmp_path: Path, manifest: Manifest, lake: MemoryLake) -> None:
    with pytest.raises(ConfigError, match=r"cache\.wait_s=0"):
        open_tiers(manifest, lake, CacheConfig(dir=str(tmp_path), wait_s=0))


def test_a_disk_without_room_is_said_and_survived(
    tmp_path: Path, manifest: Manifest, lake: MemoryLake, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        cache, _ = open_tiers(manifest, lake, configure(tmp_path, node=1e-9))
    assert "no room" in caplog.text
    assert set(scan(cache, manifest)) == {"lake"}


def test_auto_says_what_it_chose_and_why(tmp_path: Path, manifest: Manifest, lake: MemoryLake) -> None:
    config = configure(tmp_path, node=0.5)
    assert "pin, chosen by auto" in open_tiers(manifest, lake, config)[0].describe()
    uneven = open_tiers(manifest, lake, config, readers=Readers(uneven=True))[0].describe()
    assert "lfu, chosen by auto" in uneven
    assert "more often" in uneven
    assert "\n" not in uneven


def test_a_node_that_reads_a_part_of_the_set_pins_that_part(
    tmp_path: Path, manifest: Manifest, lake: MemoryLake
) -> None:
    half = manifest.num_bytes // 2
    cache, _ = open_tiers(manifest, lake, configure(tmp_path, node=half), readers=Readers(node_share=0.5))
    assert all(cache.keeps(block) for block in range(manifest.num_blocks))
    assert "100%" in cache.describe()


def test_streamed_blocks_are_read_once_for_all_who_hold_them_and_leave_nothing(
    tmp_path: Path, manifest: Manifest, lake: MemoryLake
) -> None:
    config = configure(tmp_path, policy="stream")
    one, other = (open_tiers(manifest, lake, config, readers=Readers(local_ranks=2))[0] for _ in range(2))
    first, second = one.get(7), other.get(7)
    assert (first.tier, second.tier) == ("lake", "memory")
    assert set(lake.reads.values()) == {1}
    folder = tmp_path / "memory" / manifest.identity / "passing" / "0"
    first.release()
    assert [path.name for path in folder.iterdir()] == ["7"]
    second.release()
    assert not list(folder.iterdir())
    held = one.get(8)
    one.close()
    other.close()
    assert not list((tmp_path / "memory").iterdir())
    assert bytes(held.memory) == image_set(NUM_SAMPLES, num_bytes=60).block(manifest, 8)


def test_clear_takes_nothing_for_a_block_that_is_not_its_own(
    tmp_path: Path, manifest: Manifest, lake: MemoryLake
) -> None:
    """A data set that lies below the cache folder, its files named by numbers, is no cache."""
    config = configure(tmp_path, node=0.5)
    scan(open_tiers(manifest, lake, config)[0], manifest)
    theirs = tmp_path / "node" / "photos" / "0" / "123"
    theirs.parent.mkdir(parents=True)
    theirs.write_bytes(b"the only copy")
    assert clear(config, force=True).blocks == manifest.num_blocks
    assert verify(config).blocks == 0
    assert theirs.read_bytes() == b"the only copy"


def test_stat_tells_what_is_held_what_is_dropped_and_what_is_in_the_page_cache(
    tmp_path: Path, manifest: Manifest, lake: MemoryLake
) -> None:
    config = configure(tmp_path, node=0.5)
    cache, _ = open_tiers(manifest, lake, config)
    scan(cache, manifest)
    assert stat(config).held_bytes == 0
    held, dropped = cache.get(1), cache.get(2)
    (tmp_path / "node" / manifest.identity / "0" / "2").unlink()
    report = stat(config)
    page = os.sysconf("SC_PAGE_SIZE")
    assert 2 * page <= report.held_bytes <= 2 * (manifest.block_bytes(1) + page)
    assert page <= report.held_unnamed_bytes < report.held_bytes
    assert report.blocks == manifest.num_blocks - 1
    assert report.resident_bytes == report.bytes
    held.release()
    dropped.release()
    assert stat(config).held_bytes == 0


def test_hugepages_that_are_not_to_be_had_are_said(
    tmp_path: Path, manifest: Manifest, lake: MemoryLake, caplog: pytest.LogCaptureFixture
) -> None:
    memory = MemoryConfig(capacity=manifest.num_bytes, dir=str(tmp_path / "memory"), hugepages=True)
    config = CacheConfig(dir=str(tmp_path), tiers=TiersConfig(node=TierConfig(), memory=memory))
    setting = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    if not setting.exists() or "[never]" not in setting.read_text():
        pytest.skip("shared memory of this host uses huge pages")
    with caplog.at_level(logging.WARNING):
        cache, _ = open_tiers(manifest, lake, config)
    assert "huge=within_size" in caplog.text
    scan(cache, manifest)
    assert set(scan(cache, manifest)) == {"memory"}


HUGE = """
import sys
from pathlib import Path
from dalipipe.cache.blockstore import BlockStore
root = Path(sys.argv[1])
blocks = BlockStore(root, fallocate=True)
data = memoryview(bytes(range(256)) * (16384 * 4 - 1)).toreadonly()
before = [int(l.split()[1]) for l in open("/proc/meminfo") if l.startswith("ShmemHugePages")][0]
blocks.write(0, data)
after = [int(l.split()[1]) for l in open("/proc/meminfo") if l.startswith("ShmemHugePages")][0]
assert blocks.open(0, len(data)) == data
print(after - before)
"""


def test_a_mount_with_huge_pages_gets_them(tmp_path: Path) -> None:
    mount = f"mount -t tmpfs -o size=64m,huge=within_size none {tmp_path}"
    done = subprocess.run(
        ["unshare", "-Urm", "sh", "-c", f'{mount} && exec "$0" -c "$1" {tmp_path}', sys.executable, HUGE],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if done.returncode and ("unshare" in done.stderr or "mount" in done.stderr):
        pytest.skip("this host lets no test mount a file system")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 8 * 1024, "16 MiB less a little, in pages of 2 MiB, kB"


@pytest.mark.parametrize(("page_cache", "most"), [("drop", 0.2), ("keep", 1.0)])
def test_blocks_of_a_local_lake_leave_the_page_cache_after_use(tmp_path: Path, page_cache: str, most: float) -> None:
    folder = image_set(400, num_bytes=20_000, num_shards=2)
    manifest = open_folder(folder)
    shards = []
    for name, data in folder.files.items():
        with (tmp_path / name).open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        shards += [tmp_path / name] if name.endswith(".tar") else []
    if any(map(resident_bytes, shards)):
        pytest.skip("this file system keeps pages whatever it is told, as tmpfs does")
    store = LocalStore(tmp_path, StorageConfig(page_cache=page_cache))
    cache = open_cache(manifest, store, CacheConfig(policy="stream"), Recorder())
    for block in range(manifest.num_blocks):
        cache.get(block).release()
    share = sum(map(resident_bytes, shards)) / sum(path.stat().st_size for path in shards)
    assert share <= most
    if page_cache == "keep":
        assert share > 0.9
