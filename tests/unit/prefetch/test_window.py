from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dalipipe.cache.config import CacheConfig
from dalipipe.cache.open import open_cache
from dalipipe.cache.view import HeldView
from dalipipe.errors import ConfigError, IntegrityError, PipelineError, PipelineTimeoutError, StorageError
from dalipipe.order.config import ShuffleConfig
from dalipipe.order.contract import Order
from dalipipe.order.recipe import orders
from dalipipe.order.step import Step
from dalipipe.prefetch.config import PrefetchConfig
from dalipipe.prefetch.open import open_prefetcher
from dalipipe.prefetch.schedule import Schedule
from dalipipe.prefetch.tasks import Task
from dalipipe.prefetch.window import WindowPrefetcher
from dalipipe.shards.manifest import Manifest
from dalipipe.shards.union import join_manifests
from dalipipe.telemetry import Recorder
from tests.contracts.prefetcher import BATCH_SIZE, PrefetcherContract, check_bytes, orders_of
from tests.support.host import within
from tests.support.lake import MemoryLake, image_set, open_folder
from tests.support.shards import Folder
from tests.support.waiting import wait_until


def start_prefetcher(
    manifest: Manifest,
    lake: MemoryLake,
    cache_config: CacheConfig,
    *,
    start: tuple[int, int] = (0, 0),
    slots: Sequence[int] = range(BATCH_SIZE),
    last_batch: str = "pad",
    config: PrefetchConfig | None = None,
    recorder: Recorder | None = None,
    fields: Sequence[str] = ("image", "label"),
    cold: bool = False,
) -> WindowPrefetcher:
    recorder = recorder or Recorder()
    return open_prefetcher(
        orders=orders_of(manifest, last_batch=last_batch),
        start=start,
        slots=np.asarray(slots, np.int64),
        manifest=manifest,
        cache=open_cache(manifest, lake, cache_config, recorder),
        fields=fields,
        config=config or PrefetchConfig(threads=3),
        recorder=recorder,
        store=lake if cold else None,
    )


STREAM = CacheConfig(policy="stream")


class TestOverNode(PrefetcherContract):
    @pytest.fixture(autouse=True)
    def _directory(self, tmp_path: Path) -> None:
        self.directory = tmp_path

    def make(
        self,
        manifest: Manifest,
        lake: MemoryLake,
        *,
        start: tuple[int, int] = (0, 0),
        slots: Sequence[int] = range(BATCH_SIZE),
        last_batch: str = "pad",
    ) -> WindowPrefetcher:
        cache_config = CacheConfig(dir=str(self.directory))
        return start_prefetcher(manifest, lake, cache_config, start=start, slots=slots, last_batch=last_batch)


class TestOverStream(PrefetcherContract):
    def make(
        self,
        manifest: Manifest,
        lake: MemoryLake,
        *,
        start: tuple[int, int] = (0, 0),
        slots: Sequence[int] = range(BATCH_SIZE),
        last_batch: str = "pad",
    ) -> WindowPrefetcher:
        # A cap of a few blocks, so that every rule about memory is at work.
        config = PrefetchConfig(threads=4, depth=4, memory_cap="32KiB")
        return start_prefetcher(manifest, lake, STREAM, start=start, slots=slots, last_batch=last_batch, config=config)


@pytest.fixture
def manifest() -> Manifest:
    return open_folder(image_set())


@pytest.fixture
def lake() -> MemoryLake:
    return MemoryLake(image_set())


def steps_of_epoch(manifest: Manifest) -> int:
    return orders_of(manifest)(0).num_steps


def test_an_epoch_streamed_reads_each_byte_once(manifest: Manifest, lake: MemoryLake) -> None:
    prefetcher = start_prefetcher(manifest, lake, STREAM, last_batch="drop", config=PrefetchConfig(depth=2, threads=2))
    try:
        for _ in range(orders_of(manifest, last_batch="drop")(0).num_steps):
            step = prefetcher.next()
            check_bytes(step)
            step.release()
    finally:
        prefetcher.close()
    once = [extent for extent, count in lake.reads.items() if count == 1]
    # Only blocks of the next epoch, which the window has begun, can have been read again.
    assert len(once) > len(lake.reads) / 2
    assert max(lake.reads.values()) <= 2


