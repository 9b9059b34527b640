"""How fast do photographs become batches here, and how fast with other loaders on the same machine?

    python benchmarks/peers.py [FOLDER] [--ffcv-python PATH] [--peers dalipipe,dali,ffcv,webdataset,dataloader]
                               [--tasks T1,T2] [--rounds 5] [--seconds 600] [--batches 16] [--batch-size 64]
                               [--threads 2] [--samples 1024] [--json] [--quick]

T1 = random resized crop 224, flip, float32 NCHW; T2 = short side 256, centre crop 224. The peers:

- `dalipipe`: `dalipipe.load` on a packed set, from a warm cache;
- `dali`: raw DALI, `readers.file` with `DALIGenericIterator` and its fused operators (see `graphs.py`);
- `ffcv`: its loader on a set of its own that it re-encodes at quality 97, in the interpreter of `--ffcv-python` (an
  environment with ffcv in it), so that nothing of it enters this one; its T2 crops before it resizes, which is less;
- `webdataset`: tars, PIL and torch in the workers of a DataLoader;
- `dataloader`: files, PIL and torch in the workers of a DataLoader.

Each is a process of its own with as many threads or workers, asked for a few batches in turn, round by round, so that
whatever else the machine does hits all; ratios are medians over rounds of that to the first peer in the same round.
CPU is that of the process and of all below it. Everything is read from the page cache. A peer that cannot be imported
is left out, with the reason. Without a FOLDER of JPEGs, 500 x 375 crops of the photographs that scikit-image ships.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import os
import queue
import random
import statistics
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

_SIZE, _SHORT = 224, 256
_MEAN = (0.485 * 255, 0.456 * 255, 0.406 * 255)
_STD = (0.229 * 255, 0.224 * 255, 0.225 * 255)
_WARM_BATCHES = 8  # more than any of them keeps ready
_SETTLE_S = 0.5
_ANSWER_S = 300.0
_QUALITY = 97


def pil_transform(task: str, data: bytes) -> Any:
    """What a torchvision user writes, in PIL and torch: float32 [3, 224, 224]."""
    import numpy as np
    import torch
    from PIL import Image

    image = Image.open(io.BytesIO(data)).convert("RGB")
    if task == "T1":
        image = image.crop(_random_window(*image.size)).resize((_SIZE, _SIZE), Image.Resampling.BILINEAR)
        if random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    else:
        width, height = (side * _SHORT // min(image.size) for side in image.size)
        left, top = round((width - _SIZE) / 2), round((height - _SIZE) / 2)
        image = image.resize((width, height), Image.Resampling.BILINEAR)
        image = image.crop((left, top, left + _SIZE, top + _SIZE))
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float()
    return (pixels - torch.tensor(_MEAN)[:, None, None]) / torch.tensor(_STD)[:, None, None]


def _random_window(width: int, height: int) -> tuple[int, int, int, int]:
    for _ in range(10):
        area = width * height * random.uniform(0.08, 1)
        ratio = 2.718281828459045 ** random.uniform(-0.28768207245178085, 0.28768207245178085)  # log of 3/4 to 4/3
        wide, high = round((area * ratio) ** 0.5), round((area / ratio) ** 0.5)
        if 0 < wide <= width and 0 < high <= height:
            left, top = random.randint(0, width - wide), random.randint(0, height - high)
            return left, top, left + wide, top + high
    side = min(width, height)
    left, top = (width - side) // 2, (height - side) // 2
    return left, top, left + side, top + side


def dalipipe_batches(options: dict[str, Any]) -> Iterator[Any]:
    """Image batches without end, as all of these."""
    import dalipipe

    overrides = [f"data.url={options['scratch']}/packed", f"cache.dir={options['scratch']}/cache", "device=cpu"]
    overrides += [f"loader.batch_size={options['batch_size']}", f"graph.num_threads={options['threads']}"]
    loader = dalipipe.load("train" if options["task"] == "T1" else "eval", [*overrides, "loader.last_batch=drop"])
    for batch in itertools.chain.from_iterable(iter(lambda: loader, None)):
        yield batch["image"]


def dali_batches(options: dict[str, Any]) -> Iterator[Any]:
    sys.path.insert(0, str(ROOT))
    from benchmarks.graphs import RawDali, jpegs_in

    files = jpegs_in(Path(options["scratch"], "lake"))
    peer = RawDali(options["task"], files, options["batch_size"], options["threads"])
    while True:
        yield peer.next()


def ffcv_batches(options: dict[str, Any]) -> Iterator[Any]:
    import numpy as np
    from ffcv.fields import IntField, RGBImageField
    from ffcv.fields import rgb_image as decoders
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import NormalizeImage, RandomHorizontalFlip, ToTensor, ToTorchImage
    from ffcv.writer import DatasetWriter

    target = Path(options["scratch"], "photos.beton")
    if not target.exists():
        files = sorted(Path(options["scratch"], "lake").rglob("*.jpg"))
        fields = {"image": RGBImageField(write_mode="jpg", jpeg_quality=_QUALITY), "label": IntField()}
        DatasetWriter(str(target), fields, num_workers=options["threads"]).from_indexed_dataset(_Pictures(files))
    normalize = NormalizeImage(np.array(_MEAN), np.array(_STD), np.float32)
    if options["task"] == "T1":
        decode = [decoders.RandomResizedCropRGBImageDecoder((_SIZE, _SIZE)), RandomHorizontalFlip()]
    else:
        decode = [decoders.CenterCropRGBImageDecoder((_SIZE, _SIZE), ratio=_SIZE / _SHORT)]
    loader = Loader(
        str(target), batch_size=options["batch_size"], num_workers=options["threads"], os_cache=True, drop_last=True,
        order=OrderOption.QUASI_RANDOM if options["task"] == "T1" else OrderOption.SEQUENTIAL,
        pipelines={"image": [*decode, normalize, ToTensor(), ToTorchImage()], "label": None},
    )  # fmt: skip
    for batch in itertools.chain.from_iterable(iter(lambda: loader, None)):
        yield batch[0]


class _Pictures:
    """The files as FFCV's writer wants them: (picture, label)."""

    def __init__(self, files: list[Path]) -> None:
        self._files = files

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, number: int) -> tuple[Any, int]:
        from PIL import Image

        return Image.open(self._files[number]).convert("RGB"), 7


