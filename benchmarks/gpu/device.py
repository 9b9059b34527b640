"""The device tier: are its batches right, does it give memory back, and what does a kept image cost?"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.gpu.kit import Kit, rate, source, synchronise
from dalipipe.graphs.config import GraphConfig
from dalipipe.graphs.device.memory import HostTwin
from dalipipe.graphs.device.tier import DeviceTier, open_device_tier
from dalipipe.telemetry import Recorder

Result = dict[str, Any]
# nvJPEG and the CPU's decoder differ by little on the whole, and on single pixels by more.
_MEAN_LEVELS = 2.0
_BUDGET_BYTES = 4 * 2**30


def device_tier(kit: Kit) -> Result:
    """Batches of kept images against the CPU path; memory that goes back; images a second, kept against decoded.

    Without a card the twin over host memory takes its place, which says nothing about speed.
    """
    graph = GraphConfig(dtype="uint8", num_threads=kit.threads)
    recorder = Recorder()
    tier = _open(kit, graph, recorder)
    num = max(1, len(kit.images) // kit.batch_size)
    try:
        with source(kit, kit.images, graph, device="cpu") as batches:
            plain = [next(batches).tensors for _ in range(2 * num)]
        with source(kit, kit.images, graph, tier=tier) as batches:
            found = [next(batches).tensors for _ in range(2 * num)]
            worst = max(_levels(one, other) for one, other in zip(found, plain, strict=True))
            usage = tier.usage
            result: Result = {
                "mean_levels_at_worst": round(worst, 3),
                "kept_images": usage.num_samples,
                "kept_bytes": usage.images_bytes,
                "pieces_bytes": usage.pieces_bytes,
                "found": int(recorder.snapshot().get("samples_hit.device", 0)),
            }
            if kit.on_gpu:
                result["kept_images_per_s"] = round(rate(kit, lambda: len(next(batches).tensors["id"])))
        if kit.on_gpu:
            with source(kit, kit.images, graph) as batches:
                result["decoded_images_per_s"] = round(rate(kit, lambda: len(next(batches).tensors["id"])))
        result["freed_bytes"] = tier.release()
        synchronise(kit)
    finally:
        tier.close()
    is_right = worst <= _MEAN_LEVELS and result["found"] > 0 and result["freed_bytes"] == usage.pieces_bytes
    return {"ok": is_right, **result}


def _open(kit: Kit, graph: GraphConfig, recorder: Recorder) -> DeviceTier:
    if not kit.on_gpu:
        return DeviceTier(HostTwin(graph), graph, _BUDGET_BYTES, recorder)
    tier = open_device_tier(graph, kit.device, _BUDGET_BYTES, recorder)
    assert tier is not None
    return tier


def _levels(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The mean difference of pixels, in levels of 255; infinite where the samples are others."""
    if not torch.equal(one["id"].cpu(), other["id"]):
        return float("inf")
    return float((one["image"].cpu().float() - other["image"].float()).abs().mean())
