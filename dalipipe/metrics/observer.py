"""Watches one loader: serves its figures, writes the folder of its run, samples host and GPU."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dalipipe.errors import ConfigError
from dalipipe.metrics.config import MetricsConfig
from dalipipe.metrics.gpu import GpuSampler
from dalipipe.metrics.host import ThreadCpu, python_threads, resident_share
from dalipipe.metrics.runfolder import RunWriter
from dalipipe.metrics.snapshot import RankSnapshot, take_snapshot
from dalipipe.telemetry import Recorder, StepBook
from dalipipe.world import World

_JOIN_S = 5.0
_SLOW_EVERY_S = 30.0

_log = logging.getLogger(__name__)


class RunObserver:
    """Owns everything that tells about one rank of a run; started by `open_observer`, ended by `close`.

    Args:
        copies: asked now and then for files of the lake and files of the cache that hold the same bytes on this host.
    """

    def __init__(
        self,
        config: MetricsConfig,
        *,
        recorder: Recorder,
        steps: StepBook,
        world: World,
        facts: Mapping[str, Any],
        run: RunWriter | None,
        gpu: GpuSampler | None = None,
        copies: Callable[[], tuple[Sequence[Path], Sequence[Path]]] | None = None,
    ) -> None:
        self._config = config
        self._recorder = recorder
        self._steps = steps
        self._world = world
        self._facts = dict(facts)
        self._run = run
        self._gpu = gpu
        self._copies = copies
        self._next_row = 0
        self._epoch = -1
        self._sampled: dict[str, float] = {}
        self._threads = ThreadCpu()
        self._cpu_s: dict[str, float] = {}
        self._seen = (time.perf_counter(), 0.0)
        self._slow_at_s = time.monotonic() + 1.0
        self._failed = False
        self._stop = threading.Event()
        self._server: Any = None
        self._registry: Any = None
        self._handler: _EventHandler | None = None
        self._textfile = Path(config.textfile.replace("{rank}", str(world.rank))) if config.textfile else None
        if config.port or config.textfile:
            from dalipipe.metrics.exporter import MetricsServer, new_registry

            self._registry = new_registry(self.snapshot)
            if config.port:
                port = config.port + world.local_rank
                self._server = MetricsServer(self._registry, host=config.host, port=port)
        self._thread = threading.Thread(target=self._watch, name="dalipipe-metrics", daemon=True)
        self._thread.start()
        if run is not None:
            self._handler = _EventHandler(run)
            logging.getLogger("dalipipe").addHandler(self._handler)
            run.event("start", facts=self._facts)

    def snapshot(self) -> RankSnapshot:
        """All figures just now."""
        now = take_snapshot(self._recorder, self._steps, self._world, self._facts)
        now.counters.update({f"cpu_s.{kind}": seconds for kind, seconds in self._cpu_s.items()})
        now.gauges.update(self._sampled)
        return now

    def flush(self) -> None:
        """Writes what a reader of the run folder or the textfile sees."""
        if self._textfile is not None:
            from dalipipe.metrics.exporter import write_textfile

            write_textfile(self._registry, self._textfile)
        if self._run is None:
            return
        rows = self._steps.after(self._next_row) if self._config.ledger else []
        if rows:
            self._run.steps(rows)
            self._next_row = rows[-1].number + 1
            if rows[-1].epoch != self._epoch:
                self._epoch = rows[-1].epoch
                self._run.event("epoch", epoch=self._epoch, step=rows[-1].step)
        now = self.snapshot()
        self._run.snapshot(now)
        self._run.series(now)

    def close(self) -> None:
        """Writes the last figures and ends the thread and the server within 5 s. Idempotent."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._thread.join(_JOIN_S)
        if self._handler is not None:
            logging.getLogger("dalipipe").removeHandler(self._handler)
        if self._server is not None:
            self._server.close()
        if self._gpu is not None:
            self._gpu.close()
        self._guarded(self.flush)
        if self._run is not None:
            rows, wall_s, num_steps = self._steps.totals()
            self._run.event("stop", steps=num_steps, wall_s=wall_s, rows=rows)

    def _watch(self) -> None:
        next_flush_s = time.monotonic()
        while not self._stop.wait(max(0.0, min(1.0, next_flush_s - time.monotonic()))):
            self._guarded(self._sample)
            if time.monotonic() >= next_flush_s:
                next_flush_s = time.monotonic() + self._config.every_s
                self._guarded(self.flush)

    def _guarded(self, work: Callable[[], None]) -> None:
        """A full disk costs the record, never the run: said once."""
        try:
            work()
        except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
            if not self._failed:
                self._failed = True
                _log.warning("figures of the run could not be written: %r; the run goes on", error)

    def _sample(self) -> None:
        if self._gpu is not None:
            self._sampled.update(self._gpu.sample())
        self._cpu_s = self._threads.read(python_threads())
        at_s, lake_bytes = time.perf_counter(), self._recorder.total("bytes_read.lake")
        before_s, before_bytes = self._seen
        if at_s - before_s >= 0.5:
            self._seen = (at_s, lake_bytes)
            highest = max(self._sampled.get("lake_bandwidth", 0.0), (lake_bytes - before_bytes) / (at_s - before_s))
            self._sampled["lake_bandwidth"] = float(self._facts.get("declared_bandwidth") or highest)
        if self._copies is not None and time.monotonic() >= self._slow_at_s:
            self._slow_at_s = time.monotonic() + _SLOW_EVERY_S
            lake, node = self._copies()
            self._sampled["page_cache_share.lake"] = resident_share(lake)
            self._sampled["page_cache_share.node"] = resident_share(node)


