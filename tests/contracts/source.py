"""What every BatchSource must do."""

from __future__ import annotations

import threading

import pytest

from dalipipe.errors import ClosedError
from dalipipe.graphs.contract import BatchSource
from tests.support.host import within


class BatchSourceContract:
    """Inherit, and make a source over 24 samples in steps of 6 (4 steps an epoch), labels = id % 10."""

    def make_source(self) -> BatchSource:
        """A fresh source from epoch 0, step 0."""
        raise NotImplementedError

    def test_batches_come_in_the_order_of_the_steps_and_epochs(self) -> None:
        """Endless: after the last step of an epoch comes the first of the next."""
        source = self.make_source()
        try:
            seen = [(batch.epoch, batch.step) for batch, _ in zip(source, range(10), strict=False)]
        finally:
            source.close()
        assert seen == [(epoch, step) for epoch in range(3) for step in range(4)][:10]

    def test_every_sample_comes_once_an_epoch_with_its_label(self) -> None:
        """Ids are a permutation, and each row belongs to its id."""
        source = self.make_source()
        try:
            batches = [next(source) for _ in range(4)]
        finally:
            source.close()
        ids = [int(i) for batch in batches for i in batch.tensors["id"]]
        labels = [int(label) for batch in batches for label in batch.tensors["label"]]
        assert sorted(ids) == list(range(24))
        assert labels == [i % 10 for i in ids]
        assert all(len(batch.tensors["image"]) == 6 for batch in batches)

    def test_two_sources_give_the_same_bits(self) -> None:
        """Nothing depends on when or how fast it ran."""
        import torch

        first, second = self.make_source(), self.make_source()
        try:
            for _ in range(5):
                one, other = next(first), next(second)
                assert torch.equal(one.tensors["id"], other.tensors["id"])
                assert torch.equal(one.tensors["image"], other.tensors["image"])
        finally:
            first.close()
            second.close()

    def test_close_is_fast_idempotent_and_leaves_no_thread(self) -> None:
        """Also in the middle of an epoch, with batches in work."""
        before = set(threading.enumerate())
        source = self.make_source()
        next(source)
        with within(2):
            source.close()
        source.close()
        assert set(threading.enumerate()) <= before
        with pytest.raises(ClosedError):
            next(source)

    def test_close_before_the_first_batch(self) -> None:
        """A source that nobody iterated closes as well."""
        source = self.make_source()
        source.close()
