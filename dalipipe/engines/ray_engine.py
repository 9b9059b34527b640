"""Tasks on a Ray cluster: a lost worker process or node costs its tasks once more, never the run."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from dalipipe.engines.config import RayConfig
from dalipipe.engines.cpus import default_workers
from dalipipe.engines.engine import TaskDone
from dalipipe.engines.local import picklable, result_of
from dalipipe.engines.worker import Outcome, run_task
from dalipipe.errors import ClosedError, ConfigError, DependencyError, PackError

T = TypeVar("T")
R = TypeVar("R")

_AHEAD = 2
"""Tasks submitted for each one that can run, so that no CPU waits for the driver."""
_OBJECT_STORE_BYTES = 256 << 20
_POLL_S = 0.5
_CLEAN_UP_S = 30.0


class RayEngine:
    """Runs each task as one Ray task of one CPU under its own name.

    Tasks must be idempotent: Ray runs one again when the process or node that held it died. The package must be
    installed on every node. A Ray session that is running already in this process is used and left alone.

    Args:
        workers: tasks that run at once; 0 = as many as the cluster has CPUs.

    Raises:
        DependencyError: Ray is not installed.
        ConfigError: the cluster at `address` cannot be joined.
    """

    def __init__(self, workers: int = 0, config: RayConfig | None = None) -> None:
        config = config or RayConfig()
        if workers < 0 or config.retries < 0:
            raise ConfigError(f"pack.workers={workers} and ray.retries={config.retries} must be at least 0")
        try:
            import ray
        except ImportError as error:
            raise DependencyError("engine=ray needs Ray; install dalipipe[ray], or use engine=local") from error
        self._ray: Any = ray
        self._config = config
        self._closed = False
        self._owned = not ray.is_initialized()
        if self._owned:
            self._start(workers)
        cpus = int(ray.cluster_resources().get("CPU", 1))
        self._workers = min(workers, cpus) if workers else cpus
        self._remote: Any = ray.remote(num_cpus=1, max_retries=config.retries, retry_exceptions=False)(run_task)

    def prepare(self, num_tasks: int) -> None:
        """The cluster has its workers already."""

    def run(self, function: Callable[[T], R], tasks: Sequence[T], *, names: Sequence[str]) -> Iterator[TaskDone]:
        """Runs all tasks; see `Engine.run`.

        Raises:
            ConfigError: there are not as many names as tasks, or `function` cannot be pickled.
            PackError: a task's process died more than `ray.retries` times, or a result cannot be pickled.
            ClosedError: the engine was closed, before or meanwhile.
        """
        if len(names) != len(tasks):
            raise ConfigError(f"{len(tasks)} tasks were given with {len(names)} names; each task needs its name")
        if self._closed:
            raise ClosedError("the engine is closed; make a new one")
        return self._run(picklable(function), tasks, names)

    def close(self) -> None:
        """Ends the local cluster, if this engine started it. Idempotent."""
        if not self._closed:
            self._closed = True
            if self._owned:
                self._ray.shutdown()

    def _start(self, workers: int) -> None:
        where: dict[str, Any] = {"address": self._config.address}
        if not self._config.address:
            where = {
                "address": "local",
                "num_cpus": workers or default_workers(),
                "include_dashboard": False,
                "object_store_memory": _OBJECT_STORE_BYTES,
            }
        try:
            self._ray.init(**where, log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, RuntimeError, ValueError, AssertionError) as error:
            raise ConfigError(f"ray.address={self._config.address!r} cannot be joined: {error}") from error

    def _run(self, function: bytes, tasks: Sequence[Any], names: Sequence[str]) -> Iterator[TaskDone]:
        shared = self._ray.put(function)
        limit = self._workers * (_AHEAD if self._workers > 1 else 1)
        pending: dict[Any, int] = {}
        submitted = 0
        try:
            for _ in range(len(tasks)):
                while submitted < len(tasks) and len(pending) < limit:
                    task = self._remote.options(name=names[submitted])
                    reference = task.remote(shared, pickle.dumps(tasks[submitted]))
                    pending[reference] = submitted
                    submitted += 1
                reference = self._next_done(list(pending))
                index = pending.pop(reference)
                yield TaskDone(index=index, result=result_of(self._outcome(reference, names[index]), names[index]))
        finally:
            if not self._closed:
                self._cancel(list(pending))

    def _next_done(self, references: list[Any]) -> Any:
        """Waits for a task. How long one may take is the task's affair; closing the engine ends the wait."""
        while not self._closed:
            done, _ = self._ray.wait(references, num_returns=1, timeout=_POLL_S)
            if done:
                return done[0]
        raise ClosedError("the engine was closed while it ran; make a new one")

    def _outcome(self, reference: Any, name: str) -> Outcome:
        try:
            outcome = self._ray.get(reference, timeout=_CLEAN_UP_S)
        except self._ray.exceptions.RayError as error:
            raise PackError(
                f"task {name} was lost on the Ray cluster after {self._config.retries} retries "
                f"({type(error).__name__}: {str(error).strip().splitlines()[0]}); most often a node ran out of memory: "
                "use fewer workers. What was finished is kept, so run again"
            ) from error
        assert isinstance(outcome, Outcome)
        return outcome

    def _cancel(self, references: list[Any]) -> None:
        """Ends what is still in work, and waits until it has: the next run may write to the same names."""
        for reference in references:
            self._ray.cancel(reference, force=True)
        deadline = time.monotonic() + _CLEAN_UP_S
        while references and time.monotonic() < deadline:
            _, references = self._ray.wait(references, num_returns=1, timeout=_POLL_S)
