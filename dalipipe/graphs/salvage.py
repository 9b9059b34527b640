"""What happens to a batch that the graph refused: its bad samples are found, replaced, and the rest decoded again."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from dalipipe.errors import CorruptSampleError, PipelineError
from dalipipe.graphs.bysample import Pixels, SampleLane
from dalipipe.graphs.check import failure, undecodable, upright_size
from dalipipe.graphs.image import Backend
from dalipipe.graphs.intake import Intake, IntakeDesk
from dalipipe.graphs.lane import Lane
from dalipipe.graphs.scaled import ScaledDecodeError

_MAX_ROUNDS = 3
_SAMPLE_NUMBER = re.compile(r"[Ff]ailed to decode sample #(\d+)")


class Salvage:
    """Decodes failed batches again. Good samples come out bit for bit as without their bad neighbours.

    Args:
        new_lane: makes a lane of a queue of one for a backend.
        backends: those to try, the most forgiving one last.
        scales: whether JPEGs may be decoded at a scale outside the lane.
    """

    def __init__(
        self,
        desk: IntakeDesk,
        new_lane: Callable[[Backend], Lane],
        *,
        backends: tuple[Backend, ...],
        name: str,
        size: int,
        scales: bool,
        max_pixels: int,
        num_threads: int,
    ) -> None:
        self._desk = desk
        self._new_lane = new_lane
        self._backends = backends
        self._name = name
        self._size = size
        self._scales = scales
        self._max_pixels = max_pixels
        self._num_threads = num_threads
        self._lanes: dict[Backend, Lane] = {}

    def fed(self, intake: Intake) -> list[int]:
        """The rows that DALI decodes."""
        others = set(intake.scaled()) if self._scales else set()
        others.update(intake.decoded_before())
        return [row for row in range(len(intake)) if row not in others]

    def decode(self, intake: Intake, error: RuntimeError) -> Any:
        """The outputs for a batch for which the graph gave `error`; None when DALI has nothing left to decode.

        Raises:
            QuarantineError: too many samples are bad, or one has no good substitute.
            PipelineError: the graph fails although each sample passes alone.
        """
        for _ in range(_MAX_ROUNDS):
            reasons = self._undecodable(intake, self._named(intake, error))
            if not any(reasons.values()):
                break
            self._replace(intake, reasons)
            try:
                return self._run(intake, self._backends[0], self.fed(intake))
            except RuntimeError as again:
                error = again
        # DALI names one sample at most, and none for some kinds of damage: look at all.
        self._replace(intake, self._undecodable(intake, range(len(intake))))
        for backend in self._backends:
            try:
                return self._run(intake, backend, self.fed(intake))
            except RuntimeError as again:
                error = again
        # The graph refuses what the checker accepts: ask it about each sample alone.
        for _ in range(_MAX_ROUNDS):
            self._replace(intake, {row: self._refusal(intake, row) for row in self.fed(intake)})
            try:
                return self._run(intake, self._backends[-1], self.fed(intake))
            except RuntimeError as again:
                error = again
        raise PipelineError(
            f"epoch {intake.step.epoch}, step {intake.step.step}: the graph {self._name} fails although each sample "
            f"of the batch passes alone: {first_line(error)}"
        ) from error

    def mend(self, intake: Intake, outputs: dict[str, list[Pixels | None]], lane: SampleLane) -> Any:
        """The outputs of a `SampleLane` without gaps: the bad samples are replaced or dropped, and only what takes
        their places is decoded; None when nothing is left.

        Raises: as `decode`.
        """
        decoded = dict(zip(self.fed(intake), outputs["image"], strict=True))
        while failed := [row for row, image in decoded.items() if image is None]:
            reasons: dict[int, str | None] = {}
            for row in failed:
                del decoded[row]
                if not self._resized(intake, row):
                    reasons[row] = failure(intake.images[row], max_pixels=self._max_pixels)
            kept = [row for row in range(len(intake)) if not (row in reasons and self._desk.drops)]
            # A bad substitute is found out by the next round, and there are only so many.
            self._replace(intake, reasons, thoroughly=False)
            decoded = {new: decoded[row] for new, row in enumerate(kept) if row in decoded}
            rows = [row for row in self.fed(intake) if row not in decoded]
            decoded |= zip(rows, lane.decode(intake.graph_inputs(self._size, rows)) if rows else [], strict=True)
            decoded = dict(sorted(decoded.items()))
        return {"image": list(decoded.values())} if decoded else None

    def rescale(self, intake: Intake, error: ScaledDecodeError) -> Any:
        """The outputs for a batch of which some rows did not decode at a scale: they are decoded whole or replaced.

        Raises: as `decode`.
        """
        # A window from a wrong size in the index fails here too; with the right one it may be decoded at a scale again.
        reasons = self._undecodable(intake, [row for row in error.rows if not self._resized(intake, row)])
        intake.whole.update(int(intake.ids[row]) for row, reason in reasons.items() if reason is None)
        self._replace(intake, reasons)
        try:
            return self._run(intake, self._backends[0], self.fed(intake))
        except RuntimeError as again:
            return self.decode(intake, again)

    def close(self) -> None:
        """Ends DALI's threads. Idempotent."""
        for lane in self._lanes.values():
            lane.close()
        self._lanes.clear()

    def _named(self, intake: Intake, error: RuntimeError) -> list[int]:
        """The row that DALI's message names, counted among those that it was fed; none where it names none."""
        found = _SAMPLE_NUMBER.search(str(error))
        fed = self.fed(intake)
        return [fed[int(found[1])]] if found and int(found[1]) < len(fed) else []

    def _undecodable(self, intake: Intake, rows: Sequence[int]) -> dict[int, str | None]:
        images = [intake.images[row] for row in rows]
        reasons = undecodable(images, max_pixels=self._max_pixels, num_threads=self._num_threads)
        return dict(zip(rows, reasons, strict=True))

    @staticmethod
    def _resized(intake: Intake, row: int) -> bool:
        """Whether the index had a wrong size, and so a window outside the image; the row has the right one now."""
        try:
            size = upright_size(intake.images[row])
        except CorruptSampleError:
            return False
        if size == tuple(intake.sizes[row].tolist()):
            return False
        intake.sizes[row] = size
        return True

    def _replace(self, intake: Intake, reasons: dict[int, str | None], *, thoroughly: bool = True) -> None:
        for row, reason in reasons.items():
            if reason is not None:
                self._desk.replace(intake, row, reason, thoroughly=thoroughly)
        self._desk.plan(intake)

    def _refusal(self, intake: Intake, row: int) -> str | None:
        try:
            self._run(intake, self._backends[-1], [row])
        except RuntimeError as error:
            return f"the graph refuses it: {first_line(error)}"
        return None

    def _run(self, intake: Intake, backend: Backend, rows: Sequence[int]) -> Any:
        if not rows:
            return None
        if backend not in self._lanes:
            self._lanes[backend] = self._new_lane(backend)
        lane = self._lanes[backend]
        lane.push(intake.graph_inputs(self._size, rows))
        return lane.run()


def first_line(error: BaseException) -> str:
    """The first line of an error's message, at most 200 characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:200] if lines else type(error).__name__
