"""Is it right? Pixels against the CPU path, bad images, pointers, and the tests that are marked `gpu`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch
from torch.utils.dlpack import from_dlpack

from benchmarks.gpu.kit import Kit, source, synchronise
from dalipipe.graphs.config import GraphConfig, QuarantineConfig
from dalipipe.graphs.intake import IntakeDesk
from dalipipe.graphs.lane import Lane
from dalipipe.graphs.quarantine import Quarantine
from dalipipe.telemetry import Recorder
from tests.unit.graphs.steps import MemoryPrefetcher, png_bytes

Result = dict[str, Any]
_ROOT = Path(__file__).resolve().parents[2]
_TEST_TIMEOUT_S = 150.0
# DALI's own resize differs from PIL's, which the CPU path follows, by 18 levels at most and 55 dB on photographs; a
# wrong window or flip is at 10 to 20 dB.
_LOW_PSNR_DB = 30.0


def gpu_tests(kit: Kit) -> Result:
    """Runs every test marked `gpu`; on a card none may be skipped."""
    report = kit.out / "gpu-tests.xml"
    # Only their files: the others import what a bare host need not have.
    files = sorted(str(path) for path in (_ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text())
    words = [sys.executable, "-m", "pytest", "-c", str(_ROOT / "benchmarks/gpu/pytest.ini"), "--rootdir", str(_ROOT)]
    words += ["-q", "-m", "gpu", f"--junit-xml={report}", *files]
    timeout_s = min(_TEST_TIMEOUT_S, max(10.0, kit.left_s()))
    try:
        done = subprocess.run(
            words, check=False, cwd=_ROOT, capture_output=True, text=True, timeout=timeout_s, env=os.environ.copy()
        )
    except subprocess.TimeoutExpired:
        return {"ok": False, "why": f"the tests took more than {timeout_s:.0f} s"}
    if not report.is_file():
        return {"ok": False, "why": f"pytest wrote no report: {done.stdout[-800:]}{done.stderr[-800:]}"}
    return judge_tests(report, on_gpu=kit.on_gpu)


def judge_tests(report: Path, *, on_gpu: bool) -> Result:
    """What a JUnit file says. With a card: at least one test ran, all passed, none was skipped."""
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    bad = [_name(case) for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [_name(case) for case in cases if case.find("skipped") is not None]
    result: Result = {"tests": len(cases), "failed": bad, "skipped": skipped}
    if bad:
        return result | {"ok": False, "why": f"failed: {', '.join(bad)}"}
    if not on_gpu:
        return result | {"ok": None, "why": f"{len(skipped)} of {len(cases)} tests wait for a card"}
    if not cases or skipped:
        return result | {"ok": False, "why": f"{len(skipped)} of {len(cases)} tests were skipped on a card"}
    return result | {"ok": True}


def pixels(kit: Kit) -> Result:
    """The GPU's graph against the CPU path: the same ids and labels, each image close enough to be the same crop."""
    result: Result = {"ok": True}
    for name in ("image_train", "image_eval"):
        graph = GraphConfig(name=name, dtype="uint8", num_threads=kit.threads)
        num = max(1, len(kit.images) // kit.batch_size)
        fused, plain = _fused(kit, graph, num), _tensors(kit, kit.images, graph, num, device="cpu")
        other = _tensors(kit, kit.images, graph, 1, device="cpu", seed=4)
        same = all(
            torch.equal(a["id"].cpu(), b["id"]) and torch.equal(a["label"].cpu(), b["label"])
            for a, b in zip(fused, plain, strict=True)
        )
        values = torch.cat([_psnr(a["image"], b["image"]) for a, b in zip(fused, plain, strict=True)])
        control = _psnr(fused[0]["image"], other[0]["image"])
        result[name] = {
            "images": len(values),
            "same_ids_and_labels": same,
            "psnr_min_db": round(float(values.min()), 1),
            "psnr_median_db": round(float(values.median()), 1),
            "share_close": float((values >= _LOW_PSNR_DB).float().mean()),
        }
        if name == "image_train":
            result[name]["another_seed_median_db"] = round(float(control.median()), 1)
        if not same or float(values.min()) < _LOW_PSNR_DB:
            result |= {"ok": False, "why": f"{name}: ids equal {same}, lowest PSNR {float(values.min()):.1f} dB"}
    return result


def recovery(kit: Kit) -> Result:
    """Damaged and cut images in many batches: each is replaced by a neighbour, no other row changes."""
    graph = GraphConfig(dtype="uint8", num_threads=kit.threads)
    num = max(2, len(kit.images) // kit.batch_size)
    clean = _tensors(kit, kit.images, graph, num)
    images = list(kit.images)
    bad = sorted({1, kit.batch_size + 3, len(images) // 2 + 4, num * kit.batch_size - 2})
    for number, row in enumerate(bad):
        images[row] = png_bytes(row, damaged=True) if number % 2 else images[row][: len(images[row]) // 2]
    dirty = _tensors(kit, images, graph, num)
    rows = equal = wrong = 0
    lowest = float("inf")
    for one, reference in zip(dirty, clean, strict=True):
        for row, wanted in enumerate(reference["id"].tolist()):
            got = int(one["id"][row])
            if wanted in bad:
                wrong += got == wanted or got // 8 != wanted // 8
                continue
            rows += 1
            wrong += got != wanted
            equal += bool(torch.equal(one["image"][row], reference["image"][row]))
            lowest = min(lowest, float(_psnr(one["image"][row : row + 1], reference["image"][row : row + 1])[0]))
    return {
        "ok": wrong == 0 and lowest >= _LOW_PSNR_DB,
        "batches": num,
        "bad_images": len(bad),
        "wrong_rows": wrong,
        "good_rows_bit_equal": equal / rows,
        "good_rows_psnr_min_db": round(lowest, 1),
    }


def pointers(kit: Kit) -> Result:
    """torch reads DALI's own buffer, and a held batch is never written again."""
    graph = GraphConfig(dtype="uint8", num_threads=kit.threads)
    lane = Lane(
        graph, "mixed" if kit.on_gpu else "twin", num_threads=kit.threads, queue_depth=2, device_id=kit.device_id
    )
    try:
        feed = inputs(kit, graph)
        held, same = [], 0
        for _ in range(12):
            while lane.num_missing:
                lane.push(feed())
            dali = lane.run()["image"].as_tensor()
            tensor = from_dlpack(dali)
            same += tensor.data_ptr() == dali.data_ptr()
            held.append((tensor, tensor.clone()))
        synchronise(kit)
        kept = sum(bool(torch.equal(tensor, copy)) for tensor, copy in held)
    finally:
        lane.close()
    return {"ok": same == kept == len(held), "batches": len(held), "same_pointer": same, "unchanged": kept}


def _tensors(
    kit: Kit, images: list[bytes], graph: GraphConfig, num: int, *, device: str | None = None, seed: int = 3
) -> list[dict[str, Any]]:
    with source(kit, images, graph, device=device, seed=seed) as batches:
        return [next(batches).tensors for _ in range(num)]


def _fused(kit: Kit, graph: GraphConfig, num: int) -> list[dict[str, Any]]:
    """Batches of the graph that a GPU runs; without one of its twin, the same operators on the CPU."""
    if kit.on_gpu:
        return _tensors(kit, kit.images, graph, num)
    lane = Lane(graph, "twin", num_threads=kit.threads, queue_depth=1, device_id=None)
    try:
        desk, steps = _desk(kit, graph), MemoryPrefetcher(kit.images, kit.batch_size)
        found = []
        for _ in range(num):
            intake = desk.accept(steps.next())
            lane.push(intake.graph_inputs(graph.size, range(len(intake))))
            image = from_dlpack(lane.run()["image"].as_tensor()).clone()
            labels = torch.tensor([int(bytes(view)) for view in intake.fields["label"]])
            found.append({"image": image, "id": torch.from_numpy(intake.ids.copy()), "label": labels})
        return found
    finally:
        lane.close()


def inputs(kit: Kit, graph: GraphConfig) -> Any:
    desk, steps = _desk(kit, graph), MemoryPrefetcher(kit.images, kit.batch_size)

    def feed() -> dict[str, Any]:
        intake = desk.accept(steps.next())
        inputs: dict[str, Any] = intake.graph_inputs(graph.size, range(len(intake)))
        return inputs

    return feed


def _desk(kit: Kit, graph: GraphConfig) -> IntakeDesk:
    recorder = Recorder()
    guard = Quarantine(QuarantineConfig(), num_samples=len(kit.images), run_dir=None, recorder=recorder)
    return IntakeDesk(
        graph,
        fields=["image", "label"],
        seed=3,
        max_pixels=2**28,
        quarantine=guard,
        num_threads=1,
        recorder=recorder,
    )


def _psnr(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """dB of each uint8 image [b, 3, h, w] against the other; equal ones are at 99."""
    error = (one.cpu().float() - other.cpu().float()).square().mean(dim=(1, 2, 3))
    return torch.where(error == 0, torch.tensor(99.0), 10 * torch.log10(255.0**2 / error.clamp(min=1e-9)))


def _name(case: ElementTree.Element) -> str:
    return f"{case.get('classname')}.{case.get('name')}"
