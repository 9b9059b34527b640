"""No bad image stops the run, costs a good one, or goes unrecorded."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest
import torch

from dalipipe.errors import QuarantineError
from dalipipe.graphs.config import GraphConfig, QuarantineConfig
from dalipipe.graphs.contract import Batch
from dalipipe.graphs.origin import Origin
from dalipipe.telemetry import Recorder
from tests.support.images import jpeg_bytes
from tests.unit.graphs.steps import MemoryPrefetcher, flat_bytes, open_memory, png_bytes, sized_jpegs

DAMAGED = png_bytes(77, damaged=True)  # passes the look at both ends: DALI's run fails
CUT = jpeg_bytes(78)[:-30]


def _run(images: list[bytes], num_batches: int, batch_size: int = 4, **options: object) -> tuple[list[Batch], Recorder]:
    recorder = Recorder()
    source = open_memory(MemoryPrefetcher(images, batch_size), recorder=recorder, **options)  # type: ignore[arg-type]
    try:
        return [next(source) for _ in range(num_batches)], recorder
    finally:
        source.close()


@pytest.mark.parametrize("bad", [DAMAGED, CUT], ids=["damaged inside", "cut short"])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_bad_samples_anywhere_cost_no_good_one(bad: bytes, depth: int) -> None:
    """Bad samples in batches 0, 3, 4 and the last: every batch comes, in order, good rows bit for bit the same."""
    good = sized_jpegs(40)
    clean, _ = _run(good, 20, queue_depth=depth)
    bad_ids = [1, 12, 18, 39]
    images = [bad if i in bad_ids else data for i, data in enumerate(good)]
    batches, recorder = _run(images, 20, queue_depth=depth)
    for batch, reference in zip(batches, clean, strict=True):
        assert (batch.epoch, batch.step) == (reference.epoch, reference.step)
        ids, wanted = batch.tensors["id"].tolist(), reference.tensors["id"].tolist()
        for row, sample_id in enumerate(wanted):
            if sample_id in bad_ids:
                substitute = sample_id // 8 * 8 + (sample_id + 1) % 8
                assert ids[row] == substitute
                assert batch.tensors["label"][row] == substitute % 10
            else:
                assert ids[row] == sample_id
                assert torch.equal(batch.tensors["image"][row], reference.tensors["image"][row])
    assert recorder.snapshot()["quarantined"] == len(bad_ids)
    assert recorder.snapshot()["stage_s.salvage"] > 0


def test_a_substitute_looks_as_it_does_in_its_own_place() -> None:
    """Its augmentation follows its own id."""
    images = sized_jpegs(8)
    images[2] = DAMAGED
    batches, _ = _run(images, 1, batch_size=8)
    assert batches[0].tensors["id"].tolist() == [0, 1, 3, 3, 4, 5, 6, 7]
    assert torch.equal(batches[0].tensors["image"][2], batches[0].tensors["image"][3])


@pytest.mark.parametrize("name", ["image_train", "image_eval", "image_raw"])
def test_every_kind_of_bad_file_is_replaced_and_recorded(name: str, tmp_path: Path) -> None:
    """Truncated, empty, text, zeroes, header only, damaged, and bombs that are never decoded."""
    bombs = [flat_bytes("PNG", 3000), flat_bytes("JPEG", 3000)]
    bad = [CUT, b"", b"no image at all", bytes(999), jpeg_bytes(1)[:200], DAMAGED, *bombs]
    images = [data for i in range(8) for data in (bad[i], *sized_jpegs(7))]
    graph = GraphConfig(name=name, size=32, resize_shorter=40, num_threads=2)
    quarantine = QuarantineConfig(max_fraction=1, max_pixels=1_000_000)
    batches, _ = _run(images, 7, batch_size=8, graph=graph, quarantine=quarantine, run_dir=tmp_path / "run")
    ids = np.concatenate([batch.tensors["id"].numpy() for batch in batches])
    assert (ids % 8 != 0).all()
    _, recorder = _run(images, 16, batch_size=8, graph=graph, quarantine=quarantine, run_dir=tmp_path / "two")
    assert recorder.snapshot()["quarantined"] == 8
    records = [json.loads(line) for line in (tmp_path / "two" / "quarantine.jsonl").read_text().splitlines()]
    assert sorted(record["id"] for record in records) == list(range(0, 64, 8))
    assert all(record.keys() == {"id", "epoch", "step", "kind", "reason", "xxh3"} for record in records)
    reasons = {record["id"]: record["reason"] for record in records}
    assert reasons[8] == "empty (0 bytes)"
    assert "3000 x 3000 pixels are more than quarantine.max_pixels=1000000" in reasons[48]


def test_known_bad_samples_fail_no_run_again() -> None:
    """The second epoch spends nothing on salvage."""
    images = sized_jpegs(8)
    images[5] = DAMAGED
    recorder = Recorder()
    source = open_memory(MemoryPrefetcher(images, 4), recorder=recorder, queue_depth=1)
    for _ in range(4):
        next(source)
    spent = recorder.snapshot()["stage_s.salvage"]
    for _ in range(6):
        batch = next(source)
        assert 5 not in batch.tensors["id"].tolist()
    source.close()
    assert recorder.snapshot()["stage_s.salvage"] == spent


def test_a_bad_substitute_is_passed_over() -> None:
    """The next good one of the block, as a function of the bytes alone."""
    images = sized_jpegs(8)
    images[2], images[3], images[4] = DAMAGED, CUT, b""
    batches, recorder = _run(images, 1, batch_size=8)
    assert batches[0].tensors["id"].tolist() == [0, 1, 5, 5, 5, 5, 6, 7]
    assert recorder.snapshot()["quarantined"] == 3


def test_a_substitute_that_is_broken_inside_is_found_out_by_the_graph() -> None:
    """A look at the bytes trusted it; the next good one comes in the end, whoever was met first."""
    images = sized_jpegs(8)
    images[3], images[4], images[5] = CUT, DAMAGED, DAMAGED
    batches, recorder = _run(images, 2, batch_size=4)
    assert [batch.tensors["id"].tolist() for batch in batches] == [[0, 1, 2, 6], [6, 6, 6, 7]]
    assert recorder.snapshot()["quarantined"] == 3


def test_nothing_good_near_is_an_error() -> None:
    """It names the sample and what to do."""
    with pytest.raises(QuarantineError, match=r"sample 0 \(epoch 0, step 0\).*dalipipe verify"):
        _run([CUT] * 4, 1)


def test_trailing_bytes_are_legal() -> None:
    """Cameras append them; nothing is quarantined."""
    images = [data + b"maker's note" for data in sized_jpegs(4)]
    batches, recorder = _run(images, 1)
    assert batches[0].tensors["id"].tolist() == [0, 1, 2, 3]
    assert "quarantined" not in recorder.snapshot()


@pytest.mark.parametrize("bad", [DAMAGED, CUT])
def test_policy_raise_stops_at_the_first(bad: bytes) -> None:
    """With the reason."""
    images = [*sized_jpegs(3), bad]
    with pytest.raises(QuarantineError, match=r"sample 3 .*policy=raise"):
        _run(images, 1, quarantine=QuarantineConfig(policy="raise"))


def test_the_ceiling_stops_the_run_with_its_figures() -> None:
    """One is always allowed; the share is taken of the data set, not of the first batch."""
    images = sized_jpegs(24)
    images[3] = CUT
    ceiling = QuarantineConfig(max_fraction=0.001)
    _run(images, 6, quarantine=ceiling, num_samples=24)
    images[13] = DAMAGED
    with pytest.raises(QuarantineError, match=r"2 bad samples are more than quarantine.max_fraction=0.001 of 24"):
        _run(images, 6, quarantine=ceiling, num_samples=24)
    _run(images, 6, quarantine=QuarantineConfig(max_fraction=0.1), num_samples=24)
    # Two early ones in a large data set say nothing about its share.
    _run(images, 6, quarantine=ceiling, num_samples=1_000_000)


def test_a_graph_that_refuses_what_the_checker_accepts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoders differ: then each sample is asked alone."""
    monkeypatch.setattr("dalipipe.graphs.salvage.undecodable", lambda samples, **_: [None] * len(samples))
    images = sized_jpegs(8)
    images[6] = DAMAGED
    batches, recorder = _run(images, 2)
    assert batches[1].tensors["id"].tolist() == [4, 5, 7, 7]
    assert recorder.snapshot()["quarantined"] == 1


