"""The device tier over host memory: pixels, size classes, accounting, giving way; and the text of its kernel, compiled
for the CPU."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dalipipe.errors import ConfigError, PipelineError
from dalipipe.graphs.augment import RandAugmentConfig
from dalipipe.graphs.config import GraphConfig, QuarantineConfig
from dalipipe.graphs.crop import NUM_UNIFORMS, plan_windows
from dalipipe.graphs.device.arena import Arena, size_class
from dalipipe.graphs.device.kernel import (
    NAME,
    filter_weights,
    finish_on_host,
    make_table,
    normalisation,
    source,
    strides,
)
from dalipipe.graphs.device.memory import HostTwin
from dalipipe.graphs.device.tier import DeviceTier, check_graph, open_device_tier
from dalipipe.graphs.resize import resize_into
from dalipipe.telemetry import Recorder
from tests.unit.graphs.steps import MemoryPrefetcher, open_memory, png_bytes, sized_jpegs

NUM, BATCH = 16, 8
TRAIN = GraphConfig(size=32, num_threads=2, dtype="uint8")
EVAL = GraphConfig(name="image_eval", size=32, resize_shorter=40, num_threads=2, dtype="uint8")
PIECE = 200_000


def twin(graph: GraphConfig, budget: int = 10**7, **limits: int) -> tuple[DeviceTier, HostTwin, Recorder]:
    memory, recorder = HostTwin(graph, **limits), Recorder()
    return DeviceTier(memory, graph, budget, recorder, piece_bytes=PIECE), memory, recorder


def run(
    images: Sequence[bytes], graph: GraphConfig, num: int, tier: DeviceTier | None = None
) -> list[dict[str, torch.Tensor]]:
    opened = open_memory(
        MemoryPrefetcher(images, BATCH), graph=graph, quarantine=QuarantineConfig(max_fraction=1.0), tier=tier
    )
    try:
        return [next(opened).tensors for _ in range(num)]
    finally:
        opened.close()


def levels(one: list[dict[str, torch.Tensor]], other: list[dict[str, torch.Tensor]]) -> float:
    """The largest difference of pixels; ids must be equal."""
    assert all(torch.equal(a["id"], b["id"]) for a, b in zip(one, other, strict=True))
    return max(float((a["image"].float() - b["image"].float()).abs().max()) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("graph", [TRAIN, EVAL])
def test_batches_show_the_crops_of_the_cpu_path_within_a_level(graph: GraphConfig) -> None:
    """The same windows and flips: another filter, offset by a pixel, would be tens of levels away."""
    tier, _, recorder = twin(graph)
    images = sized_jpegs(NUM)
    found = run(images, graph, 6, tier)
    assert levels(found, run(images, graph, 6)) <= 1
    counts = recorder.snapshot()
    assert counts["samples_kept.device"] == tier.usage.num_samples == NUM
    assert counts["samples_hit.device"] >= 2 * NUM  # epochs 2 and 3
    assert counts["bytes_read.device"] >= 2 * tier.usage.images_bytes


def test_crop_indices_are_exact_where_nothing_is_resized() -> None:
    """At one source pixel per output pixel the batch is the crop itself, bit for bit, flips included."""
    random = np.random.default_rng(0)
    graph = GraphConfig(size=24, dtype="uint8", scale=[0.25, 0.25], ratio=[1.0, 1.0])
    image = random.integers(0, 256, (48, 48, 3), np.uint8)
    windows = plan_windows(graph, np.full((8, 2), 48, np.int32), random.random((8, NUM_UNIFORMS), np.float32))
    assert windows.mirror.any()
    assert not windows.mirror.all()
    flat = torch.from_numpy(image.reshape(-1))
    batch = finish_on_host([flat] * 8, make_table(windows, [48] * 8), graph)
    for row in range(8):
        (top, left), (height, width) = windows.start[row], windows.shape[row]
        assert (height, width) == (24, 24)
        crop = image[top : top + 24, left : left + 24]
        crop = crop[:, ::-1] if windows.mirror[row] else crop
        assert np.array_equal(batch[row].permute(1, 2, 0).numpy(), crop)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_normalised_batches_have_the_layout_and_values_of_the_cpu_path(layout: str, dtype: str) -> None:
    graph = GraphConfig(size=32, num_threads=2, dtype=dtype, layout=layout)
    images = sized_jpegs(BATCH)
    found, plain = run(images, graph, 2, twin(graph)[0]), run(images, graph, 2)
    for one, other in zip(found, plain, strict=True):
        assert one["image"].dtype == other["image"].dtype
        assert one["image"].stride() == other["image"].stride()
    assert levels(found, plain) <= 1.01 / min(graph.std) + 2e-3


def test_kept_or_not_the_batch_is_the_same_bit_for_bit() -> None:
    images = sized_jpegs(NUM)
    whole, none = twin(TRAIN)[0], twin(TRAIN, budget=0)[0]
    assert levels(run(images, TRAIN, 6, whole), run(images, TRAIN, 6, none)) == 0
    assert none.usage.pieces_bytes == 0


def test_bad_images_never_enter_and_are_replaced_as_on_the_cpu_path() -> None:
    images = sized_jpegs(NUM)
    images[3] = images[3][: len(images[3]) // 2]
    images[9] = png_bytes(9, damaged=True)
    tier, _, _ = twin(TRAIN)
    assert levels(run(images, TRAIN, 6, tier), run(images, TRAIN, 6)) <= 1
    assert tier.usage.num_samples == NUM - 2


@given(st.integers(1, 2**34))
def test_a_size_class_holds_its_images_and_wastes_less_than_a_quarter(num_bytes: int) -> None:
    slot = size_class(num_bytes)
    assert num_bytes <= slot
    assert slot <= max(4096, 1.25 * num_bytes + 1)
    assert size_class(slot) == slot


def test_odd_sizes_share_pieces_by_class_and_one_larger_than_a_piece_has_its_own() -> None:
    memory = HostTwin(TRAIN)
    arena = Arena(memory, 10**7, piece_bytes=PIECE)
    for i, (height, width) in enumerate([(50, 50), (49, 51), (333, 333), (1, 1), (3, 700)]):
        slot = arena.put(i, height, width)
        assert slot is not None
        slot.memory.fill_(i)
    assert arena.put(0, 50, 50) is None  # it is here
    assert arena.usage.num_samples == 5
    for i in range(5):
        slot = arena.find(i)
        assert slot is not None
        assert (slot.memory == i).all()
    # 50 x 50 and 49 x 51 are of one class, so four pieces.
    classes = {size_class(3 * height * width) for height, width in [(50, 50), (333, 333), (1, 1), (3, 700)]}
    assert arena.usage.pieces_bytes == sum(max(1, PIECE // one) * one for one in classes) == memory.taken_bytes


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(1, 300)), max_size=40), st.integers(0, 3 * 10**6))
def test_the_budget_is_never_passed_and_slots_never_overlap(sizes: list[tuple[int, int]], budget: int) -> None:
    arena = Arena(HostTwin(TRAIN), budget, piece_bytes=PIECE)
    kept = []
    for i, (height, width) in enumerate(sizes):
        slot = arena.put(i, height, width)
        if slot is not None:
            slot.memory.fill_(i)
            kept.append(i)
    usage = arena.usage
    assert usage.images_bytes <= usage.pieces_bytes <= budget
    assert usage.num_samples == len(kept)
    for i in kept:
        slot = arena.find(i)
        assert slot is not None
        assert (slot.memory == i).all()


def test_release_gives_memory_back_and_keeps_less_from_then_on_while_held_slots_stay_valid() -> None:
    tier, memory, recorder = twin(TRAIN)
    images = sized_jpegs(NUM)
    before = run(images, TRAIN, 2, tier)
    taken, budget = tier.usage.pieces_bytes, tier.budget_bytes
    assert taken == memory.taken_bytes > PIECE
    freed = tier.release(1)
    assert 0 < freed < taken
    assert tier.usage.pieces_bytes == taken - freed
    assert tier.budget_bytes == budget - freed
    assert tier.release() == taken - freed
    assert memory.num_given_back == recorder.snapshot()["device_gave_way"] == 2
    assert levels(run(images, TRAIN, 2, tier), before) == 0
    assert tier.usage.pieces_bytes <= tier.budget_bytes == budget - taken
    tier.close()
    assert tier.usage.pieces_bytes == 0


def test_pieces_are_dropped_in_the_middle_of_a_run_when_others_need_memory() -> None:
    tier, memory, recorder = twin(TRAIN, limit_bytes=10**7, short_bytes=9 * 10**6)
    images = sized_jpegs(NUM)
    plain = run(images, TRAIN, 8, twin(TRAIN, budget=0)[0])
    opened = open_memory(MemoryPrefetcher(images, BATCH), graph=TRAIN, tier=tier)
    try:
        found = [next(opened).tensors for _ in range(4)]
        assert tier.usage.num_samples == NUM
        memory.others_bytes = 9 * 10**6 - 1  # the model's need has grown
        found += [next(opened).tensors for _ in range(4)]
    finally:
        opened.close()
    assert levels(found, plain) == 0
    assert 0 < tier.usage.num_samples < NUM
    assert memory.taken_bytes < 10 * PIECE
    assert recorder.snapshot()["device_gave_way"] >= 4  # a piece at each step


def test_a_batch_that_finds_no_memory_takes_that_of_kept_images() -> None:
    tier, memory, recorder = twin(TRAIN, limit_bytes=10**7)
    images = sized_jpegs(NUM)
    opened = open_memory(MemoryPrefetcher(images, BATCH), graph=TRAIN, tier=tier)
    try:
        for _ in range(2):
            next(opened)
        memory.others_bytes = 10**7 - tier.usage.pieces_bytes + 1  # not seen to be short, and yet there is none
        batch = next(opened).tensors
    finally:
        opened.close()
    assert batch["image"].shape == (BATCH, 3, 32, 32)
    assert recorder.snapshot()["device_gave_way"] == 1


def test_an_allocation_that_fails_ends_the_growth_and_not_the_run() -> None:
    tier, memory, recorder = twin(TRAIN, limit_bytes=PIECE)
    images = sized_jpegs(NUM)
    assert levels(run(images, TRAIN, 6, tier), run(images, TRAIN, 6, twin(TRAIN, budget=0)[0])) == 0
    assert recorder.snapshot()["device_out_of_memory"] == 1
    assert tier.budget_bytes == tier.usage.pieces_bytes == memory.taken_bytes <= PIECE


def test_no_memory_for_a_batch_at_all_says_what_to_lower() -> None:
    tier, memory, _ = twin(TRAIN, limit_bytes=10**7)
    memory.others_bytes = 10**8
    with pytest.raises(PipelineError, match=r"no memory for a batch.*loader\.batch_size"):
        run(sized_jpegs(NUM), TRAIN, 1, tier)


def test_an_index_that_is_wrong_about_a_size_is_named() -> None:
    tier, _, _ = twin(TRAIN)
    prefetcher = MemoryPrefetcher(sized_jpegs(NUM), BATCH)
    prefetcher._sizes[2] += 1
    opened = open_memory(prefetcher, graph=TRAIN, tier=tier)
    with pytest.raises(PipelineError, match=r"sample 2 is .* pixels and its index says .*dalipipe verify"):
        next(opened)
    opened.close()


@pytest.mark.parametrize(
    ("graph", "words"),
    [
        (GraphConfig(name="image_raw"), "not image_raw"),
        (GraphConfig(jpeg_scale="auto"), "jpeg_scale=off"),
        (GraphConfig(rand_augment=RandAugmentConfig(num_ops=2)), r"without graph\.jitter"),
    ],
)
def test_graphs_that_the_kernel_does_not_do_are_refused(graph: GraphConfig, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"cache\.tiers\.device\.capacity .*{words}"):
        check_graph(graph)


def test_it_is_off_by_default_and_refused_without_a_gpu() -> None:
    assert open_device_tier(TRAIN, "cpu", 0, Recorder()) is None
    with pytest.raises(ConfigError, match=r"cache\.tiers\.device\.capacity=1G needs a GPU, and device=cpu"):
        open_device_tier(TRAIN, "cpu", "1G", Recorder())
    with pytest.raises(ConfigError, match=r"cache\.tiers\.device\.capacity"):
        open_device_tier(TRAIN, "cuda:0", "plenty", Recorder())


def test_cupy_is_not_imported_before_it_is_needed() -> None:
    assert "cupy" not in sys.modules


@given(st.integers(1, 40), st.integers(1, 90))
def test_the_filter_is_that_of_torchs_antialiased_resize(num: int, side: int) -> None:
    image = np.random.default_rng(side).integers(0, 256, (side, num, 3), np.uint8)
    out = torch.empty(num, num, 3, dtype=torch.uint8)
    resize_into(torch.from_numpy(image), out)
    mine = np.einsum("yi,ijc->yjc", filter_weights(num, 0, side / num, side), image.astype(np.float32))
    assert np.abs(np.floor(mine + 0.5) - out.numpy()).max() <= 1


def test_the_kernels_text_has_no_gaps() -> None:
    for dtype in ("float32", "float16", "uint8"):
        text = source(dtype)
        assert "@" not in text
        assert text.count("{") == text.count("}")
        assert NAME in text
        assert ("cuda_fp16" in text) == (dtype == "float16")


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs the CUDA compiler")
@pytest.mark.parametrize("dtype", ["float32", "float16", "uint8"])
def test_the_kernel_is_cuda(tmp_path: Path, dtype: str) -> None:
    text = tmp_path / "kernel.cu"
    text.write_text(source(dtype))
    subprocess.run(["nvcc", "-ptx", "-o", tmp_path / "kernel.ptx", text], check=True, timeout=100)
    assert f".entry {NAME}" in (tmp_path / "kernel.ptx").read_text()


_SHIM = """
#include <cmath>
struct Place { int x, y, z; };
static thread_local Place blockIdx, blockDim, threadIdx;
#define __device__
#define __global__
%s
extern "C" void launch(const unsigned long long* images, const int* windows, const float* factors, %s* out, int num,
    int size, long long plane, long long row, long long column, const float* mean, const float* inverse) {
  blockDim = {1, 1, 1};
  threadIdx = {0, 0, 0};
  for (int n = 0; n < num; ++n) for (int y = 0; y < size; ++y) for (int x = 0; x < size; ++x) {
    blockIdx = {x, y, n};
    dalipipe_finish(images, windows, factors, out, num, size, plane, row, column,
        mean[0], mean[1], mean[2], inverse[0], inverse[1], inverse[2]);
  }
}
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(("dtype", "layout"), [("float32", "NCHW"), ("uint8", "NHWC")])
@pytest.mark.parametrize("name", ["image_train", "image_eval"])
def test_the_kernels_own_text_compiled_for_the_cpu_is_its_twin(
    tmp_path: Path, dtype: str, layout: str, name: str
) -> None:
    graph = GraphConfig(name=name, size=19, resize_shorter=23, dtype=dtype, layout=layout)
    random = np.random.default_rng(1)
    sizes = random.integers(8, 90, (12, 2)).astype(np.int32)
    images = [torch.from_numpy(random.integers(0, 256, 3 * h * w, np.uint8)) for h, w in sizes.tolist()]
    windows = plan_windows(graph, sizes, random.random((12, NUM_UNIFORMS), np.float32))
    table = make_table(windows, sizes[:, 1].tolist())
    wanted = finish_on_host(images, table, graph)

    text = tmp_path / "kernel.cpp"
    text.write_text(_SHIM % (source(dtype), {"float32": "float", "uint8": "unsigned char"}[dtype]))
    subprocess.run(["g++", "-O1", "-shared", "-fPIC", "-o", tmp_path / "kernel.so", text], check=True, timeout=60)
    launch = ctypes.CDLL(str(tmp_path / "kernel.so")).launch
    out = torch.zeros_like(wanted)
    pointers = np.array([image.data_ptr() for image in images], np.uint64)
    mean, inverse = (np.asarray(values, np.float32) for values in normalisation(graph))
    address = ctypes.c_void_p
    launch(
        address(pointers.ctypes.data),
        address(table.windows.ctypes.data),
        address(table.factors.ctypes.data),
        address(out.data_ptr()),
        *(ctypes.c_int(value) for value in (len(images), graph.size)),
        *(ctypes.c_longlong(value) for value in strides(graph)),
        address(mean.ctypes.data),
        address(inverse.ctypes.data),
    )
    # Sums are taken in another order: a value that lies between two levels may fall to either.
    assert (out.float() - wanted.float()).abs().max() <= 1.001 * inverse.max()
    assert ((out.float() - wanted.float()).abs() > 1e-4).float().mean() < 0.01
