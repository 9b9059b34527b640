"""What a run's own folder tells a plan, and how well the plan would have told that run."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dalipipe.cache.config import CacheConfig, MemoryConfig, TierConfig, TiersConfig
from dalipipe.errors import ConfigError, DataError
from dalipipe.loader.config import LoaderConfig
from dalipipe.metrics.evidence import RankSteps, Run, open_run
from dalipipe.order.config import ShuffleConfig
from dalipipe.prefetch.config import PrefetchConfig
from dalipipe.shards.shape import DataShape
from dalipipe.simulate.config import PlanConfig
from dalipipe.simulate.evicting import EVICTING
from dalipipe.simulate.job import Sample, simulate
from dalipipe.simulate.latency import LognormalLatency, MeasuredLatency
from dalipipe.simulate.plan import Measured, Settings, make_job
from dalipipe.storage.store import StorageConfig
from dalipipe.telemetry import LATENCY_BOUNDS_S
from dalipipe.units import parse_capacity

_BLOCKS, _DECODING = "lake_block_s", ("decode", "resize", "normalize", "salvage", "handover")
_MOST_FETCHES = 20_000
_MOST_RANKS = 16
_SETTLE_STEPS = 64
_FEW_STEPS = 5
# Of an epoch that begins cold, nearly all bytes come from the lake; of one on a warm cache, few do.
_COLD_SHARE = 0.5
_BUSY_SHARE, _FASTEST = 0.5, 0.01
_OF_FASTEST = "the fastest requests of the run, which had all that its lake gives"


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedRun:
    """A run as its folder tells it: what it was configured to do, what it measured, and its steps.

    first: (epoch, step) of the first step of the ledger that counts; waits: seconds that all ranks waited for each of
    the steps from there on, the slowest rank of each. kept_share: of the blocks that came, those that the node kept (or
    had, where the cache was full already).
    """

    settings: Settings
    shape: DataShape
    measured: Measured
    num_gpus: int
    ranks_per_node: int
    first: tuple[int, int]
    waits: npt.NDArray[np.float64]
    is_cold: bool
    kept_share: float

    def as_it_ran(self) -> Settings:
        """The settings under which a plan describes this very run: its cache holds what it was seen to keep."""
        kept = CacheConfig(policy="stream")
        policy = self.settings.cache.policy
        if self.kept_share > 0 and policy != "stream":
            share = self.kept_share * min(1.0, self.ranks_per_node / self.num_gpus)
            kept = CacheConfig(
                policy=policy if policy in EVICTING else "pin",
                tiers=TiersConfig(node=TierConfig(capacity=max(2, math.ceil(share * self.shape.num_bytes)))),
            )
        plan = PlanConfig(gpus=self.num_gpus, gpus_per_node=self.ranks_per_node)
        return replace(self.settings, cache=kept, plan=plan)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """AU and mean wait a step, as simulated and as it was, over the same steps of the same run of `gpus` ranks."""

    gpus: int
    steps: int
    predicted_au: float
    observed_au: float
    predicted_wait_s: float
    observed_wait_s: float
    about: str

    def to_json(self) -> dict[str, Any]:
        """A JSON-able dictionary."""
        return {**asdict(self), "difference_points": 100 * (self.predicted_au - self.observed_au)}


def observe(folder: Path) -> ObservedRun:
    """Reads a run folder.

    Raises:
        ConfigError: there is no such folder, or the run did what is not simulated.
        DataError: it holds no run, no finished step, no latencies of the lake, or was written by another release.
    """
    if not folder.is_dir():
        raise ConfigError(f"plan.from={folder} is no folder; give the run_dir of a job that has run")
    run = open_run(folder)
    settings = _settings(folder / "config.json", int(_fact(run, "memory_bytes", folder)))
    num_gpus = len(run.ranks)
    ranks_per_node = sum(rank.node == run.ranks[0].node for rank in run.ranks)
    steps = [rank for rank in run.steps if len(rank.wall_s)]
    waits = np.max([rank.waited_s[at] for rank, at in zip(run.steps, run.aligned(), strict=True)], axis=0)
    own_s = float(np.mean([(rank.wall_s - rank.waited_s).mean() for rank in steps]))
    decode_s = sum(run.counter(f"stage_s.{stage}") for stage in _DECODING) / max(1, num_gpus * run.num_steps)
    shape = DataShape(
        num_samples=int(_fact(run, "dataset_samples", folder)),
        block_samples=int(_fact(run, "block_samples", folder)),
        num_bytes=int(_fact(run, "dataset_bytes", folder)),
    )
    return ObservedRun(
        settings=settings,
        shape=shape,
        measured=_lake(
            run, settings, shape.num_bytes / shape.num_blocks, folder, Measured(step_s=own_s, decode_s=decode_s)
        ),
        num_gpus=num_gpus,
        ranks_per_node=ranks_per_node,
        first=(int(steps[0].epoch[0]), int(steps[0].key[0] % 2**32)),
        waits=waits,
        is_cold=_is_cold(run, steps[0], shape, settings),
        kept_share=_kept_share(run, shape),
    )


def compare(run: ObservedRun) -> Comparison | None:
    """Simulates the steps of a run and puts what was seen beside what was predicted; None where the ledger has fewer
    than five steps (`metrics.ledger=false` keeps none).

    Raises:
        ConfigError: the run was configured for something that is not simulated.
    """
    if len(run.waits) < _FEW_STEPS:
        return None
    job = make_job(run.as_it_ran(), run.shape, run.num_gpus, run.measured)
    ranks = min(job.num_gpus, _MOST_RANKS)
    nodes = max(1, min(job.num_nodes, ranks // job.ranks_per_node))
    sample = Sample(nodes=tuple(range(nodes)), ranks_a_node=min(job.ranks_per_node, _MOST_RANKS))
    # A little before, so that the depth and what is open are as they were.
    epoch, step = run.first
    before = min(step, _SETTLE_STEPS)
    a_step = max(1.0, job.batch_size / job.shape.block_samples)
    num_steps = max(1, min(len(run.waits), int(_MOST_FETCHES / (sample.num_ranks * a_step)) - before))
    warm = None if run.is_cold else lambda _block: True
    traces = simulate(job, sample=sample, start=(epoch, step - before), num_steps=before + num_steps, warm=warm)[
        before:
    ]
    predicted = np.array([step.wait_s for step in traces])
    observed = run.waits[:num_steps]
    step_s = job.step_s
    return Comparison(
        gpus=job.num_gpus,
        steps=num_steps,
        predicted_au=float(step_s / (step_s + predicted.mean())),
        observed_au=float(step_s / (step_s + observed.mean())),
        predicted_wait_s=float(predicted.mean()),
        observed_wait_s=float(observed.mean()),
        about=f"{num_steps} steps from step {step} of epoch {epoch} on, "
        f"{'an empty' if run.is_cold else 'a full'} cache, {sample.num_ranks} of {job.num_gpus} GPUs",
    )


def _kept_share(run: Run, shape: DataShape) -> float:
    missed, hit = run.counter("blocks_missed"), run.counter("blocks_hit.node") + run.counter("blocks_hit.memory")
    written_bytes = run.counter("bytes_written.node") + run.counter("bytes_written.memory")
    mean_bytes = shape.num_bytes / shape.num_blocks
    return min(1.0, max(written_bytes / max(1.0, missed * mean_bytes), hit / max(1.0, hit + missed)))


def _is_cold(run: Run, steps: RankSteps, shape: DataShape, settings: Settings) -> bool:
    """Whether the run's first epoch came from the lake."""
    in_epoch = steps.epoch == steps.epoch[0]
    size = settings.loader.batch_size or (settings.loader.global_batch_size or 0) // len(run.ranks)
    wanted_bytes = in_epoch.sum() * size * shape.num_bytes / shape.num_samples
    return bool(steps.lake_bytes[in_epoch].sum() > _COLD_SHARE * wanted_bytes)