def test_policy_drop_makes_the_batch_shorter() -> None:
    """Bad at both depths of looking; good rows bit for bit as without it; `valid` stays in line with the rows."""
    good = sized_jpegs(10)
    clean, _ = _run(good, 3)
    images = [DAMAGED if i == 1 else CUT if i == 6 else data for i, data in enumerate(good)]
    source = open_memory(
        MemoryPrefetcher(images, 4, tail="pad"), quarantine=QuarantineConfig(policy="drop", max_fraction=1)
    )
    batches = [next(source) for _ in range(3)]
    source.close()
    assert [batch.tensors["id"].tolist() for batch in batches] == [[0, 2, 3], [4, 5, 7], [8, 9, 0]]
    assert [batch.tensors["label"].tolist() for batch in batches] == [[0, 2, 3], [4, 5, 7], [8, 9, 0]]
    assert batches[2].tensors["valid"].tolist() == [True, True, False]
    assert torch.equal(batches[0].tensors["image"], clean[0].tensors["image"][[0, 2, 3]])
    assert torch.equal(batches[1].tensors["image"], clean[1].tensors["image"][[0, 1, 3]])


@pytest.mark.parametrize("bad", [DAMAGED, CUT])
def test_a_batch_of_nothing_but_dropped_samples_is_empty(bad: bytes) -> None:
    """And the next one comes."""
    images = [*sized_jpegs(4), *[bad] * 4, *sized_jpegs(4)]
    batches, recorder = _run(images, 3, quarantine=QuarantineConfig(policy="drop", max_fraction=1))
    assert [batch.tensors["image"].shape for batch in batches] == [(4, 3, 32, 32), (0, 3, 32, 32), (4, 3, 32, 32)]
    assert recorder.snapshot()["quarantined"] == 4


