"""The steps of the window, and what a thread is given to do for them."""

from __future__ import annotations

from dataclasses import dataclass

from dalipipe.cache.contract import BlockView
from dalipipe.order.step import Step
from dalipipe.prefetch.cold import LooseSamples
from dalipipe.prefetch.plan import StepPlan


class PendingStep:
    """A step in the window. `lacks`: its blocks that are not near yet; `loose`: its samples of such blocks that were
    read alone; `is_asked`: whether its turn for that is over; `number`: counts from the start of the run; `ready`: the
    step when it is assembled.
    """

    __slots__ = ("is_asked", "lacks", "loose", "number", "plan", "ready")

    def __init__(self, plan: StepPlan, lacks: set[int]) -> None:
        self.plan = plan
        self.lacks = lacks
        self.is_asked = False
        self.number = 0
        self.loose: dict[int, LooseSamples] = {}
        self.ready: Step | None = None

    @property
    def ends_epoch(self) -> bool:
        """Whether it is the last step of its epoch."""
        return self.plan.step + 1 >= self.plan.order.num_steps

    @property
    def name(self) -> str:
        """For messages."""
        return f"epoch {self.plan.order.epoch} step {self.plan.step}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildTask:
    """Cut the samples of a step out of its blocks, which are all near."""

    pending: PendingStep
    views: dict[int, BlockView]


@dataclass(frozen=True, slots=True, kw_only=True)
class ColdTask:
    """Read the samples of some steps that lie in a block alone, as the block will take longer."""

    pendings: tuple[PendingStep, ...]
    block: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchTask:
    """Bring a block near, and `beside` as far as they come by the same request; the others are given back."""

    block: int
    beside: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTask:
    """Plan further steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmTask:
    """Bring some block of the epoch to the node's disk, as nothing nearer is to be done."""


Task = BuildTask | ColdTask | FetchTask | PlanTask | WarmTask