def _lake(run: Run, settings: Settings, block_bytes: float, folder: Path, times: Measured) -> Measured:
    """`times` with what the run tells about the lake: latencies and, where it was at its limit, what it gives.

    A run that kept most of its fetch threads waiting had all that the lake (or the link to it) gives, and the latency
    of its blocks is that of a queue. Then, by Little's law, threads x block / latency is the rate, and the latency of
    an idle lake is that of the fastest requests.
    """
    blocks, reads = _histogram(run, _BLOCKS), _histogram(run, "lake_read_s")
    if blocks is None or reads is None:
        raise DataError(
            f"{folder} has no histogram of blocks from the lake (ranks/*.json: {_BLOCKS}): nothing was read from it, "
            "or an older release wrote it; run a job on an empty cache with run_dir=…, or declare plan.latency_s"
        )
    latency = MeasuredLatency(LATENCY_BOUNDS_S, blocks[:-1], blocks[-1])
    mean_s = blocks[-1] / sum(blocks[:-1])
    threads = len(run.ranks) * min(settings.prefetch.threads, settings.storage.concurrency)
    if _mean_rate(run) * mean_s / block_bytes > _BUSY_SHARE * threads:
        fastest_s = MeasuredLatency(LATENCY_BOUNDS_S, reads[:-1], 0.0).at(_FASTEST)
        return replace(
            times, latency=LognormalLatency(fastest_s, fastest_s, _OF_FASTEST), lake_rate=threads * block_bytes / mean_s
        )
    return replace(times, latency=latency)


