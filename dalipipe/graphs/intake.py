"""From the encoded samples of a step to what the graph is fed with, bad samples replaced as far as they are known."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from dalipipe.errors import ConfigError, CorruptSampleError, QuarantineError
from dalipipe.graphs.augment import NUM_DRAWS, plan_strengths, strength_inputs
from dalipipe.graphs.check import suspicion, undecodable, upright_size
from dalipipe.graphs.config import GraphConfig
from dalipipe.graphs.crop import NUM_UNIFORMS, Windows, plan_windows
from dalipipe.graphs.custom import is_custom
from dalipipe.graphs.image import MAX_BATCH_SIZE
from dalipipe.graphs.quarantine import Quarantine
from dalipipe.graphs.scaled import is_jpeg
from dalipipe.order.hashing import uniforms
from dalipipe.order.step import Bytes, Sample, Step
from dalipipe.telemetry import Recorder, Stage


@dataclass(slots=True, kw_only=True)
class Intake:
    """A step on its way through the graph; its rows change while bad samples are replaced or dropped.

    ids: int64 [b]. valid: bool [b]. fields: name -> b byte views. sizes: int32 [b, 2], upright height and width.
    windows: None until planned; strengths: arguments of the augmentation by name; draws: float32 [b, d], the uniform
    numbers. gone: rows that leave the batch at the next `plan`. whole: ids of JPEGs that only decode at full size.
    is_fed: whether DALI has some of its rows. found: by id, images that were decoded before (uint8 [h, w, 3], or slots
    of the device tier). in_full: whether DALI decodes whole images, to be kept, instead of windows. near_at: when its
    bytes were near, on time.perf_counter's clock.
    """

    step: Step
    near_at: float
    ids: npt.NDArray[np.int64]
    fields: dict[str, list[Bytes]]
    sizes: npt.NDArray[np.int32]
    valid: npt.NDArray[np.bool_]
    windows: Windows | None = None
    strengths: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    draws: npt.NDArray[np.float32] | None = None
    gone: set[int] = field(default_factory=set)
    whole: set[int] = field(default_factory=set)
    is_fed: bool = False
    found: dict[int, Any] = field(default_factory=dict)
    in_full: bool = False
    lent: list[weakref.ref[Bytes]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def images(self) -> list[Bytes]:
        """The encoded images."""
        return self.fields["image"]

    def scaled(self) -> list[int]:
        """The rows that are decoded at a scale, outside DALI."""
        assert self.windows is not None
        rows = np.flatnonzero(self.windows.reduce > 1).tolist()
        return [row for row in rows if int(self.ids[row]) not in self.whole and is_jpeg(self.images[row])]

    def decoded_before(self) -> list[int]:
        """The rows whose images are in `found`."""
        return [row for row, sample_id in enumerate(self.ids.tolist()) if sample_id in self.found]

    def graph_inputs(self, size: int, rows: Sequence[int]) -> dict[str, Any]:
        """What the graph is fed with for `rows`, by name. size: of the output, in pixels.

        The views are new ones, so that their death tells that DALI let them go.
        """
        assert self.windows is not None
        views = [self.images[row].view() for row in rows]
        self.lent += [weakref.ref(view) for view in views]
        which = np.asarray(rows, np.int64)
        begin, end = self.windows.region(size, which)
        start, shape = self.windows.start[which], self.windows.shape[which]
        if self.in_full:
            start, shape = np.zeros_like(start), self.sizes[which]
        return {
            "image": views,
            "start": start,
            "shape": shape,
            "roi_start": begin,
            "roi_end": end,
            "mirror": self.windows.mirror[which],
            "draws": None if self.draws is None else self.draws[which],
            **{name: strength[which] for name, strength in self.strengths.items()},
        }

    def leave_out(self) -> None:
        """Takes the rows in `gone` out of the batch."""
        kept = [row for row in range(len(self)) if row not in self.gone]
        self.ids, self.valid, self.sizes = self.ids[kept], self.valid[kept], self.sizes[kept]
        self.fields = {name: [views[row] for row in kept] for name, views in self.fields.items()}
        self.gone.clear()

    def release(self) -> bool:
        """Lets the step's views go, unless DALI still holds some: then nothing happens and the answer is False."""
        if any(reference() is not None for reference in self.lent):
            return False
        self.found.clear()
        for views in (*self.fields.values(), *self.step.fields.values()):
            views.clear()
        self.step.release()
        return True