def test_a_wait_for_the_lake_is_charged_to_the_lake(manifest: Manifest, lake: MemoryLake) -> None:
    lake.on_read = lambda key, start, stop: time.sleep(0.3)
    recorder = Recorder()
    prefetcher = start_prefetcher(
        manifest, lake, STREAM, recorder=recorder, config=PrefetchConfig(threads=32, timeout_s=30)
    )
    try:
        began_s = time.perf_counter()
        prefetcher.next().release()
        waited_s = time.perf_counter() - began_s
    finally:
        prefetcher.close()
    counts = recorder.snapshot()
    assert waited_s >= 0.2
    assert counts["get_wait_s.lake"] >= 0.15
    assert sum(value for name, value in counts.items() if name.startswith("get_wait_s.")) <= 1.1 * waited_s + 0.02


def test_a_slow_consumer_is_told_from_a_slow_lake(manifest: Manifest, lake: MemoryLake) -> None:
    recorder = Recorder()
    prefetcher = start_prefetcher(manifest, lake, STREAM, recorder=recorder, config=PrefetchConfig(depth=2, threads=2))
    try:
        prefetcher.next().release()
        for _ in range(3):
            wait_until(prefetcher.is_full, "a full window")
            time.sleep(0.05)  # the slow consumer
            prefetcher.next().release()
    finally:
        prefetcher.close()
    counts = recorder.snapshot()
    assert counts["put_wait_s.prefetch"] >= 0.14
    assert counts.get("get_wait_s.lake", 0) < counts["put_wait_s.prefetch"]


