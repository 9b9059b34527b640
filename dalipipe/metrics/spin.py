"""The idle-spin bound: the same step in the same process, fed from memory, then fed by no loader at all."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from dalipipe.errors import ConfigError
from dalipipe.metrics.evidence import SPIN_FILE

BatchTensors = Mapping[str, Any]
_WARM_UP_STEPS = 2


class SpinLoader(Protocol):
    """What the measurement asks of a loader."""

    def __iter__(self) -> Iterator[BatchTensors]: ...

    def rest(self) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SpinReport:
    """Mean seconds of one step: fed by the loader, from `num_batches` batches in memory, from one made-up batch.

    spin: the loader does nothing meanwhile, so no loader can be faster. synthetic: nothing of the loader's is touched,
    not even its tensors. gap_points: percentage points of utilisation that the loader costs against synthetic.
    """

    num_steps: int
    loader_step_s: float
    spin_step_s: float
    synthetic_step_s: float

    @property
    def au(self) -> float:
        """Utilisation with the loader: synthetic step over loader step, at most 1."""
        return min(1.0, self.synthetic_step_s / self.loader_step_s) if self.loader_step_s > 0 else 0.0

    @property
    def gap_points(self) -> float:
        """100 - 100 AU."""
        return 100 * (1 - self.au)

    def save(self, run_dir: Path) -> None:
        """Keeps it in the run folder, where `doctor` and `report` take it as the baseline."""
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / SPIN_FILE).write_text(json.dumps({**asdict(self), "au": self.au}) + "\n")


def spin(
    loader: SpinLoader,
    step: Callable[[BatchTensors], object],
    *,
    num_steps: int = 50,
    num_batches: int = 8,
    run_dir: str | Path | None = None,
) -> SpinReport:
    """Measures a training step on the loader, on batches in memory and on made-up data, in steady state.

    The loader is moved back to where it was. The model is trained by all of it: measure before training or on a copy.

    Args:
        step: one training step on a batch; on a GPU the device is synchronised before each clock is read.
        num_steps: measured steps of each kind, after two that are not.
        num_batches: batches held in memory at once.
        run_dir: where the result is kept for `doctor` and `report`.

    Raises:
        ConfigError: fewer than one step or batch, or the loader gives no batch.
    """
    if num_steps < 1 or num_batches < 1:
        raise ConfigError(f"spin needs num_steps >= 1 and num_batches >= 1 (got {num_steps} and {num_batches})")
    state = loader.state_dict()
    endless = _endless(loader)
    loader_step_s = _mean_step_s(endless, step, num_steps)
    held = list(itertools.islice(endless, num_batches))
    endless.close()
    loader.rest()
    spin_step_s = _mean_step_s(itertools.cycle(held), step, num_steps)
    made_up = {name: _made_up(value) for name, value in held[0].items()}
    del held
    synthetic_step_s = _mean_step_s(itertools.repeat(made_up), step, num_steps)
    loader.load_state_dict(state)
    report = SpinReport(
        num_steps=num_steps,
        loader_step_s=loader_step_s,
        spin_step_s=spin_step_s,
        synthetic_step_s=synthetic_step_s,
    )
    if run_dir is not None:
        report.save(Path(run_dir))
    return report


def _endless(loader: SpinLoader) -> Generator[BatchTensors, None, None]:
    while True:
        empty = True
        for batch in loader:
            empty = False
            yield batch
        if empty:
            raise ConfigError("the loader gives no batch, so there is nothing to spin on")


def _mean_step_s(batches: Iterator[BatchTensors], step: Callable[[BatchTensors], object], num_steps: int) -> float:
    for batch in itertools.islice(batches, _WARM_UP_STEPS):
        step(batch)
    _synchronise()
    began_s = time.perf_counter()
    for batch in itertools.islice(batches, num_steps):
        step(batch)
    _synchronise()
    return (time.perf_counter() - began_s) / num_steps


def _synchronise() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _made_up(value: Any) -> Any:
    """A tensor of the same shape, dtype and device: noise for floats, the same numbers in new memory for others."""
    import torch

    if isinstance(value, torch.Tensor):
        return torch.randn_like(value) if value.is_floating_point() else value.clone()
    return value