class IntakeDesk:
    """Makes an `Intake` of a `Step`: looks at the samples, replaces bad ones, plans the windows.

    fractions: see `plan_windows`.
    """

    def __init__(
        self,
        graph: GraphConfig,
        *,
        fields: Sequence[str],
        seed: int,
        max_pixels: int,
        quarantine: Quarantine,
        num_threads: int,
        recorder: Recorder,
        fractions: bool = False,
    ) -> None:
        self._graph = graph
        self._fractions = fractions
        self._fields = tuple(fields)
        self._seed = seed
        self._max_pixels = max_pixels
        self._quarantine = quarantine
        self._num_threads = num_threads
        self._recorder = recorder

    @property
    def drops(self) -> bool:
        """Whether a bad sample leaves the batch instead of being replaced."""
        return self._quarantine.drops

    def accept(self, step: Step) -> Intake:
        """Takes a step in. What looks bad is decoded on its own now and, when it is bad, replaced.

        Raises:
            QuarantineError: too many samples are bad, or one has no good substitute.
            ConfigError: the step has no such field, or more samples than a graph takes.
        """
        missing = [name for name in self._fields if name not in step.fields]
        if missing:
            raise ConfigError(f"data.fields names {missing}, which the samples do not have: {sorted(step.fields)}")
        if len(step.ids) > MAX_BATCH_SIZE:
            raise ConfigError(f"loader.batch_size={len(step.ids)} per rank is more than {MAX_BATCH_SIZE}")
        intake = Intake(
            step=step,
            near_at=time.perf_counter(),
            ids=step.ids.copy(),
            valid=step.valid.copy(),
            fields={name: list(step.fields[name]) for name in self._fields},
            sizes=step.sizes.astype(np.int32, copy=True),
        )
        self._sift(intake)
        self.plan(intake)
        return intake

    def plan(self, intake: Intake) -> None:
        """Lets dropped rows go and computes the windows and strengths of the samples as they are now."""
        if intake.gone:
            intake.leave_out()
        strong = bool(strength_inputs(self._graph))
        num = NUM_UNIFORMS + NUM_DRAWS if strong else NUM_UNIFORMS
        if is_custom(self._graph.name):
            num = self._graph.num_draws
        draws = uniforms(self._seed, intake.step.epoch, intake.ids, num)
        intake.draws = draws
        intake.windows = plan_windows(self._graph, intake.sizes, draws, fractions=self._fractions)
        intake.strengths = plan_strengths(self._graph, draws[:, NUM_UNIFORMS:]) if strong else {}

    def replace(self, intake: Intake, row: int, reason: str, *, thoroughly: bool = True) -> None:
        """Puts the next good sample in the place of a bad one, or drops it. `plan` must follow.

        thoroughly: decode the substitute before, instead of trusting a look at its bytes; a batch that DALI has failed
        once should not fail again.

        Raises:
            QuarantineError: as `accept`.
        """
        step, bad_id = intake.step, int(intake.ids[row])
        where = {"epoch": step.epoch, "step": step.step}
        self._quarantine.add(bad_id, **where, reason=reason, data=intake.images[row])
        if self._quarantine.drops:
            intake.gone.add(row)
            return
        for sample in step.substitutes(row):
            if self._quarantine.reason(sample.id) is not None:
                continue
            image = sample.fields["image"]
            worse = None
            if thoroughly or suspicion(image) is not None or sample.height * sample.width > self._max_pixels:
                worse = undecodable([image], max_pixels=self._max_pixels, num_threads=self._num_threads)[0]
            if worse is None:
                self._seat(intake, row, sample)
                return
            self._quarantine.add(sample.id, **where, reason=worse, data=image)
        raise QuarantineError(
            f"{self._quarantine.name(bad_id)} (epoch {step.epoch}, step {step.step}) cannot be decoded ({reason}) and "
            "no sample near it can take its place; run `dalipipe verify`"
        )

    def _sift(self, intake: Intake) -> None:
        suspects: list[int] = []
        for row, image in enumerate(intake.images):
            known = self._quarantine.reason(int(intake.ids[row]))
            if known is not None:
                self.replace(intake, row, known, thoroughly=False)
            elif suspicion(image) is not None or not self._sized(intake, row):
                suspects.append(row)
        if not suspects:
            return
        with self._recorder.span(Stage.SALVAGE):
            images = [intake.images[row] for row in suspects]
            reasons = undecodable(images, max_pixels=self._max_pixels, num_threads=self._num_threads)
            for row, reason in zip(suspects, reasons, strict=True):
                if reason is not None:
                    self.replace(intake, row, reason, thoroughly=False)
                else:
                    self._sized(intake, row)

    def _sized(self, intake: Intake, row: int) -> bool:
        """Fills in the size where the index does not know it; whether it is known and within the limit."""
        height, width = intake.sizes[row].tolist()
        if height < 1 or width < 1:
            try:
                height, width = upright_size(intake.images[row])
            except CorruptSampleError:
                return False
            intake.sizes[row] = height, width
        return bool(height * width <= self._max_pixels)

    def _seat(self, intake: Intake, row: int, sample: Sample) -> None:
        intake.ids[row] = sample.id
        for name, views in intake.fields.items():
            views[row] = sample.fields[name]
        intake.sizes[row] = sample.height, sample.width
        self._sized(intake, row)