def _mean_rate(run: Run) -> float:
    """Bytes a second from the lake over the steps that brought any, all ranks together."""
    aligned = list(zip(run.steps, run.aligned(), strict=True))
    wall_s = np.max([rank.wall_s[at] for rank, at in aligned], axis=0)
    num_bytes = np.sum([rank.lake_bytes[at] for rank, at in aligned], axis=0)
    last = int(np.flatnonzero(num_bytes)[-1]) + 1 if num_bytes.any() else 0
    return float(num_bytes[:last].sum() / wall_s[:last].sum()) if last else 0.0


def _histogram(run: Run, name: str) -> list[float] | None:
    """Counts and sum over all ranks; None where there are none."""
    found = [rank.histograms[name] for rank in run.ranks if sum(rank.histograms.get(name, [])[:-1])]
    return [sum(column) for column in zip(*found, strict=True)] if found else None


def _fact(run: Run, name: str, folder: Path) -> float:
    value = run.fact(name)
    if not isinstance(value, (int, float)) or not value > 0:
        raise DataError(f"{folder}/ranks/*.json does not tell {name}: it was written by another release")
    return value


def _settings(path: Path, memory_bytes: int) -> Settings:
    """What the run was configured to do, as far as it can be simulated: fractions of the host's memory as bytes, and
    neither a pool nor blocks that are brought ahead of the window."""
    try:
        told = json.loads(path.read_bytes())
        if told["data"]["mix"] or told["data"]["repeat"]:
            raise ConfigError(
                f"{path}: the run read several data sets, or some samples more often (data.mix, data.repeat), and plan "
                "simulates one data set, each sample once an epoch"
            )
        cache, tiers = _of(CacheConfig, told["cache"]), told["cache"]["tiers"]
        memory = parse_capacity(tiers["memory"]["capacity"], memory_bytes, "cache.tiers.memory.capacity")
        cache["tiers"] = TiersConfig(
            node=TierConfig(**_of(TierConfig, tiers["node"])), memory=MemoryConfig(capacity=memory)
        )
        prefetch = PrefetchConfig(**_of(PrefetchConfig, told["prefetch"]))
        cap_bytes = parse_capacity(prefetch.memory_cap, memory_bytes, "prefetch.memory_cap")
        return Settings(
            cache=CacheConfig(**cache),
            shuffle=ShuffleConfig(**_of(ShuffleConfig, told["shuffle"])),
            prefetch=replace(prefetch, memory_cap=cap_bytes, whole_epoch=False),
            loader=LoaderConfig(**_of(LoaderConfig, told["loader"])),
            storage=StorageConfig(**_of(StorageConfig, told["storage"])),
        )
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}; give the folder of a run of this release") from error
    except ConfigError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is not the configuration of a run of this release: {error!r}") from error


def _of(kind: type[Any], told: Mapping[str, Any]) -> dict[str, Any]:
    """Those values that this release knows."""
    known = {item.name for item in fields(kind)}
    return {name: value for name, value in told.items() if name in known}


def settings_of_run(run: ObservedRun, asked: Settings) -> Settings:
    """The run's own settings, with `plan.*` as asked for; node bandwidth as asked for where it is."""
    storage = run.settings.storage
    if asked.storage.bandwidth is not None:
        storage = replace(storage, bandwidth=asked.storage.bandwidth)
    return replace(run.settings, plan=asked.plan, storage=storage)
