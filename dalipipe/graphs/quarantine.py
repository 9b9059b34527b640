"""The samples that cannot be decoded: who they are, and when there are too many."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import xxhash

from dalipipe.errors import QuarantineError
from dalipipe.graphs.check import kind_of
from dalipipe.graphs.config import QuarantineConfig
from dalipipe.graphs.origin import Origin
from dalipipe.order.step import Bytes
from dalipipe.telemetry import Recorder

FILE_NAME = "quarantine.jsonl"

# A share of very few samples says nothing: it is judged over at least this many times 1 / max_fraction.
_MIN_ALLOWED = 10


class Quarantine:
    """The bad ids that this process has met. Known ids are a hint that saves a failed decode, never state."""

    def __init__(
        self,
        config: QuarantineConfig,
        *,
        num_samples: int,
        run_dir: Path | None,
        recorder: Recorder,
        origin: Callable[[int], Origin] | None = None,
    ) -> None:
        self._config = config
        self._origin = origin
        self._num_samples = num_samples
        self._path = None if run_dir is None else run_dir / FILE_NAME
        self._recorder = recorder
        self._reasons: dict[int, str] = {}
        self._num_delivered = 0

    def reason(self, sample_id: int) -> str | None:
        """Why the sample is known to be bad, or None."""
        return self._reasons.get(sample_id)

    @property
    def drops(self) -> bool:
        """Whether a bad sample leaves the batch instead of being replaced."""
        return self._config.policy == "drop"

    def name(self, sample_id: int) -> str:
        """How messages call a sample: its id and, where known, key, shard and offset."""
        return f"sample {sample_id}" + ("" if self._origin is None else f", {self._origin(sample_id)},")

    @property
    def num_bad(self) -> int:
        """Distinct bad samples so far."""
        return len(self._reasons)

    def delivered(self, num: int) -> None:
        """Counts delivered samples: what the share of bad ones is taken of."""
        self._num_delivered += num

    def add(self, sample_id: int, *, epoch: int, step: int, reason: str, data: Bytes) -> None:
        """Records a bad sample; a known one is not recorded twice.

        Raises:
            QuarantineError: the policy is `raise`, or more samples are bad than `max_fraction` allows.
        """
        if sample_id not in self._reasons:
            self._reasons[sample_id] = reason
            self._recorder.add("quarantined")
            self._recorder.add(f"quarantined.{kind_of(reason)}")
            self._append(
                {
                    "id": sample_id,
                    **({} if self._origin is None else asdict(self._origin(sample_id))),
                    "epoch": epoch,
                    "step": step,
                    "kind": kind_of(reason),
                    "reason": reason,
                    "xxh3": _digest(data),
                }
            )
        where = f"{self.name(sample_id)} (epoch {epoch}, step {step}) cannot be decoded: {reason}"
        if self._config.policy == "raise":
            raise QuarantineError(f"{where}; quarantine.policy=raise stops here, `substitute` would go on")
        if self.num_bad > self.num_allowed:
            judged = min(self._num_samples, max(self._num_delivered, self._window))
            raise QuarantineError(
                f"{where}; {self.num_bad} bad samples are more than quarantine.max_fraction="
                f"{self._config.max_fraction:g} of {judged} allows ({self.num_allowed}). Look at the reasons in "
                f"{self._path or FILE_NAME}, run `dalipipe verify`, or raise quarantine.max_fraction"
            )

    @property
    def num_allowed(self) -> int:
        """Distinct bad samples that are still tolerated, at least one."""
        judged = min(self._num_samples, max(self._num_delivered, self._window))
        return max(1, int(self._config.max_fraction * judged))

    @property
    def _window(self) -> int:
        fraction = self._config.max_fraction
        return self._num_samples if fraction <= 0 else int(min(self._num_samples, _MIN_ALLOWED / fraction))

    def _append(self, record: dict[str, object]) -> None:
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # One write with O_APPEND: the ranks of a node share the file and lines never mix.
        line = json.dumps(record, separators=(",", ":")) + "\n"
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)


def _digest(data: Bytes) -> str:
    digest: str = xxhash.xxh3_64_hexdigest(data.data)
    return digest
