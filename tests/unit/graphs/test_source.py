"""Batches over real JPEGs: right pixels, the same bits everywhere, buffers of their own."""

from __future__ import annotations

import gc
import io
import itertools
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from dalipipe.errors import ClosedError, ConfigError, CorruptSampleError, PipelineTimeoutError
from dalipipe.graphs.augment import JitterConfig
from dalipipe.graphs.config import GraphConfig, QuarantineConfig
from dalipipe.graphs.contract import Batch, BatchSource
from dalipipe.graphs.crop import NUM_UNIFORMS, plan_windows
from dalipipe.graphs.native import load_native
from dalipipe.order.hashing import uniforms
from dalipipe.order.step import Step
from dalipipe.telemetry import Recorder
from tests.contracts.source import BatchSourceContract
from tests.support.host import within
from tests.support.images import jpeg_bytes
from tests.support.waiting import wait_until
from tests.unit.graphs.steps import MemoryPrefetcher, open_memory, png_bytes, sized_jpegs

SEED = 3


class TestLocalSource(BatchSourceContract):
    """The contract over a graph on the CPU."""

    def make_source(self) -> BatchSource:
        return open_memory(MemoryPrefetcher(sized_jpegs(24), 6), seed=SEED)


def _take(source: BatchSource, num: int) -> list[Batch]:
    try:
        return [next(source) for _ in range(num)]
    finally:
        source.close()


def _upright(data: bytes) -> Image.Image:
    return ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")


def _odd_images() -> list[bytes]:
    images = [jpeg_bytes(i, height=101 + i, width=160 - 3 * i, orientation=1 + i % 8) for i in range(8)]
    images += [png_bytes(3), jpeg_bytes(9, height=33, width=300), jpeg_bytes(10, height=400, width=20)]
    images += [jpeg_bytes(11, height=1, width=1)]
    return images


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("sizes_known", [True, False])
def test_train_pixels_are_pils_within_one_level(layout: str, sizes_known: bool) -> None:
    """Crop in upright coordinates, resize, flip: for all EXIF orientations, PNG, lines and a single pixel."""
    images = _odd_images()
    graph = GraphConfig(size=48, dtype="uint8", layout=layout, num_threads=2)
    [batch] = _take(open_memory(MemoryPrefetcher(images, 12, sizes_known=sizes_known), graph=graph), 1)
    pixels = batch.tensors["image"]
    assert pixels.shape == (12, 3, 48, 48)
    assert pixels.is_contiguous(memory_format=torch.channels_last if layout == "NHWC" else torch.contiguous_format)
    pictures = [_upright(data) for data in images]
    sizes = np.array([(picture.height, picture.width) for picture in pictures], np.int32)
    windows = plan_windows(graph, sizes, uniforms(SEED, 0, np.arange(12), NUM_UNIFORMS))
    assert 0 < windows.mirror.sum() < 12
    for i, picture in enumerate(pictures):
        (top, left), (height, width) = windows.start[i].tolist(), windows.shape[i].tolist()
        wanted = picture.crop((left, top, left + width, top + height)).resize((48, 48), Image.Resampling.BILINEAR)
        wanted = ImageOps.mirror(wanted) if windows.mirror[i] else wanted
        got = pixels[i].permute(1, 2, 0).numpy().astype(np.int16)
        assert np.abs(got - np.asarray(wanted, np.int16)).max() <= 1, f"image {i}"


