"""A prefetcher over samples in memory, and sources over it."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from dalipipe.cache.decoded import DecodedSamples
from dalipipe.errors import ClosedError
from dalipipe.graphs.config import GraphConfig, QuarantineConfig
from dalipipe.graphs.contract import BatchSource
from dalipipe.graphs.device.tier import DeviceTier
from dalipipe.graphs.origin import Origin
from dalipipe.graphs.source import open_source
from dalipipe.order.step import Sample, Step
from dalipipe.shards.imageheader import parse_image_header
from dalipipe.telemetry import Recorder
from tests.support.images import jpeg_bytes, textured_image

BLOCK_SAMPLES = 8


def sized_jpegs(num: int) -> list[bytes]:
    """JPEGs of different sizes."""
    return [jpeg_bytes(i, height=90 + 7 * (i % 5), width=110 + 9 * (i % 4)) for i in range(num)]


def png_bytes(seed: int, *, damaged: bool = False) -> bytes:
    """A PNG; the damaged one looks whole at both ends and in its header."""
    sink = io.BytesIO()
    textured_image(seed).save(sink, "PNG")
    data = bytearray(sink.getvalue())
    if damaged:
        half = len(data) // 2
        data[half : half + 4] = bytes(byte ^ 0xFF for byte in data[half : half + 4])
    return bytes(data)


def flat_bytes(kind: str, side: int) -> bytes:
    """A one-colour square: few bytes, many pixels."""
    sink = io.BytesIO()
    Image.new("L", (side, side)).save(sink, kind)
    return sink.getvalue()


class MemoryPrefetcher:
    """Steps of `batch_size` samples in the order of `ids(epoch)`, epoch after epoch.

    tail: what the short last step is (`drop`, `partial`, `pad`). fail_at: calls of `next` (from 0) that raise.
    false_sizes: heights and widths that the index states wrongly, by id.
    """

    def __init__(
        self,
        images: Sequence[bytes],
        batch_size: int,
        *,
        tail: str = "drop",
        sizes_known: bool = True,
        ids: Callable[[int], Sequence[int]] | None = None,
        fields: dict[str, Sequence[bytes]] | None = None,
        fail_at: dict[int, Exception] | None = None,
        false_sizes: dict[int, tuple[int, int]] | None = None,
    ) -> None:
        columns = {"image": images, "label": [b"%d" % (i % 10) for i in range(len(images))], **(fields or {})}
        self._columns = {name: [np.frombuffer(data, np.uint8) for data in column] for name, column in columns.items()}
        self._num = len(images)
        self._sizes = np.zeros((self._num, 2), np.int32)
        for i, data in enumerate(images if sizes_known else []):
            try:
                header = parse_image_header(data)
            except ValueError:
                continue
            self._sizes[i] = header.height, header.width
        for i, size in (false_sizes or {}).items():
            self._sizes[i] = size
        self._steps = self._walk(batch_size, tail, ids or (lambda epoch: range(self._num)))
        self._fail_at = fail_at or {}
        self.num_calls = 0
        self.released: list[tuple[int, int]] = []
        self.closed = False

    def next(self) -> Step:
        """The next step."""
        call, self.num_calls = self.num_calls, self.num_calls + 1
        if call in self._fail_at:
            raise self._fail_at[call]
        if self.closed:
            raise ClosedError("the prefetcher is closed")
        return next(self._steps)

    def close(self) -> None:
        """Nothing to end."""
        self.closed = True

    def _walk(self, batch_size: int, tail: str, order: Callable[[int], Sequence[int]]) -> Iterator[Step]:
        epoch = 0
        while True:
            ids = np.array(order(epoch), np.int64)
            for step, start in enumerate(range(0, len(ids), batch_size)):
                rows = ids[start : start + batch_size]
                num_real = len(rows)
                if num_real < batch_size and tail == "drop":
                    continue
                if num_real < batch_size and tail == "pad":
                    rows = np.concatenate([rows, ids[: batch_size - num_real]])
                yield self._step(epoch, step, rows, num_real)
            epoch += 1

    def _step(self, epoch: int, step: int, ids: np.ndarray, num_real: int) -> Step:
        def substitutes(row: int) -> Iterator[Sample]:
            block, place = divmod(int(ids[row]), BLOCK_SAMPLES)
            for k in range(1, BLOCK_SAMPLES):
                other = block * BLOCK_SAMPLES + (place + k) % BLOCK_SAMPLES
                if other < self._num:
                    height, width = self._sizes[other].tolist()
                    fields = {name: column[other] for name, column in self._columns.items()}
                    yield Sample(id=other, fields=fields, height=height, width=width)

        return Step(
            epoch=epoch,
            step=step,
            ids=ids,
            fields={name: [column[i].view() for i in ids] for name, column in self._columns.items()},
            sizes=self._sizes[ids],
            valid=np.arange(len(ids)) < num_real,
            substitutes=substitutes,
            release=lambda: self.released.append((epoch, step)),
        )


def open_memory(
    prefetcher: MemoryPrefetcher,
    *,
    graph: GraphConfig | None = None,
    quarantine: QuarantineConfig | None = None,
    fields: Sequence[str] = ("image", "label"),
    seed: int = 3,
    queue_depth: int = 2,
    num_samples: int = 10_000,
    run_dir: Path | None = None,
    recorder: Recorder | None = None,
    origin: Callable[[int], Origin] | None = None,
    kept: DecodedSamples | None = None,
    tier: DeviceTier | None = None,
) -> BatchSource:
    """A source on the CPU with small images."""
    return open_source(
        prefetcher,
        graph=graph or GraphConfig(size=32, resize_shorter=40, num_threads=2),
        quarantine=quarantine or QuarantineConfig(max_fraction=1.0),
        fields=fields,
        seed=seed,
        device="cpu",
        queue_depth=queue_depth,
        num_samples=num_samples,
        run_dir=run_dir,
        recorder=recorder or Recorder(),
        origin=origin,
        kept=kept,
        tier=tier,
    )