def test_a_failing_store_is_raised_at_the_step_that_needs_the_block(manifest: Manifest, lake: MemoryLake) -> None:
    order = orders_of(manifest)(0)
    seen: set[int] = set()
    first_needs = []
    for number in range(order.num_steps):
        blocks = set((order.ids(number, 1)[0] // manifest.block_samples).tolist()) - {-1}
        first_needs.append(blocks - seen)
        seen |= blocks
    victim_step = next(number for number in range(2, order.num_steps) if first_needs[number])
    victim = min(first_needs[victim_step])
    extents = {(extent.shard, extent.start) for extent in manifest.extents(victim)}

    def fail(key: str, start: int, stop: int) -> None:
        if (key, start) in extents:
            raise StorageError(f"{lake.url}/{key}: 503")

    lake.on_read = fail
    prefetcher = start_prefetcher(manifest, lake, STREAM)
    try:
        for number in range(victim_step):
            step = prefetcher.next()
            assert step.step == number
            step.release()
        for _ in range(2):
            with pytest.raises(StorageError, match=": 503"):
                prefetcher.next()
    finally:
        with within(2):
            prefetcher.close()


def test_corrupt_bytes_reach_the_trainer_as_an_error_never_as_data(manifest: Manifest, lake: MemoryLake) -> None:
    for key in [key for key in lake.files if key.endswith(".tar")]:
        lake.files[key] = bytes(len(lake.files[key]))
    prefetcher = start_prefetcher(manifest, lake, STREAM)
    try:
        with pytest.raises(IntegrityError):
            prefetcher.next()
    finally:
        prefetcher.close()


def test_an_error_of_the_order_ends_as_a_pipeline_error(manifest: Manifest, lake: MemoryLake) -> None:
    def broken(epoch: int) -> object:
        raise ZeroDivisionError("a bug in the order")

    prefetcher = open_prefetcher(
        orders=broken,  # type: ignore[arg-type]
        start=(0, 0),
        slots=np.arange(4),
        manifest=manifest,
        cache=open_cache(manifest, lake, STREAM, Recorder()),
        fields=["image"],
        config=PrefetchConfig(threads=2),
        recorder=Recorder(),
    )
    try:
        with pytest.raises(PipelineError, match="a bug in the order") as caught:
            prefetcher.next()
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
    finally:
        prefetcher.close()


def test_a_store_that_hangs_times_out_by_name_and_does_not_hold_up_close(
    manifest: Manifest, lake: MemoryLake, caplog: pytest.LogCaptureFixture
) -> None:
    gate = threading.Event()
    lake.on_read = lambda key, start, stop: gate.wait(60) and None
    config = PrefetchConfig(threads=2, timeout_s=0.2)
    prefetcher = start_prefetcher(manifest, lake, STREAM, config=config)
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("dalipipe-fetch")]
    try:
        with pytest.raises(PipelineTimeoutError, match=r"0\.2 s.*epoch 0 step 0 lacks \d+ blocks \[.*under way"):
            prefetcher.next()
        with within(2):
            with caplog.at_level(logging.WARNING):
                prefetcher.close()
        assert "left behind" in caplog.text
    finally:
        gate.set()
        for thread in threads:
            thread.join(10)
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("mode", ["block", "none"])
def test_memory_stays_under_the_cap_when_a_step_fits(mode: str) -> None:
    folder = image_set(1600, block_samples=8, num_bytes=1000)
    manifest, lake = open_folder(folder), MemoryLake(folder)
    cache = open_cache(manifest, lake, STREAM, Recorder())
    largest = max(manifest.block_bytes(block) for block in range(manifest.num_blocks))
    # Three steps whose samples all lie in different blocks: one handed out, one at the head, one behind it.
    cap_bytes = 3 * BATCH_SIZE * largest
    resident = peak = 0
    lock = threading.Lock()
    real_get_run = cache.get_run
    longest = 0

    def counted(view: HeldView) -> Any:
        nonlocal resident, peak
        release = view.release
        with lock:
            resident += view.held_bytes
            peak = max(peak, resident)

        class Counted:
            memory, tier, held_bytes, done = view.memory, view.tier, view.held_bytes, False

            def release(self) -> None:
                nonlocal resident
                with lock:
                    resident -= 0 if self.done else self.held_bytes
                self.done = True
                release()

        return Counted()

    def get_run(blocks: Sequence[int], deliver: Callable[[int, Any], None]) -> None:
        nonlocal longest
        came: list[int] = []

        def pass_on(block: int, view: HeldView) -> None:
            came.append(block)
            deliver(block, counted(view))

        real_get_run(blocks, pass_on)
        longest = max(longest, len(came))

    def order(epoch: int) -> Order:
        if mode == "none":
            shuffle = ShuffleConfig(mode="none")
            return orders({"": manifest.shape}, batch_size=BATCH_SIZE, shuffle=shuffle, last_batch="pad")(epoch)
        return orders_of(manifest)(epoch)

    cache.get_run = get_run  # type: ignore[method-assign]
    prefetcher = open_prefetcher(
        orders=order,
        start=(0, 0),
        slots=np.arange(BATCH_SIZE),
        manifest=manifest,
        cache=cache,
        fields=["image"],
        config=PrefetchConfig(threads=4, depth=16, memory_cap=cap_bytes),
        recorder=Recorder(),
    )
    try:
        for _ in range(2 * order(0).num_steps):
            prefetcher.next().release()
    finally:
        prefetcher.close()
    assert 0 < peak <= cap_bytes
    assert resident == 0
    if mode == "none":
        assert longest > 1


def test_blocks_of_mixed_sets_go_when_they_are_used_up() -> None:
    """A set of small blocks beside one of large ones: what is used up is not held until the cap is reached."""
    folders = {
        "a": image_set(2400, block_samples=16),
        "b": image_set(2400, block_samples=2),
    }
    parts = {name: open_folder(folder) for name, folder in folders.items()}
    files = {f"{name}/{key}": data for name, folder in folders.items() for key, data in folder.files.items()}
    manifest = join_manifests(parts, lambda name: files[name])
    cache = open_cache(manifest, MemoryLake(Folder(files)), STREAM, Recorder())
    prefetcher = open_prefetcher(
        orders=orders(
            {name: part.shape for name, part in parts.items()},
            batch_size=BATCH_SIZE,
            shuffle=ShuffleConfig(seed=5, lanes=1, window=0.01),
            last_batch="drop",
            mix={"a": 1.0, "b": 1.0},
            epoch_samples=4800,
        ),
        start=(0, 0),
        slots=np.arange(BATCH_SIZE),
        manifest=manifest,
        cache=cache,
        fields=["image"],
        config=PrefetchConfig(threads=4, depth=2),
        recorder=Recorder(),
    )
    resident = []  # a mix opens what 1,000 positions of each lane read, a fifth of the sets here
    try:
        for _ in range(170):
            prefetcher.next().release()
            resident.append(prefetcher.resident_bytes)
    finally:
        prefetcher.close()
    assert max(resident) < 0.4 * manifest.num_bytes


def test_threads_without_work_are_left_asleep(monkeypatch: pytest.MonkeyPatch, manifest: Manifest) -> None:
    """Each block that comes may give work to one thread or two; to wake all 64 for it costs more than to read it."""
    looked = 0
    real = Schedule.next_task

    def next_task(self: Schedule, depth: int) -> Task | None:
        nonlocal looked
        looked += 1  # under the window's lock
        return real(self, depth)

    monkeypatch.setattr(Schedule, "next_task", next_task)
    recorder, lake = Recorder(), MemoryLake(image_set())
    prefetcher = start_prefetcher(manifest, lake, STREAM, recorder=recorder, config=PrefetchConfig(threads=64, depth=4))
    try:
        num_steps = 3 * steps_of_epoch(manifest)
        for _ in range(num_steps):
            prefetcher.next().release()
    finally:
        prefetcher.close()
    num_events = recorder.snapshot()["blocks_missed"] + 3 * num_steps  # blocks, and steps built, taken and released
    assert looked < 64 + 4 * num_events


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (PrefetchConfig(memory_cap=100), r"prefetch\.memory_cap=100 .* at least \d+ bytes"),
        (PrefetchConfig(threads=0), r"prefetch\.threads=0"),
        (PrefetchConfig(depth=0), r"prefetch\.depth=0"),
        (PrefetchConfig(depth="deep"), r"prefetch\.depth='deep'"),
        (PrefetchConfig(timeout_s=0), r"prefetch\.timeout_s=0"),
    ],
)
def test_values_that_can_never_work_are_refused(
    manifest: Manifest, lake: MemoryLake, config: PrefetchConfig, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        start_prefetcher(manifest, lake, STREAM, config=config)


def test_an_unknown_field_is_refused_with_those_that_are_there(manifest: Manifest, lake: MemoryLake) -> None:
    with pytest.raises(ConfigError, match=r"\['text'\].*image, label"):
        start_prefetcher(manifest, lake, STREAM, fields=["image", "text"])


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("blocks", [1, 3])
def test_a_tight_cap_with_few_threads_never_stops_the_window(
    manifest: Manifest, lake: MemoryLake, threads: int, blocks: int
) -> None:
    """Blocks that wait for room must not keep the only threads from what the next step lacks."""
    mean_bytes = -(-manifest.num_bytes // manifest.num_blocks)
    config = PrefetchConfig(threads=threads, memory_cap=blocks * mean_bytes, timeout_s=20)
    for depth in (1, 4):
        prefetcher = start_prefetcher(manifest, lake, STREAM, config=replace(config, depth=depth), cold=True)
        handed_out: deque[Step] = deque()
        try:
            for _ in range(3 * orders_of(manifest)(0).num_steps):
                handed_out.append(prefetcher.next())
                if len(handed_out) > 2:  # as a graph that decodes some batches at once
                    handed_out.popleft().release()
        finally:
            prefetcher.close()
