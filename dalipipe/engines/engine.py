"""Running many independent tasks somewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskDone:
    """Task number `index` of the submitted sequence and what it returned."""

    index: int
    result: object


class Engine(Protocol):
    """Runs a pure, idempotent, picklable module-level function over many tasks."""

    def prepare(self, num_tasks: int) -> None:
        """Starts what a `run` of about so many tasks will need, while the caller still makes them up. A hint."""

    def run(self, function: Callable[[T], R], tasks: Sequence[T], *, names: Sequence[str]) -> Iterator[TaskDone]:
        """Runs all tasks and yields each result as it is done, in any order.

        A task's own exception is raised here as it is; a worker that died (SIGKILL, out of memory) raises PackError
        naming the tasks that were in flight, by `names`. Closing the iterator ends all workers.
        """

    def close(self) -> None:
        """Ends every worker within a bounded time. Idempotent."""
