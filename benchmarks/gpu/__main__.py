"""The GPU kit: everything that only a card can show, in one call of under five minutes.

    bash benchmarks/gpu/run.sh --wheels DIR --out DIR      on a host with a card
    python -m benchmarks.gpu --device cpu --quick          the same lines on DALI's CPU operators: a dry run

Sections: environment, tests marked `gpu`, pixels against the CPU path, recovery from bad images, pointers, hand-over,
sweep against raw DALI, the device tier (needs CuPy), training. Results are written after each one: a run that is cut
short leaves what it had.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu import checks, device, report, speed
from benchmarks.gpu.kit import Kit, make_images

_SPARE_S = 20.0


def main(argv: list[str] | None = None, *, guard: bool = False) -> int:
    """Returns 0 when every check held and, on a card, every GPU test ran; 1 when not; 2 where there is no such card.

    guard: end the whole process, with the stacks of all threads, when it hangs beyond its budget.
    """
    args = _parser().parse_args(argv)
    began = time.monotonic()
    if args.device != "cpu" and not _card(args.device):
        print(f"gpu kit: {args.device} is not there; --device cpu makes the dry run", file=sys.stderr)
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    if guard:
        faulthandler.dump_traceback_later(args.budget_s + 2 * _SPARE_S, exit=True)
    scratch = Path(tempfile.mkdtemp(prefix="dalipipe-gpu-kit-", dir=args.scratch))
    try:
        results = _run_all(_kit(args, scratch, began + args.budget_s), args, began)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        if guard:
            faulthandler.cancel_dump_traceback_later()
    print(report.markdown(results))
    failed = [name for name, result in results["sections"].items() if result.get("ok") is False]
    print(f"gpu kit: {'failed: ' + ', '.join(failed) if failed else 'all checks held'}", file=sys.stderr)
    return 1 if failed else 0


def _run_all(kit: Kit, args: argparse.Namespace, began: float) -> dict[str, Any]:
    sections: dict[str, Callable[[Kit], dict[str, Any]]] = {
        "environment": _environment,
        "gpu_tests": checks.gpu_tests,
        "pixels": checks.pixels,
        "recovery": checks.recovery,
        "pointers": checks.pointers,
        "hand_over": speed.hand_over,
        "sweep": speed.sweep,
        "device_tier": device.device_tier,
        "training": _training,
    }
    results: dict[str, Any] = {
        "command": " ".join(["python -m benchmarks.gpu", *sys.argv[1:]]),
        "device": kit.device,
        "quick": kit.quick,
        "images": len(kit.images),
        "sections": {},
    }
    for name in args.sections or sections:
        print(f"gpu kit: {name} …", file=sys.stderr, flush=True)
        results["sections"][name] = _timed(sections[name], kit)
        results["wall_s"] = round(time.monotonic() - began, 1)
        (kit.out / "kit.json").write_text(json.dumps(results, indent=2) + "\n")
        (kit.out / "kit.md").write_text(report.markdown(results) + "\n")
    return results


def _timed(section: Callable[[Kit], dict[str, Any]], kit: Kit) -> dict[str, Any]:
    """A section that fails costs only itself."""
    began = time.monotonic()
    if kit.left_s() < 1:
        return {"ok": False, "why": "no time was left; raise --budget-s", "section_s": 0.0}
    try:
        result = section(kit)
    except Exception as error:  # noqa: BLE001 - the next section still has something to say
        result = {"ok": False, "why": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
    return result | {"section_s": round(time.monotonic() - began, 1)}


def _environment(kit: Kit) -> dict[str, Any]:
    from dalipipe.metrics.environment import describe_environment

    found = describe_environment(environ=os.environ, cache_dir=str(kit.scratch))
    wrong = [f"{item.level}: {item.what}; {item.remedy}" for item in found.findings]
    return {"ok": found.healthy, "why": "; ".join(wrong), "facts": found.facts}


def _training(kit: Kit) -> dict[str, Any]:
    from benchmarks.gpu.training import training

    return training(kit)


def _kit(args: argparse.Namespace, scratch: Path, deadline: float) -> Kit:
    threads = len(os.sched_getaffinity(0))
    on_gpu = args.device != "cpu"
    count, batch_size = (512, 256) if on_gpu and not args.quick else (32, 8)
    return Kit(
        device=args.device,
        out=args.out.absolute(),
        scratch=scratch,
        images=make_images(count, threads),
        threads=threads,
        batch_size=batch_size,
        seconds=2.0 if on_gpu else 0.3,
        quick=args.quick,
        deadline=deadline,
    )


def _card(device: str) -> bool:
    import torch

    return torch.cuda.is_available() and int(device.removeprefix("cuda:")) < torch.cuda.device_count()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda:0", type=_device, metavar="cuda:N|cpu")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "gpu-kit")))
    parser.add_argument("--scratch", type=Path, default=None, help="a folder on a fast disk; default: TMPDIR")
    parser.add_argument("--budget-s", type=float, default=300.0, help="seconds for everything")
    parser.add_argument("--quick", action="store_true", help="few images, short measurements: for dry runs")
    parser.add_argument("--sections", nargs="+", help="only these")
    return parser


def _device(text: str) -> str:
    if text != "cpu" and not (text.startswith("cuda:") and text[5:].isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is neither cpu nor cuda:N")
    return text


if __name__ == "__main__":
    sys.exit(main(guard=True))
