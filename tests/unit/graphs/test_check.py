"""Bad images are found by decoding, bombs by their header, and good ones are never blamed."""

from __future__ import annotations

import resource
import subprocess
import sys

import numpy as np
import pytest

from dalipipe.graphs.check import suspicion, undecodable
from tests.support.images import jpeg_bytes
from tests.unit.graphs.steps import flat_bytes, png_bytes

GOOD = jpeg_bytes(1)


def test_each_sample_gets_its_own_verdict() -> None:
    """Bad ones between good ones, arrays and bytes alike."""
    samples = [GOOD, GOOD[: len(GOOD) // 2], b"", np.frombuffer(GOOD, np.uint8), b"<html>no</html>", GOOD[:-2]]
    samples += [png_bytes(2), png_bytes(2, damaged=True), GOOD + b"trailing", bytes(500), GOOD[:100]]
    reasons = undecodable(samples)
    assert [reason is None for reason in reasons] == [
        True, False, False, True, False, False, True, False, True, False, False,
    ]  # fmt: skip
    assert reasons[2] == "empty (0 bytes)"


def test_no_samples() -> None:
    """Nothing in, nothing out."""
    assert undecodable([]) == []


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_a_bomb_is_refused_by_its_header(kind: str) -> None:
    """20,000 x 20,000 pixels would take gigabytes; refusing them takes none."""
    bomb = flat_bytes(kind, 20_000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    reasons = undecodable([GOOD, bomb], max_pixels=2**28)
    assert reasons[0] is None
    assert "20000 x 20000 pixels" in str(reasons[1])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000


def test_many_samples_are_decoded_in_small_chunks() -> None:
    """Verdicts stay with their samples over chunk borders."""
    samples = [GOOD if i % 7 else GOOD[:-40] for i in range(100)]
    assert [reason is not None for reason in undecodable(samples)] == [i % 7 == 0 for i in range(100)]


@pytest.mark.parametrize(
    ("data", "looks_bad"),
    [(GOOD, False), (GOOD[:-1], True), (GOOD + b"x", True), (png_bytes(1), False), (png_bytes(1)[:-3], True),
     (b"", True), (b"RIFF\xff\xff\x00\x00WEBPVP8 ", True), (b"text", True), (b"BM" + bytes(60), False)],
)  # fmt: skip
def test_suspicion_looks_at_both_ends(data: bytes, looks_bad: bool) -> None:
    """Cheap, and allowed to be wrong: suspects are decoded."""
    assert (suspicion(np.frombuffer(data, np.uint8)) is not None) is looks_bad


def test_importing_the_decoder_prints_nothing_and_works_in_a_fresh_process() -> None:
    """Packing workers are spawned, and stdout belongs to `--json`."""
    code = (
        "import sys; from dalipipe.graphs.check import undecodable; assert 'torch' not in sys.modules;"
        "assert undecodable([sys.stdin.buffer.read()]) == [None]"
    )
    done = subprocess.run([sys.executable, "-c", code], input=GOOD, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