def webdataset_batches(options: dict[str, Any]) -> Iterator[Any]:
    import webdataset
    from torch.utils.data import DataLoader

    tars = sorted(str(path) for path in Path(options["scratch"], "packed").glob("*.tar"))
    tars = tars if len(tars) >= options["threads"] else split_tars(tars, Path(options["scratch"]), options["threads"])
    task = options["task"]
    data = webdataset.WebDataset(tars, resampled=True, shardshuffle=False, nodesplitter=webdataset.split_by_node)
    data = data.shuffle(256).map(lambda sample: (pil_transform(task, sample["jpg"]), 7))
    data = data.batched(options["batch_size"], partial=False)
    loader = DataLoader(data, batch_size=None, num_workers=options["threads"], prefetch_factor=2)
    for batch in loader:
        yield batch[0]


def split_tars(tars: list[str], scratch: Path, num: int) -> list[str]:
    """The samples of the tars dealt over `num` tars, so that each worker has one."""
    folder = scratch / "split"
    if not folder.exists():
        folder.mkdir()
        with contextlib.ExitStack() as stack:
            sinks = [stack.enter_context(tarfile.open(folder / f"{i}.tar", "w")) for i in range(num)]
            for path in tars:
                source = stack.enter_context(tarfile.open(path))
                for member in source:
                    key = member.name.split(".", 1)[0]
                    sinks[sum(key.encode()) % num].addfile(member, source.extractfile(member))
    return sorted(str(path) for path in folder.iterdir())