class _EventHandler(logging.Handler):
    """Warnings of the pipeline are events of the run."""

    def __init__(self, run: RunWriter) -> None:
        super().__init__(logging.WARNING)
        self._run = run

    def emit(self, record: logging.LogRecord) -> None:
        self._run.event("warning", logger=record.name, message=record.getMessage())


def open_observer(
    config: MetricsConfig,
    *,
    recorder: Recorder,
    steps: StepBook,
    world: World,
    facts: Mapping[str, Any],
    run_dir: Path | None,
    settings: Mapping[str, Any],
    pci_bus_id: str = "",
    copies: Callable[[], tuple[Sequence[Path], Sequence[Path]]] | None = None,
) -> RunObserver | None:
    """Starts to watch a loader, or returns None when nobody is to be told.

    Args:
        settings: the configuration, as it is written to the run folder by rank 0.
        pci_bus_id: of this rank's GPU; empty without one.

    Raises:
        ConfigError: a value of `config` can never work, the port is taken, or the folder cannot be written.
        DependencyError: prometheus_client is not installed.
    """
    check_config(config, world)
    if not (config.port or config.textfile or run_dir):
        return None
    run = RunWriter(run_dir, world.rank) if run_dir else None
    if run is not None and world.rank == 0:
        run.config(settings)
    gpu = None
    if config.gpu and pci_bus_id:
        from dalipipe.metrics.gpu import open_gpu_sampler

        gpu = open_gpu_sampler(pci_bus_id)
    return RunObserver(
        config, recorder=recorder, steps=steps, world=world, facts=facts, run=run, gpu=gpu, copies=copies
    )


def check_config(config: MetricsConfig, world: World) -> None:
    """Refuses values that can never work.

    Raises:
        ConfigError: names the key.
    """
    if not 0 <= config.port <= 65535 - world.local_world_size:
        raise ConfigError(f"metrics.port={config.port} must be 0 (none) or leave room for the local ranks below 65536")
    if not config.every_s >= 0.1:
        raise ConfigError(f"metrics.every_s={config.every_s} must be at least 0.1 s")
    if config.phases not in ("marks", "profiler"):
        raise ConfigError(f"metrics.phases={config.phases!r} is not one of marks, profiler")
    if config.profile_every < 10:
        raise ConfigError(f"metrics.profile_every={config.profile_every} must be at least 10 steps")
    if config.textfile and world.local_world_size > 1 and "{rank}" not in config.textfile:
        raise ConfigError(
            f"metrics.textfile={config.textfile!r} would be written by {world.local_world_size} ranks; put {{rank}} "
            "in it"
        )
    if config.textfile and not Path(config.textfile).absolute().parent.is_dir():
        raise ConfigError(f"metrics.textfile={config.textfile!r}: the folder does not exist")
