"""The private kernel and its public fallback are the same function, and close to PIL's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from dalipipe.graphs.resize import Kernel, Scale, best_kernel, resize_into, resize_private, resize_public
from tests.support.images import textured_image


@pytest.mark.parametrize("size", [(120, 160), (33, 224), (7, 5), (1, 1), (500, 375)])
def test_both_kernels_give_the_same_bits_within_one_level_of_pil(size: tuple[int, int]) -> None:
    """Up, down, along one side, and from a view with strides of a larger image."""
    picture = textured_image(5, height=size[0], width=size[1])
    image = torch.from_numpy(np.array(picture))
    outs = []
    for kernel in (resize_private, resize_public):
        batch = torch.zeros(3, 64, 48, 3, dtype=torch.uint8)
        resize_into(image, batch[1], None, kernel)
        assert not batch[0].any()
        assert not batch[2].any()
        outs.append(batch[1])
    assert torch.equal(outs[0], outs[1])
    wanted = np.asarray(picture.resize((48, 64), Image.Resampling.BILINEAR), np.int16)
    assert np.abs(outs[0].numpy().astype(np.int16) - wanted).max() <= 1


@settings(deadline=None, max_examples=40)
@given(side=st.integers(8, 400), target=st.integers(8, 300), part=st.floats(0.1, 1))
@example(side=40, target=40, part=0.5)
@example(side=101, target=100, part=1.0)
@example(side=387, target=194, part=0.332)
def test_the_upper_left_part_is_that_of_the_whole(side: int, target: int, part: float) -> None:
    """With the scale of the whole, as long as the filter finds its pixels. Both kernels give the same bits, within one
    level of the whole: the weights' fixed point follows the largest weight, which may lie outside the part."""
    image = torch.from_numpy(np.array(textured_image(side, height=side, width=side)))
    target = min(side, target)
    scale, kept = side / target, max(1, int(part * target))
    whole = torch.empty(target, target, 3, dtype=torch.uint8)
    resize_into(image, whole, (scale, scale))
    reach = min(side, int(np.ceil(scale * (kept + 0.5) + 0.5)))
    fast, slow = (torch.empty(kept, kept, 3, dtype=torch.uint8) for _ in range(2))
    resize_into(image[:reach, :reach].contiguous(), fast, (scale, scale), resize_private)
    resize_into(image[:reach, :reach].contiguous(), slow, (scale, scale), resize_public)
    assert torch.equal(fast, slow)
    assert (fast.int() - whole[:kept, :kept].int()).abs().max() <= 1


def test_equal_size_is_a_copy() -> None:
    """No filter runs over an image that has its size already."""
    image = torch.arange(4 * 5 * 3, dtype=torch.uint8).reshape(4, 5, 3)
    out = torch.zeros_like(image)
    resize_into(image, out)
    assert torch.equal(image, out)


def test_a_torch_without_the_private_kernel_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing overload and one that computes something else both lead to the public function."""

    def gone(image: torch.Tensor, out: torch.Tensor, scale: Scale) -> None:
        raise AttributeError("no such overload")

    def wrong(image: torch.Tensor, out: torch.Tensor, scale: Scale) -> None:
        out.zero_()

    for kernel in (gone, wrong):
        monkeypatch.setattr("dalipipe.graphs.resize.resize_private", kernel)
        best_kernel.cache_clear()
        chosen: Kernel = best_kernel()
        assert chosen is resize_public
    monkeypatch.undo()
    best_kernel.cache_clear()
    assert best_kernel() is resize_private
