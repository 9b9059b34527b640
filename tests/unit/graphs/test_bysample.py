"""Each image on its own: DALI's bits, and a gap where an image is bad."""

from __future__ import annotations

import io
import threading
import weakref
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from dalipipe.graphs.bysample import SampleLane
from dalipipe.graphs.config import GraphConfig
from dalipipe.graphs.lane import Lane
from tests.support.images import jpeg_bytes
from tests.unit.graphs.steps import png_bytes
from tests.unit.graphs.test_odd_images import BAD, GOOD

THREADS = "dalipipe-decode"


def _windows(images: list[bytes]) -> dict[str, Any]:
    """Random windows of images, whose corners reach the borders now and then."""
    random = np.random.Generator(np.random.Philox(4))
    start, shape = [], []
    for data in images:
        sides = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).size[::-1]
        begin = [int(random.integers(0, side)) for side in sides]
        start.append(begin)
        shape.append([int(random.integers(1, side - first + 1)) for side, first in zip(sides, begin, strict=True)])
    views = [np.frombuffer(data, np.uint8) for data in images]
    return {"image": views, "start": np.array(start, np.int32), "shape": np.array(shape, np.int32)}


@pytest.mark.parametrize("name", ["image_train", "image_raw"])
def test_every_kind_of_file_gives_the_bits_of_dalis_operator(name: str) -> None:
    """Windows of all formats, samplings and orientations, and whole images."""
    inputs = _windows([make() for make in GOOD.values()])
    together = Lane(GraphConfig(name=name), "cpu", num_threads=2, queue_depth=1, device_id=None)
    together.push(inputs)
    wanted = together.run()["image"]
    lane = SampleLane(windowed=name != "image_raw", num_threads=2, queue_depth=1)
    lane.push(inputs)
    got, again = lane.run()["image"], lane.decode(inputs)
    for place, kind in enumerate(GOOD):
        assert np.array_equal(got[place], np.asarray(wanted[place])), kind
        assert np.array_equal(got[place], again[place]), kind
    lane.close()
    together.close()


def test_bad_images_are_gaps_and_batches_keep_their_order() -> None:
    """Whatever is wrong with them; a window outside is one too."""
    lane = SampleLane(windowed=True, num_threads=2, queue_depth=2)
    assert lane.num_missing == 2
    good = [jpeg_bytes(i) for i in range(5)]
    for shift in range(3):
        inputs = _windows(good[shift:] + good[:shift])
        inputs["image"][shift] = np.frombuffer(png_bytes(3, damaged=True), np.uint8)
        inputs["start"][shift] = 0, 0
        inputs["shape"][4 - shift] = 9999, 9999
        lane.push(inputs)
    assert lane.num_missing == 0
    for shift in range(3):
        gaps = {place for place, pixels in enumerate(lane.run()["image"]) if pixels is None}
        assert gaps == {shift, 4 - shift}
    lane.close()
    whole = SampleLane(windowed=False, num_threads=1, queue_depth=1)
    assert whole.decode({"image": [np.frombuffer(make(), np.uint8) for make in BAD.values()][:5]}) == [None] * 5
    whole.close()


def test_views_are_let_go_and_threads_end() -> None:
    """Of batches that were asked for, and of those that nobody waits for any more."""
    lane = SampleLane(windowed=True, num_threads=2, queue_depth=3)
    lent = []
    for _ in range(3):
        inputs = _windows([jpeg_bytes(i) for i in range(8)])
        inputs["image"] = [image.view() for image in inputs["image"]]
        lent += [weakref.ref(image) for image in inputs["image"]]
        lane.push(inputs)
    del inputs
    lane.run()
    assert [view() is None for view in lent[:8]] == [True] * 8
    assert any(thread.name.startswith(THREADS) for thread in threading.enumerate())
    lane.close()
    lane.close()
    assert [view() is None for view in lent] == [True] * 24
    assert not any(thread.name.startswith(THREADS) for thread in threading.enumerate())