def test_records_and_messages_say_where_the_sample_lies(tmp_path: Path) -> None:
    """Key, shard and offset in the file of the run and in the error; counted by kind."""
    images = sized_jpegs(8)
    images[2], images[5] = DAMAGED, b""
    recorder = Recorder()

    def origin(sample: int) -> Origin:
        return Origin(key=f"fox/{sample}", shard="00001.tar", offset=512 * sample)

    source = open_memory(MemoryPrefetcher(images, 8), recorder=recorder, run_dir=tmp_path, origin=origin)
    next(source)
    source.close()
    records = [json.loads(line) for line in (tmp_path / "quarantine.jsonl").read_text().splitlines()]
    assert [(r["id"], r["key"], r["shard"], r["offset"], r["kind"]) for r in records] == [
        (5, "fox/5", "00001.tar", 2560, "empty"),
        (2, "fox/2", "00001.tar", 1024, "damaged"),
    ]
    seen = recorder.snapshot()
    assert (seen["quarantined"], seen["quarantined.empty"], seen["quarantined.damaged"]) == (2, 1, 1)
    source = open_memory(MemoryPrefetcher(images, 8), quarantine=QuarantineConfig(policy="raise"), origin=origin)
    with pytest.raises(QuarantineError, match=r"sample 5, key fox/5 in 00001.tar at byte 2560, \(epoch 0, step 0\)"):
        next(source)
    source.close()


def test_only_the_first_bad_sample_that_nobody_suspected_costs_a_batch(caplog: pytest.LogCaptureFixture) -> None:
    """From there on each image is decoded on its own, which a bad one does not disturb; said once."""
    images = sized_jpegs(64)
    for i in range(1, 64, 8):
        images[i] = DAMAGED
    with caplog.at_level(logging.INFO, "dalipipe.graphs.source"):
        batches, recorder = _run(images, 16)
    assert [batch.tensors["id"][1] for batch in batches[::2]] == [i + 1 for i in range(1, 64, 8)]
    assert recorder.snapshot()["quarantined"] == 8
    assert [record.getMessage().count("each image is decoded on its own") for record in caplog.records] == [1]


