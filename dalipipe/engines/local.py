"""Tasks on this machine: in this process, or in worker processes of its own."""

from __future__ import annotations

import multiprocessing
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, TypeVar

from dalipipe.engines.engine import TaskDone
from dalipipe.engines.worker import Outcome, Ready, serve
from dalipipe.errors import ClosedError, ConfigError, PackError

T = TypeVar("T")
R = TypeVar("R")

_TERMINATE_S = 1.0
_KILL_S = 0.5


class LocalEngine:
    """Runs tasks in `workers` processes; with at most one, in the calling process.

    Processes are spawned, never forked (object-store clients and DALI do not survive a fork), get one task at a time,
    wait for the next `run` when all tasks of one are done, and die with this process even when it is killed. Each task
    is pickled when its turn comes.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._closed = False
        self._crews: list[_Crew] = []
        self._idle: _Crew | None = None
        self._lock = threading.Lock()

    def prepare(self, num_tasks: int) -> None:
        """Starts the worker processes that so many tasks will need; see `Engine.prepare`."""
        if self._workers <= 1 or num_tasks <= 1 or self._closed:
            return
        crew = self._take_crew()
        try:
            crew.hire(min(self._workers, num_tasks))
        finally:
            if not self._keep(crew):
                self._dismiss(crew)

    def run(self, function: Callable[[T], R], tasks: Sequence[T], *, names: Sequence[str]) -> Iterator[TaskDone]:
        """Runs all tasks; see `Engine.run`.

        Raises:
            ConfigError: there are not as many names as tasks, or `function` cannot be pickled.
            PackError: a worker died, or a result cannot be pickled; names the task.
            ClosedError: the engine was closed, before or meanwhile.
        """
        if len(names) != len(tasks):
            raise ConfigError(f"{len(tasks)} tasks were given with {len(names)} names; each task needs its name")
        if self._closed:
            raise ClosedError("the engine is closed; make a new one")
        if self._workers <= 1 or len(tasks) <= 1:
            return self._run_here(function, tasks)
        return self._run_crew(picklable(function), tasks, names)

    def close(self) -> None:
        """Ends every worker within 2 s. Idempotent."""
        with self._lock:
            self._closed = True
            crews, idle, self._idle = list(self._crews), self._idle, None
        for crew in crews:
            crew.dismiss()
        if idle is not None:
            idle.release()

    def _run_here(self, function: Callable[[T], R], tasks: Sequence[T]) -> Iterator[TaskDone]:
        for index, task in enumerate(tasks):
            result = function(task)
            if self._closed:
                raise ClosedError("the engine was closed while it ran; make a new one")
            yield TaskDone(index=index, result=result)

    def _run_crew(self, function: bytes, tasks: Sequence[Any], names: Sequence[str]) -> Iterator[TaskDone]:
        crew = self._take_crew()
        is_done = False
        try:
            crew.hire(min(self._workers, len(tasks)))
            yield from crew.work(function, tasks, names)
            is_done = True
        finally:
            if not (is_done and self._keep(crew)):
                self._dismiss(crew)

    def _dismiss(self, crew: _Crew) -> None:
        crew.dismiss()
        with self._lock:
            self._crews.remove(crew)
        crew.release()

    def _take_crew(self) -> _Crew:
        """The one that waits, or a new one: runs at the same time have workers of their own."""
        with self._lock:
            if self._closed:
                raise ClosedError("the engine is closed; make a new one")
            crew, self._idle = self._idle or _Crew(), None
            if crew not in self._crews:
                self._crews.append(crew)
        return crew

    def _keep(self, crew: _Crew) -> bool:
        with self._lock:
            if self._closed or self._idle is not None:
                return False
            self._idle = crew
        return True


class _Member:
    """One worker process and the task that it holds."""

    def __init__(self, process: SpawnProcess, pipe: Connection) -> None:
        self.process = process
        self.pipe = pipe
        self.task: int | None = None
        self.started = False


class _Crew:
    """Workers that do one `run` at a time."""

    def __init__(self) -> None:
        self._names: Sequence[str] = ()
        self._members: list[_Member] = []
        self._dismissed = False
        self._lock = threading.Lock()

    def hire(self, num_workers: int) -> None:
        """Spawns workers until there are so many. SIGINT stays blocked in them until they ignore it."""
        context = multiprocessing.get_context("spawn")
        for member in [one for one in self._members if not one.process.is_alive()]:  # died while there was no work
            with self._lock:
                self._members.remove(member)
            member.pipe.close()
        for number in range(len(self._members), num_workers):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs,), name=f"dalipipe-worker-{number}", daemon=True)
            with self._lock:
                if self._dismissed:
                    ours.close()
                    theirs.close()
                    return
                blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
                try:
                    process.start()
                    self._members.append(_Member(process, ours))
                finally:
                    theirs.close()
                    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def work(self, function: bytes, tasks: Sequence[Any], names: Sequence[str]) -> Iterator[TaskDone]:
        """Deals the tasks in order, one to each free worker, and yields the results as they come."""
        self._names = names
        waiting = iter(range(len(tasks)))

        def deal(member: _Member) -> None:
            member.task = next(waiting, None)
            if member.task is not None:
                self._send(member, (function, pickle.dumps(tasks[member.task])))

        for member in self._members:
            if member.started:
                deal(member)
        for _ in range(len(tasks)):
            done: TaskDone | None = None
            while done is None:
                member = self._next_to_speak()
                done = self._hear(member)
                deal(member)
            yield done

    def dismiss(self) -> None:
        """Ends all workers: SIGTERM, so that tasks clean up, then SIGKILL. Idempotent, from any thread."""
        with self._lock:
            self._dismissed = True
            members = list(self._members)
        for member in members:
            member.process.terminate()
        deadline = time.monotonic() + _TERMINATE_S
        for member in members:
            member.process.join(max(deadline - time.monotonic(), 0))
        for member in members:
            if member.process.is_alive():
                member.process.kill()
                member.process.join(_KILL_S)

    def release(self) -> None:
        """Closes the pipes; only for the thread that reads them."""
        for member in self._members:
            member.pipe.close()

    def _next_to_speak(self) -> _Member:
        """Waits for a worker that has an answer or has died. How long a task may take is the task's affair."""
        by_pipe = {member.pipe: member for member in self._members}
        try:
            ready = wait(list(by_pipe))
        except OSError as error:
            raise self._closed_error() from error
        return next(member for pipe, member in by_pipe.items() if pipe in ready)

    def _hear(self, member: _Member) -> TaskDone | None:
        """What the worker has to say; None when it has just started."""
        try:
            message = member.pipe.recv()
        except (EOFError, OSError) as error:
            raise self._death(member) from error
        if isinstance(message, Ready):
            member.started = True
            return None
        assert isinstance(message, Outcome)
        assert member.task is not None
        return TaskDone(index=member.task, result=result_of(message, self._names[member.task]))

    def _send(self, member: _Member, task: tuple[bytes, bytes]) -> None:
        try:
            member.pipe.send(task)
        except OSError as error:
            raise self._death(member) from error

    def _death(self, member: _Member) -> Exception:
        if self._dismissed:
            return self._closed_error()
        member.process.join(_KILL_S)
        how = _describe_exit(member.process.exitcode)
        if not member.started:
            return PackError(
                f"worker {member.process.name} {how} before its first task; a script that uses several workers must "
                "do its work under `if __name__ == '__main__':`, as Python's spawned processes need"
            )
        held = [self._names[member.task]] if member.task is not None else []
        others = [self._names[other.task] for other in self._members if other is not member and other.task is not None]
        return PackError(
            f"worker {member.process.name} {how} while it worked on {', '.join(held) or 'nothing'}; "
            f"given up with it: {', '.join(others) or 'nothing'}. What was finished is kept, so run again"
        )

    def _closed_error(self) -> ClosedError:
        return ClosedError("the engine was closed while it ran; make a new one")


