"""The iterator that the trainer sees."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from dalipipe.errors import ClosedError, ConfigError, PipelineError, StateError
from dalipipe.graphs.contract import BatchSource
from dalipipe.interrupts import Undisturbed
from dalipipe.loader.ahead import BatchesAhead
from dalipipe.loader.process import check_process
from dalipipe.loader.publish import StatePublisher
from dalipipe.loader.state import pack_state, unpack_state
from dalipipe.order.signature import OrderSignature
from dalipipe.telemetry import Recorder, Stage, StepBook
from dalipipe.telemetry.phases import WAITS

if TYPE_CHECKING:
    import torch

_Self = TypeVar("_Self", bound="Loader")
_TIERS = ("lake", "pool", "node", "memory", "device")
_WRITTEN_TIERS = ("node", "pool")


class Loader:
    """Batches of one rank, epoch after epoch.

    `for batch in loader` is one epoch; iterating again is the next one, also after `break`. A batch is a dict of
    tensors on `loader.device`. `state_dict()` counts the batches that were handed out, not those that are prefetched.

    Args:
        start: makes the endless source of batches from (epoch, step) on.
        num_steps: steps of one epoch for every rank.
        identity, order: the data set and the order that a state must match.
        batch_size: samples a step of this rank; `global_batch_size` of the whole job.
        device: where the tensors are.
        ahead: decoded batches kept ready; timeout_s: how long a batch may take.
        publisher: is told the position whenever a batch is asked for, that is, when those before it are done with.
        waited_on: stores; closed before anything else, so that no thread that is joined waits for an answer of theirs.
        owned: closed with the loader, last first.
    """

    def __init__(
        self,
        *,
        start: Callable[[int, int], BatchSource],
        num_steps: int,
        identity: str,
        order: OrderSignature,
        batch_size: int,
        device: torch.device,
        ahead: int,
        timeout_s: float,
        recorder: Recorder,
        publisher: StatePublisher | None = None,
        waited_on: tuple[Any, ...] = (),
        owned: tuple[Any, ...] = (),
    ) -> None:
        self.batch_size = batch_size
        self.global_batch_size = order.batch_size
        self.device = device
        self._start = start
        self._num_steps = num_steps
        self._identity = identity
        self._order = order
        self._ahead = ahead
        self._timeout_s = timeout_s
        self._recorder = recorder
        self.steps = StepBook(lambda: recorder.total("bytes_read.lake"))
        self._publisher = publisher
        self._opened_by = os.getpid()
        self._waited_on = waited_on
        self._owned = owned
        self._epoch, self._step = 0, 0
        self._begun = False  # the current epoch has an iterator already: the next one starts the next epoch
        self._running: BatchesAhead | None = None
        self._running_at: tuple[int, int] | None = None  # the batch that `_running` gives next
        self._iteration = 0
        self._taking = threading.Lock()
        self._closed = False
        reference = weakref.ref(self)
        self._atexit = lambda: _close_if_alive(reference)
        recorder.gauge("batches_ready", lambda: _batches_ready(reference))
        atexit.register(self._atexit)

    @property
    def epoch(self) -> int:
        """The epoch that is being delivered, or the next one when none is."""
        return self._epoch

    def __len__(self) -> int:
        """Batches of one epoch on this rank; equal on all ranks."""
        return self._num_steps

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        """Starts the next epoch, or goes on in the one of a loaded state.

        Raises:
            ConfigError: this is a DataLoader's worker, or another process than the one that opened the loader.
        """
        self._check_open()
        check_process(self._opened_by)
        if self._begun:
            self._epoch, self._step = self._epoch + 1, 0
        self._begun = True
        self._iteration += 1
        return self._batches(self._iteration)

    def set_epoch(self, epoch: int) -> None:
        """Makes `epoch` the next one to be iterated. The epoch advances by itself; this is for those who count.

        Naming the epoch that a loaded state is in keeps its position.

        Raises:
            ConfigError: a negative epoch.
        """
        self._check_open()
        if not isinstance(epoch, int) or isinstance(epoch, bool) or epoch < 0:
            raise ConfigError(f"set_epoch({epoch!r}): epochs are integers and count from 0")
        if epoch != self._epoch or self._begun:
            self._epoch, self._step, self._begun = epoch, 0, False
            self._iteration += 1

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch that was handed out: JSON-able, under 1 KB, without side effects."""
        return pack_state(self._identity, self._order, self._epoch, self._step)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on exactly after the last batch that was handed out when `state` was taken, at any world size.

        Raises:
            StateError: the state belongs to another data set, seed or order; both sides are printed.
        """
        self._check_open()
        epoch, step = unpack_state(state, self._identity, self._order)
        if step > self._num_steps:
            raise StateError(f"loader state is at step {step} of an epoch of {self._num_steps} steps")
        self._epoch, self._step, self._begun = epoch, step, False
        self._iteration += 1

    def stats(self) -> dict[str, Any]:
        """Cumulative figures of this process: counts, bytes by tier, seconds by stage."""
        seen = self._recorder.snapshot()

        def counts(*names: str) -> dict[str, int]:
            return {name: int(seen.get(name, 0)) for name in names}

        def by(prefix: str, names: tuple[str, ...]) -> dict[str, int]:
            return {name: int(seen.get(f"{prefix}.{name}", 0)) for name in names}

        return {
            **counts("samples", "batches", "quarantined", "retries", "hedges"),
            "quarantined_by": {
                name.removeprefix("quarantined."): int(value)
                for name, value in sorted(seen.items())
                if name.startswith("quarantined.")
            },
            "resized_by": {
                name.removeprefix("resized."): int(value)
                for name, value in sorted(seen.items())
                if name.startswith("resized.")
            },
            "wait_s": seen.get("wait_s", 0.0),
            "wait_by_s": self._waits(seen),
            "bytes_read": by("bytes_read", _TIERS),
            "bytes_written": by("bytes_written", _WRITTEN_TIERS),
            "blocks": {"near": int(seen.get("blocks_hit.node", 0)), "far": int(seen.get("blocks_missed", 0))},
            "decoded": {
                "found": sum(counts("samples_hit.decoded", "samples_hit.device").values()),
                "kept": sum(counts("samples_kept.decoded", "samples_kept.device").values()),
                "gave_way": int(seen.get("device_gave_way", 0)),
            },
            "state": {"published": int(seen.get("state_published", 0)), "failed": int(seen.get("state_failures", 0))},
            "stage_s": {stage.value: seen.get(f"stage_s.{stage.value}", 0.0) for stage in Stage},
        }

    def own(self, item: Any) -> None:
        """`item` is closed with the loader, before what it owned already."""
        self._owned = (*self._owned, item)

    def rest(self) -> None:
        """Ends the threads that work ahead, until the next batch is asked for; the position stays."""
        self._check_open()
        self._halt()

    def close(self) -> None:
        """Ends threads and frees memory within 2 s. Idempotent; the loader cannot be used afterwards."""
        if self._closed:
            return
        # Undisturbed: an interrupt would break off the joining of a thread. All are closed, last first, whatever one of
        # them raises.
        with Undisturbed(), contextlib.ExitStack() as stack:
            self._closed = True
            atexit.unregister(self._atexit)
            for item in self._owned:
                stack.callback(item.close)
            stack.callback(self._halt)
            for item in self._waited_on:
                stack.callback(item.close)
            if self._publisher is not None:
                stack.callback(self._publisher.close)

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            with contextlib.suppress(Exception):  # the interpreter may be half gone
                self.close()

    def _batches(self, iteration: int) -> Iterator[dict[str, torch.Tensor]]:
        try:
            while True:
                if iteration != self._iteration:
                    raise ClosedError("this iterator ended when the loader was iterated, moved or loaded again")
                if self._step >= self._num_steps:
                    break
                self._offer_state()
                yield self._next(iteration)
        finally:
            if iteration == self._iteration:
                self.steps.leave()
        self._epoch, self._step, self._begun = self._epoch + 1, 0, False
        self._offer_state()

    def _offer_state(self) -> None:
        if self._publisher is not None:
            self._publisher.offer(self.state_dict())

    @staticmethod
    def _waits(seen: Mapping[str, float]) -> dict[str, float]:
        """What the trainer waited for; these sum to `wait_s`."""
        return {name: seen.get(f"wait_s.{name}", 0.0) for name in WAITS}

    def _next(self, iteration: int) -> dict[str, torch.Tensor]:
        self._check_open()
        epoch, step = self._epoch, self._step
        if not self._taking.acquire(blocking=False):
            raise PipelineError("two threads iterate one loader; give each its own, or hand batches on by a queue")
        asked_at = self.steps.ask()
        try:
            tensors, waits = self._take(iteration)
        except BaseException:
            self.steps.gave_up()
            raise
        finally:
            self._taking.release()
        num = int(tensors["valid"].sum()) if "valid" in tensors else len(tensors["id"])
        if "valid" not in tensors and self._order.last_batch == "pad":
            tensors["valid"] = tensors["id"] >= 0  # in every batch, so that a trainer need not ask
        self._recorder.add("batches")
        self._recorder.add("samples", num)
        waited_s = time.perf_counter() - asked_at
        waits["handover"] = max(0.0, waits.get("handover", 0.0) + waited_s - sum(waits.values()))
        for cause, seconds in waits.items():
            self._recorder.add(f"wait_s.{cause}", seconds)
        self._recorder.add("wait_s", waited_s)
        self._recorder.observe("wait_s", waited_s)
        self.steps.got(epoch=epoch, step=step, samples=num, waits=waits)
        return tensors

    def _take(self, iteration: int) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        """The tensors of the next batch, and the seconds by what it lacked."""
        start_s = 0.0
        if self._running is None or self._running_at != (self._epoch, self._step):
            began_s = time.perf_counter()
            self._restart()
            start_s = time.perf_counter() - began_s
        running = self._running
        if running is None:
            raise ClosedError("the loader was closed while it started")
        try:
            batch, waits = running.next()
        except BaseException:
            if iteration == self._iteration:
                self._halt()  # a failed pipeline is not used again; the next iteration starts a fresh one
            raise
        if (batch.epoch, batch.step) != (self._epoch, self._step):
            raise AssertionError(f"batch {(batch.epoch, batch.step)} came where {(self._epoch, self._step)} was due")
        self._step += 1
        at_end = self._step == self._num_steps
        self._running_at = (self._epoch + 1, 0) if at_end else (self._epoch, self._step)
        waits["start"] = waits.get("start", 0.0) + start_s
        return batch.tensors, waits

    def _restart(self) -> None:
        self._halt()
        # An interrupt may come before and after: in between it would leave threads that nobody knows to join.
        with Undisturbed():
            source = self._start(self._epoch, self._step)
            self._running = BatchesAhead(
                source, depth=self._ahead, device=self.device, timeout_s=self._timeout_s, recorder=self._recorder
            )
            self._running.start()
            self._running_at = (self._epoch, self._step)
        if self._closed:  # meanwhile, by another thread, which did not see what was being started
            self._halt()

    def _halt(self) -> None:
        with Undisturbed():
            running, self._running, self._running_at = self._running, None, None
            if running is not None:
                running.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the loader was closed; make a new one")


def _close_if_alive(reference: weakref.ref[Loader]) -> None:
    loader = reference()
    if loader is not None:
        loader.close()


def _batches_ready(reference: weakref.ref[Loader]) -> float:
    loader = reference()
    running = loader._running if loader is not None else None
    return running.ready() if running is not None else 0