@pytest.mark.parametrize("shorter", [48, 60, 100, 102, 110])
def test_eval_pixels_are_pils_within_one_level(shorter: int) -> None:
    """Centre 48 of a short side that shrinks, grows, grows by a pixel, or stays."""
    images = [data for data in _odd_images() if max(_upright(data).size) < 16 * min(_upright(data).size)]
    graph = GraphConfig(name="image_eval", size=48, resize_shorter=shorter, dtype="uint8", num_threads=2)
    [batch] = _take(open_memory(MemoryPrefetcher(images, len(images)), graph=graph), 1)
    for i, data in enumerate(images):
        picture = _upright(data)
        short = min(picture.size)
        width, height = (side * shorter // short for side in picture.size)
        left, top = round((width - 48) / 2), round((height - 48) / 2)
        wanted = picture.resize((width, height), Image.Resampling.BILINEAR).crop((left, top, left + 48, top + 48))
        got = batch.tensors["image"][i].permute(1, 2, 0).numpy().astype(np.int16)
        assert np.abs(got - np.asarray(wanted, np.int16)).max() <= 1, f"image {i}"


def test_raw_images_are_pils_exactly() -> None:
    """Each in its own size, all orientations upright."""
    images = _odd_images()
    [batch] = _take(open_memory(MemoryPrefetcher(images, 12), graph=GraphConfig(name="image_raw", num_threads=2)), 1)
    for one, data in zip(batch.tensors["image"], images, strict=True):
        assert np.array_equal(one.numpy(), np.asarray(_upright(data)))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_normalised_batches_are_the_uint8_ones_shifted_and_scaled(dtype: str, layout: str) -> None:
    """(x - mean) / std a channel."""
    images = sized_jpegs(6)
    plain = GraphConfig(size=32, dtype="uint8", num_threads=1)
    [raw] = _take(open_memory(MemoryPrefetcher(images, 6), graph=plain), 1)
    graph = GraphConfig(size=32, dtype=dtype, layout=layout, num_threads=1)
    [batch] = _take(open_memory(MemoryPrefetcher(images, 6), graph=graph), 1)
    mean, std = torch.tensor(graph.mean).view(3, 1, 1), torch.tensor(graph.std).view(3, 1, 1)
    assert str(batch.tensors["image"].dtype) == f"torch.{dtype}"
    wanted = (raw.tensors["image"].float() - mean) / std
    assert torch.allclose(batch.tensors["image"].float(), wanted, atol=2e-3 if dtype == "float16" else 1e-5)


def _by_id(batches: list[Batch]) -> dict[tuple[int, int], torch.Tensor]:
    return {
        (batch.epoch, int(sample_id)): image
        for batch in batches
        for sample_id, image in zip(batch.tensors["id"], batch.tensors["image"], strict=True)
    }


def test_a_sample_looks_the_same_wherever_it_sits() -> None:
    """Bit for bit at any batch size, place, depth and number of threads; different in another epoch."""
    images = sized_jpegs(24)
    shuffled = np.random.Generator(np.random.Philox(1)).permutation(24).tolist()
    reference = _by_id(_take(open_memory(MemoryPrefetcher(images, 24), queue_depth=1), 2))
    for batch_size, depth, threads in [(6, 1, 1), (8, 2, 2), (5, 4, 3), (1, 2, 1)]:
        prefetcher = MemoryPrefetcher(images, batch_size, ids=lambda epoch: shuffled, tail="partial")
        graph = GraphConfig(size=32, num_threads=threads)
        num = 2 * -(-24 // batch_size)
        got = _by_id(_take(open_memory(prefetcher, graph=graph, queue_depth=depth), num))
        assert got.keys() == reference.keys()
        assert all(torch.equal(image, reference[key]) for key, image in got.items())
    assert sum(torch.equal(reference[0, i], reference[1, i]) for i in range(24)) == 0


def test_held_batches_are_never_written_again() -> None:
    """Buffers belong to the caller, whatever runs later."""
    images = sized_jpegs(12)
    source = open_memory(MemoryPrefetcher(images, 4))
    held = []
    for _ in range(30):
        image = next(source).tensors["image"]
        held.append((image, image.clone()))
    source.close()
    del source
    gc.collect()
    assert all(torch.equal(image, copy) for image, copy in held)
    assert len({image.data_ptr() for image, _ in held}) == len(held)


@pytest.mark.parametrize(("tail", "last"), [("partial", 4), ("pad", 10)])
def test_short_last_batches(tail: str, last: int) -> None:
    """Partial is shorter, pad repeats and says so; both epochs alike."""
    batches = _take(open_memory(MemoryPrefetcher(sized_jpegs(24), 10, tail=tail)), 6)
    assert [len(batch.tensors["image"]) for batch in batches] == [10, 10, last] * 2
    assert [(batch.epoch, batch.step) for batch in batches] == [(e, s) for e in range(2) for s in range(3)]
    for batch in batches:
        padded = tail == "pad" and batch.step == 2
        assert ("valid" in batch.tensors) is padded
        if padded:
            assert batch.tensors["valid"].tolist() == [True] * 4 + [False] * 6


def test_a_rank_without_samples_gets_an_empty_batch_in_its_place() -> None:
    """The short last step may leave a rank with nothing."""
    source = open_memory(_EmptySecondStep(sized_jpegs(12), 4), queue_depth=2)
    batches = _take(source, 4)
    assert [len(batch.tensors["id"]) for batch in batches] == [4, 0, 4, 4]
    assert batches[1].tensors["image"].shape == (0, 3, 32, 32)
    assert batches[1].tensors["label"].shape == (0,)


class _EmptySecondStep(MemoryPrefetcher):
    def next(self) -> Step:
        if self.num_calls != 1:
            return super().next()
        self.num_calls += 1
        return self._step(0, 99, np.empty(0, np.int64), 0)


def test_bytes_come_with_offsets() -> None:
    """Text and JSON stay bytes: views of one tensor."""
    texts = [b"caption %d" % i * (i % 3) for i in range(8)]
    prefetcher = MemoryPrefetcher(sized_jpegs(8), 8, fields={"text": texts})
    [batch] = _take(open_memory(prefetcher, fields=["image", "text"]), 1)
    data, offsets = batch.tensors["text"], batch.tensors["text_offsets"].tolist()
    assert [bytes(data[a:b].tolist()) for a, b in itertools.pairwise(offsets)] == texts
    assert "label" not in batch.tensors


def test_a_label_that_is_no_integer_names_its_sample() -> None:
    """And the batches before it arrive."""
    labels = [b"1"] * 7 + [b"cat"]
    source = open_memory(MemoryPrefetcher(sized_jpegs(8), 4, fields={"label": labels}))
    next(source)
    with pytest.raises(CorruptSampleError, match=r"label of sample 7 is b'cat'"):
        next(source)
    source.close()


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_errors_of_the_prefetcher_pass_through_and_the_next_call_goes_on(depth: int) -> None:
    """The same object, nothing lost: a wait that timed out can be tried again."""
    error = PipelineTimeoutError("block 7 did not arrive")
    prefetcher = MemoryPrefetcher(sized_jpegs(12), 2, fail_at={5: error})
    source = open_memory(prefetcher, queue_depth=depth)
    seen: list[int] = []
    raised: list[tuple[int, PipelineTimeoutError]] = []
    for _ in range(7):
        try:
            seen.append(next(source).step)
        except PipelineTimeoutError as caught:
            raised.append((len(seen), caught))
    source.close()
    # What is decoded when the step is missed comes first; what DALI still decodes comes after.
    assert raised == [(6 - depth, error)]
    assert seen == list(range(6))


def test_steps_are_released_in_order_once_and_all() -> None:
    """A few batches late at most, all of them by close."""
    prefetcher = MemoryPrefetcher(sized_jpegs(12), 3)
    source = open_memory(prefetcher, queue_depth=2)
    for _ in range(10):
        next(source)
    assert len(prefetcher.released) >= 8
    source.close()
    assert len(prefetcher.released) == len(set(prefetcher.released)) == prefetcher.num_calls
    assert prefetcher.released == sorted(prefetcher.released)
    assert prefetcher.closed


def test_every_stage_is_timed() -> None:
    """The ledger sees decode, resize, normalise (in the resize where our own kernel does both) and hand-over."""
    for kernel in ("torch", "auto"):
        recorder = Recorder()
        graph = GraphConfig(size=32, num_threads=2, resize_kernel=kernel)
        _take(open_memory(MemoryPrefetcher(sized_jpegs(8), 4), graph=graph, recorder=recorder), 3)
        seen = recorder.snapshot()
        assert all(seen[f"stage_s.{stage}"] > 0 for stage in ("decode", "resize", "handover"))
        resized = {name for name in seen if name.startswith("resized.")}
        assert len(resized) == 1
        assert ("stage_s.normalize" in seen) == (resized == {"resized.torch"})
    assert "stage_s.salvage" not in seen


@pytest.mark.parametrize(
    ("graph", "fields", "message"),
    [
        (GraphConfig(name="image_trian"), ["image"], "graph.name='image_trian' is not one of image_train"),
        (GraphConfig(dtype="bf16"), ["image"], "graph.dtype='bf16' is not one of float32"),
        (GraphConfig(layout="NWHC"), ["image"], "graph.layout"),
        (GraphConfig(scale=[0.5, 0.1]), ["image"], "graph.scale"),
        (GraphConfig(std=[0.0, 1, 1]), ["image"], "graph.std"),
        (GraphConfig(name="image_eval", size=300), ["image"], "graph.resize_shorter=256 must be at least"),
        (GraphConfig(), ["label"], "data.fields"),
    ],
)
def test_what_can_never_work_is_refused_at_once(graph: GraphConfig, fields: list[str], message: str) -> None:
    """Before any thread starts, naming the key."""
    with pytest.raises(ConfigError, match=message):
        open_memory(MemoryPrefetcher(sized_jpegs(1), 1), graph=graph, fields=fields)


def test_other_refusals() -> None:
    """Depth, policy and a field that the samples lack."""
    prefetcher = MemoryPrefetcher(sized_jpegs(2), 1)
    with pytest.raises(ConfigError, match="queue_depth"):
        open_memory(prefetcher, queue_depth=0)
    with pytest.raises(ConfigError, match="policy"):
        open_memory(prefetcher, quarantine=QuarantineConfig(policy="ignore"))
    source = open_memory(prefetcher, fields=["image", "json"])
    with pytest.raises(ConfigError, match="json"):
        next(source)
    source.close()


def _native_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def test_closing_frees_the_threads_of_dali_too() -> None:
    """Pipelines are gone at once, not at the next garbage collection."""
    images = sized_jpegs(6)
    images[1] = png_bytes(1, damaged=True)  # a salvage pipeline as well
    _take(open_memory(MemoryPrefetcher(images, 6)), 2)
    before = _native_threads()
    gc.disable()
    try:
        for _ in range(3):
            _take(open_memory(MemoryPrefetcher(images, 6)), 2)
        # A thread that was joined is on its way out of the kernel for some milliseconds more.
        wait_until(lambda: _native_threads() <= before, lambda: f"{_native_threads()} <= {before} threads", timeout_s=5)
    finally:
        gc.enable()


class _Stuck(MemoryPrefetcher):
    def __init__(self, images: list[bytes], batch_size: int) -> None:
        super().__init__(images, batch_size)
        self.waiting, self._woken = threading.Event(), threading.Event()

    def next(self) -> Step:
        if self.num_calls == 5:
            self.waiting.set()
            assert self._woken.wait(20)
        return super().next()

    def close(self) -> None:
        super().close()
        self._woken.set()


def test_close_ends_a_wait_of_another_thread() -> None:
    """The loader's feeder waits in `next` while the trainer closes."""
    prefetcher = _Stuck(sized_jpegs(12), 2)
    source = open_memory(prefetcher)
    caught: list[BaseException] = []

    def feed() -> None:
        try:
            for _ in source:
                pass
        except ClosedError as error:
            caught.append(error)

    thread = threading.Thread(target=feed)
    thread.start()
    assert prefetcher.waiting.wait(20)
    with within(2):
        source.close()
    thread.join(60)
    assert not thread.is_alive()
    assert len(caught) == 1


@pytest.mark.parametrize("after_s", [0.0, 0.005, 0.02, 0.05])
def test_close_at_any_moment_ends_the_feeder_with_a_closed_error(after_s: float) -> None:
    """Also in the middle of a resize."""
    images = [jpeg_bytes(i, height=400, width=600) for i in range(8)] * 4
    source = open_memory(MemoryPrefetcher(images, 16), graph=GraphConfig(num_threads=2))
    first = threading.Event()
    caught: list[BaseException] = []

    def feed() -> None:
        try:
            for _ in source:
                first.set()
        except BaseException as error:  # noqa: BLE001 - judged below
            caught.append(error)

    thread = threading.Thread(target=feed)
    thread.start()
    assert first.wait(20)
    time.sleep(after_s)
    source.close()
    thread.join(60)
    assert [type(error) for error in caught] == [ClosedError]


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "uint8"])
def test_both_resize_kernels_give_the_same_batches(dtype: str, layout: str) -> None:
    """Training bit for bit, with colour operators behind the resize too; evaluation, whose middle ours takes at
    fractions of a pixel, within one level."""
    if load_native() is None:
        pytest.skip("the native kernel was not built")
    made: dict[str, list[torch.Tensor]] = {}
    for kernel in ("native", "torch"):
        keys = {"size": 32, "num_threads": 2, "dtype": dtype, "layout": layout, "resize_kernel": kernel}
        graphs = (
            GraphConfig(**keys),
            GraphConfig(**keys, jitter=JitterConfig(brightness=0.4, hue=0.1)),
            GraphConfig(**keys, name="image_eval", resize_shorter=40),
        )
        made[kernel] = [
            _take(open_memory(MemoryPrefetcher(sized_jpegs(8), 8), graph=graph), 1)[0].tensors["image"]
            for graph in graphs
        ]
    *training, (ours, others) = zip(made["native"], made["torch"], strict=True)
    for one, other in training:
        assert torch.equal(one, other)
        assert one.stride() == other.stride()
    level = 1 if dtype == "uint8" else 1.01 / 57
    assert ours.dtype == others.dtype
    assert (ours.float() - others.float()).abs().max() <= level