@pytest.mark.parametrize("kernel", ["auto", "torch"])
@pytest.mark.parametrize("scale", ["off", "auto"])
@pytest.mark.parametrize("name", ["image_train", "image_eval", "image_raw"])
def test_a_window_that_follows_from_a_wrong_size_in_the_index_loses_no_good_sample(
    name: str, scale: str, kernel: str
) -> None:
    """The header has the last word, before and after the first bad sample, whoever decodes."""
    images = sized_jpegs(16)
    images[2] = DAMAGED
    keys = {"size": 32, "resize_shorter": 40, "num_threads": 2, "scale": (0.9, 1.0)}
    graph = GraphConfig(name=name, jpeg_scale=scale, resize_kernel=kernel, **keys)
    wrong = {1: (900, 1200), 5: (900, 1200), 14: (900, 1200)}
    source = open_memory(MemoryPrefetcher(images, 4, false_sizes=wrong), graph=graph)
    batches = [next(source) for _ in range(4)]
    source.close()
    clean, recorder = _run(images, 4, graph=graph)
    for batch, reference in zip(batches, clean, strict=True):
        assert batch.tensors["id"].tolist() == reference.tensors["id"].tolist()
        assert all(torch.equal(*pair) for pair in zip(batch.tensors["image"], reference.tensors["image"], strict=True))
    assert recorder.snapshot()["quarantined"] == 1


@pytest.mark.parametrize("policy", ["substitute", "drop"])
@pytest.mark.parametrize("scale", ["off", "auto"])
def test_a_run_that_starts_at_any_step_delivers_the_same(policy: str, scale: str) -> None:
    """What was met before, and by which decoder, leaves no trace: ids and pixels bit for bit, known or not."""
    images = [jpeg_bytes(i, height=240, width=300) for i in range(32)]
    for i, bad in {1: DAMAGED, 3: CUT, 9: DAMAGED, 10: DAMAGED, 11: b"", 22: DAMAGED, 31: DAMAGED}.items():
        images[i] = bad
    options = {
        "graph": GraphConfig(size=32, num_threads=2, jpeg_scale=scale),
        "quarantine": QuarantineConfig(policy=policy, max_fraction=1),
    }
    whole, _ = _run(images, 16, **options)
    for start in (1, 2, 5, 7):
        order = [*range(start * 4, 32)]
        source = open_memory(MemoryPrefetcher(images, 4, ids=lambda _, order=order: order), queue_depth=1, **options)
        rest = [next(source) for _ in range(8 - start)]
        source.close()
        for batch, reference in zip(rest, whole[start:8], strict=True):
            assert batch.tensors["id"].tolist() == reference.tensors["id"].tolist()
            assert batch.tensors["label"].tolist() == reference.tensors["label"].tolist()
            assert torch.equal(batch.tensors["image"], reference.tensors["image"])
    for first, second in zip(whole[:8], whole[8:], strict=True):  # all of them known
        assert first.tensors["id"].tolist() == second.tensors["id"].tolist()


def test_a_set_of_bad_samples_alone_gives_empty_batches_and_takes_no_more_steps_in() -> None:
    """From the second epoch on all are known, and no step has anything for a decoder."""
    prefetcher = MemoryPrefetcher([DAMAGED] * 8, 4)
    source = open_memory(prefetcher, quarantine=QuarantineConfig(policy="drop", max_fraction=1), queue_depth=3)
    for _ in range(8):
        assert next(source).tensors["image"].shape == (0, 3, 32, 32)
    assert prefetcher.num_calls < 8 + 6
    source.close()


@pytest.mark.parametrize("bad", [DAMAGED, CUT])
def test_a_step_that_stops_the_run_is_released_too(bad: bytes) -> None:
    """No view outlives the source, whichever stage raised."""
    prefetcher = MemoryPrefetcher([*sized_jpegs(6), bad, *sized_jpegs(9)], 4)
    source = open_memory(prefetcher, quarantine=QuarantineConfig(policy="raise"))
    with pytest.raises(QuarantineError):
        for _ in range(3):
            next(source)
    source.close()
    assert sorted(prefetcher.released) == [(0, step) for step in range(len(prefetcher.released))]
    assert len(prefetcher.released) == prefetcher.num_calls
