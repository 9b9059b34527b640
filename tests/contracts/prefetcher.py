"""What every `Prefetcher` must do; an implementation's test inherits this class and provides `make`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest

from dalipipe.errors import ClosedError, DalipipeError
from dalipipe.order.config import ShuffleConfig
from dalipipe.order.contract import Order
from dalipipe.order.epoch import epoch_order
from dalipipe.order.step import Prefetcher, Step
from dalipipe.shards.manifest import Manifest
from tests.support.lake import MemoryLake, image_bytes, image_set, open_folder

BATCH_SIZE = 24


def orders_of(manifest: Manifest, *, last_batch: str = "pad", batch_size: int = BATCH_SIZE) -> Callable[[int], Order]:
    def order(epoch: int) -> Order:
        return epoch_order(
            manifest.shape,
            epoch=epoch,
            batch_size=batch_size,
            shuffle=ShuffleConfig(seed=5, window=0.5, lanes=4),
            last_batch=last_batch,
        )

    return order


def check_bytes(step: Step) -> None:
    for i, sample in enumerate(step.ids.tolist()):
        assert step.fields["image"][i].tobytes() == image_bytes(sample)
        assert step.fields["label"][i].tobytes() == str(sample % 7).encode()
        assert step.sizes[i].tolist() == [sample % 50, sample % 70]
        assert not step.fields["image"][i].flags.writeable


class PrefetcherContract:
    """Inherit and override `make`."""

    def make(
        self,
        manifest: Manifest,
        lake: MemoryLake,
        *,
        start: tuple[int, int] = (0, 0),
        slots: Sequence[int] = range(BATCH_SIZE),
        last_batch: str = "pad",
    ) -> Prefetcher:
        """A prefetcher over `orders_of(manifest, last_batch=…)`, closed by the test."""
        raise NotImplementedError

    @pytest.fixture
    def lake(self) -> MemoryLake:
        return MemoryLake(image_set())

    @pytest.fixture
    def manifest(self, lake: MemoryLake) -> Manifest:
        return open_folder(image_set())

    def test_ids_and_bytes_are_those_of_the_order_over_three_epochs(self, manifest: Manifest, lake: MemoryLake) -> None:
        order = orders_of(manifest)
        slots = list(range(8, 16))
        prefetcher = self.make(manifest, lake, slots=slots)
        try:
            for epoch in range(3):
                for number in range(order(epoch).num_steps):
                    step = prefetcher.next()
                    assert (step.epoch, step.step) == (epoch, number)
                    expected = order(epoch).ids(number, 1)[0][slots]
                    assert step.ids[step.valid].tolist() == expected[expected >= 0].tolist()
                    assert (step.valid == (expected >= 0)).all()
                    check_bytes(step)
                    step.release()
        finally:
            prefetcher.close()

    def test_padding_repeats_real_samples_of_the_same_step(self, manifest: Manifest, lake: MemoryLake) -> None:
        order = orders_of(manifest)(0)
        last = order.num_steps - 1
        real = order.ids(last, 1)[0]
        real = real[real >= 0]
        assert 0 < len(real) < BATCH_SIZE - 8, "the last step must leave whole ranks without samples"
        prefetcher = self.make(manifest, lake, start=(0, last), slots=range(BATCH_SIZE - 8, BATCH_SIZE))
        try:
            step = prefetcher.next()
            assert not step.valid.any()
            assert set(step.ids.tolist()) <= set(real.tolist())
            check_bytes(step)
            step.release()
        finally:
            prefetcher.close()

    @pytest.mark.parametrize("start", [(0, 3), (2, 7), (1, 9)])
    def test_a_start_anywhere_continues_the_same_sequence(
        self, manifest: Manifest, lake: MemoryLake, start: tuple[int, int]
    ) -> None:
        order = orders_of(manifest)
        epoch, number = start if start[1] < order(0).num_steps else (start[0] + 1, 0)
        prefetcher = self.make(manifest, lake, start=start)
        try:
            for _ in range(12):
                step = prefetcher.next()
                assert (step.epoch, step.step) == (epoch, number)
                expected = order(epoch).ids(number, 1)[0]
                assert step.ids[step.valid].tolist() == expected[expected >= 0].tolist()
                step.release()
                number += 1
                if number == order(epoch).num_steps:
                    epoch, number = epoch + 1, 0
        finally:
            prefetcher.close()

    def test_views_stay_valid_until_release_also_after_close(self, manifest: Manifest, lake: MemoryLake) -> None:
        prefetcher = self.make(manifest, lake)
        kept = [prefetcher.next() for _ in range(20)]
        prefetcher.close()
        for step in kept:
            check_bytes(step)
        for step in kept:
            step.release()
            step.release()

    def test_substitutes_are_the_rest_of_the_block_cyclically_then_the_next_blocks(
        self, manifest: Manifest, lake: MemoryLake
    ) -> None:
        prefetcher = self.make(manifest, lake)
        try:
            step = prefetcher.next()
            bad = int(step.ids[3])
            first, stop = manifest.block_samples_range(bad // manifest.block_samples)
            ring = [*range(bad + 1, stop), *range(first, bad)]
            following = orders_of(manifest)(0).next_block(bad // manifest.block_samples)
            ring += range(*manifest.block_samples_range(following))
            samples = step.substitutes(3)
            for expected in ring:
                sample = next(samples)
                assert sample.id == expected
                assert sample.fields["image"].tobytes() == image_bytes(expected)
                assert (sample.height, sample.width) == (expected % 50, expected % 70)
            assert len({s.id for s in step.substitutes(3)} & {bad}) == 0
            step.release()
        finally:
            prefetcher.close()

    def test_close_wakes_a_waiting_reader_and_leaves_no_thread(self, manifest: Manifest, lake: MemoryLake) -> None:
        before = set(threading.enumerate())
        gate, entered = threading.Event(), threading.Event()

        def block(key: str, start: int, stop: int) -> None:
            entered.set()
            assert gate.wait(30)

        lake.on_read = block
        prefetcher = self.make(manifest, lake)
        errors: list[Exception] = []

        def read() -> None:
            try:
                prefetcher.next()
            except DalipipeError as error:
                errors.append(error)

        reader = threading.Thread(target=read)
        reader.start()
        assert entered.wait(10)
        closer = threading.Thread(target=prefetcher.close)
        closer.start()
        reader.join(2)
        assert not reader.is_alive()
        assert isinstance(errors[0], ClosedError)
        gate.set()
        closer.join(5)
        assert not closer.is_alive()
        with pytest.raises(ClosedError):
            prefetcher.next()
        prefetcher.close()
        left = [thread for thread in set(threading.enumerate()) - before if thread.is_alive()]
        for thread in left:
            thread.join(5)
        assert not any(thread.is_alive() for thread in left)