class _WorkerTraceback(Exception):  # noqa: N818 - shown as the cause, never raised by itself
    """The traceback of a task's exception in its worker process."""

    def __str__(self) -> str:
        return "in the worker process:\n" + str(self.args[0])


def result_of(outcome: Outcome, name: str) -> object:
    """The task's result; its exception is raised as it is, with the worker's traceback as the cause."""
    if outcome.payload is None:
        what = "raised an exception" if outcome.failed else "returned a result"
        raise PackError(f"task {name} {what} that cannot be pickled to leave its worker process") from _WorkerTraceback(
            outcome.trace
        )
    value: object = pickle.loads(outcome.payload)
    if outcome.failed:
        assert isinstance(value, Exception)
        raise value from _WorkerTraceback(outcome.trace)
    return value


def picklable(function: Callable[..., Any]) -> bytes:
    """The pickled function that workers run.

    Raises:
        ConfigError: it cannot be pickled.
    """
    try:
        return pickle.dumps(function)
    except Exception as error:
        raise ConfigError(
            f"{function!r} cannot run in worker processes: it must be a module-level function, or a partial of one"
        ) from error


def _describe_exit(exitcode: int | None) -> str:
    if exitcode == -signal.SIGKILL:
        return "was killed (SIGKILL; most often the machine ran out of memory: use fewer workers)"
    if exitcode is not None and exitcode < 0:
        return f"was ended by signal {-exitcode}"
    return f"ended with exit code {exitcode}"