def dataloader_batches(options: dict[str, Any]) -> Iterator[Any]:
    from torch.utils.data import DataLoader

    files = sorted(Path(options["scratch"], "lake").rglob("*.jpg"))
    data: Any = _Transformed(files, options["task"])
    loader: DataLoader[Any] = DataLoader(
        data, batch_size=options["batch_size"], shuffle=options["task"] == "T1",
        num_workers=options["threads"], prefetch_factor=2, persistent_workers=True, drop_last=True,
    )  # fmt: skip
    for batch in itertools.chain.from_iterable(iter(lambda: loader, None)):
        yield batch[0]


class _Transformed:
    """A map-style data set of (image, label)."""

    def __init__(self, files: list[Path], task: str) -> None:
        self._files = files
        self._task = task

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, number: int) -> tuple[Any, int]:
        return pil_transform(self._task, self._files[number].read_bytes()), 7


PEERS = {
    "dalipipe": dalipipe_batches,
    "dali": dali_batches,
    "ffcv": ffcv_batches,
    "webdataset": webdataset_batches,
    "dataloader": dataloader_batches,
}


def serve(options: dict[str, Any]) -> None:
    """The process of a peer: answers one line of JSON a line. First whether it can run at all, then, for each number of
    batches, an answer after the untimed ones and one after the timed ones."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the peer prints is no answer
    try:
        batches = PEERS[options["peer"]](options)
        shape = list(next(batches).shape)
    except Exception as error:  # noqa: BLE001 - whatever keeps a peer from running is a reason to leave it out
        print(json.dumps({"error": f"{type(error).__name__}: {error}"[:300]}), file=answers)
        return
    print(json.dumps({"shape": shape}), file=answers)
    for line in sys.stdin:
        for _ in range(_WARM_BATCHES):  # what lay ready when it was asked is used up
            next(batches)
        print(json.dumps({}), file=answers)
        began_s, num = time.perf_counter(), 0
        for _ in range(json.loads(line)):
            num += len(next(batches))
        print(json.dumps({"images": num, "wall_s": time.perf_counter() - began_s}), file=answers)


class Peer:
    """A peer in its process."""

    def __init__(self, name: str, python: str, options: dict[str, Any]) -> None:
        self.name = name
        command = [python, str(Path(__file__).resolve()), "--serve", json.dumps({**options, "peer": name})]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            bufsize=1, env=environment,
        )  # fmt: skip
        self.shape: list[int] = []
        self._answers: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def start(self) -> str | None:
        """Waits for its first batch; why it cannot run, or None."""
        answer = self._answer()
        self.shape = answer.get("shape", [])
        return answer.get("error")

    def measure(self, num_batches: int) -> tuple[float, float]:
        """Images a second, and CPU milliseconds an image."""
        from tests.support.processes import cpu_below

        assert self._process.stdin is not None
        self._process.stdin.write(f"{num_batches}\n")
        self._answer()
        cpu_s = cpu_below(self._process.pid)
        answer = self._answer()
        if "error" in answer:
            raise SystemExit(f"{self.name}: {answer['error']}")
        cpu_s = cpu_below(self._process.pid) - cpu_s
        return answer["images"] / answer["wall_s"], cpu_s / answer["images"] * 1e3

    def close(self) -> None:
        """Ends it and what it started."""
        from tests.support.processes import descendants

        below = descendants(self._process.pid)
        for pid in (self._process.pid, *below):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        self._process.wait(timeout=30)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(json.loads(line))
        self._answers.put({"error": "its process ended"})

    def _answer(self) -> dict[str, Any]:
        try:
            return self._answers.get(timeout=_ANSWER_S)
        except queue.Empty:
            return {"error": f"no answer within {_ANSWER_S:g} s"}


def prepare(files: list[Path], scratch: Path, num_samples: int) -> None:
    """The files again and again as a tree of links, and packed."""
    tree = scratch / "lake" / "photos"
    tree.mkdir(parents=True)
    for number in range(num_samples):
        (tree / f"{number:06d}.jpg").symlink_to(files[number % len(files)].resolve())
    pack = ["pack", f"source={tree.parent}", f"target={scratch / 'packed'}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-m", "dalipipe", *pack], check=True, stdout=subprocess.DEVNULL, env=environment)


def compare(task: str, scratch: Path, args: argparse.Namespace) -> dict[str, Any]:
    """The figures of each peer at one task."""
    options = {"task": task, "scratch": str(scratch), "batch_size": args.batch_size, "threads": args.threads}
    result: dict[str, Any] = {}
    peers: list[Peer] = []
    args.stop_at = time.monotonic() + args.seconds
    try:
        for name in args.peers:
            if name == "ffcv" and not args.ffcv_python:
                result[name] = {"left_out": "no --ffcv-python was given"}
                continue
            peers.append(Peer(name, args.ffcv_python if name == "ffcv" else sys.executable, options))
        for peer in list(peers):
            error = peer.start()
            if error is None and peer.shape != [args.batch_size, 3, _SIZE, _SIZE]:
                error = f"its batch has shape {peer.shape}"
            if error is not None:
                result[peer.name] = {"left_out": error}
                peers.remove(peer)
                peer.close()
        rounds: list[dict[str, tuple[float, float]]] = []
        for number in range(args.rounds):
            if number and time.monotonic() > args.stop_at:
                break
            seen = {}
            for peer in peers if number % 2 == 0 else peers[::-1]:
                time.sleep(_SETTLE_S)  # the one before fills its queues
                seen[peer.name] = peer.measure(args.batches)
            rounds.append(seen)
    finally:
        for peer in peers:
            peer.close()
    result["rounds"] = len(rounds)
    for peer in peers:
        first = peers[0].name
        result[peer.name] = {
            "images_per_s": _median(seen[peer.name][0] for seen in rounds),
            "cpu_ms": _median(seen[peer.name][1] for seen in rounds),
            f"{first}_rate_ratio": _median(seen[first][0] / seen[peer.name][0] for seen in rounds),
            f"{first}_cpu_ratio": _median(seen[peer.name][1] / seen[first][1] for seen in rounds),
        }
    return result


def _median(values: Iterator[float]) -> float:
    return round(statistics.median(values), 3)


def main() -> None:
    """Prints one line a peer, or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="JPEG files, searched recursively")
    parser.add_argument("--ffcv-python", help="an interpreter that can import ffcv")
    parser.add_argument("--peers", type=lambda text: text.split(","), default=list(PEERS))
    parser.add_argument("--tasks", type=lambda text: text.split(","), default=["T1", "T2"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=600, help="a task begins no further round after that long")
    parser.add_argument("--batches", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--samples", type=int, default=1024, help="of each set; files are used again")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="one short round of one task and three peers")
    parser.add_argument("--serve", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        serve(args.serve)
        return
    if unknown := set(args.peers) - PEERS.keys():
        parser.error(f"--peers takes {', '.join(PEERS)}, not {', '.join(sorted(unknown))}")
    if args.quick:
        args.rounds, args.batches, args.batch_size, args.samples, args.tasks = 1, 2, 16, 64, ["T1"]
        args.peers = ["dalipipe", "dali", "dataloader"]
    sys.path.insert(0, str(ROOT))
    from benchmarks.graphs import cut_photographs, jpegs_in

    with tempfile.TemporaryDirectory() as scratch:
        photos = Path(scratch, "photos")
        photos.mkdir()
        files = jpegs_in(args.folder or cut_photographs(photos, 96))
        if not files:
            parser.error(f"no JPEG under {args.folder}")
        prepare(files, Path(scratch), args.samples)
        results = {task: compare(task, Path(scratch), args) for task in args.tasks}
    if args.json:
        print(json.dumps({"files": len(files), "threads": args.threads, **results}))
        return
    for task, found in results.items():
        for name, figures in found.items():
            print(task, name, json.dumps(figures))


if __name__ == "__main__":
    main()
