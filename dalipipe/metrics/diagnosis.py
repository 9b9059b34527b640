"""From the ledger to one sentence: what bounds a run, and which knob to turn.

The rules are ordered: what explains other symptoms comes first (a storm of bad images slows decoding, a slow rank makes
the others wait in collectives). Shares are of the wall time of steps without the first three.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dalipipe.metrics.evidence import Run, quantile
from dalipipe.metrics.judgement import Verdict, duration, percent
from dalipipe.units import format_bytes

# Loader waits below this share are healthy: AU 95 %.
WAIT_SHARE = 0.05
QUARANTINE_SHARE = 0.01
STRAGGLER_EXCESS = 0.10
STRAGGLER_STEPS = 0.6
COLLECTIVE_SHARE = 0.25
UNMARKED_SHARE = 0.10
HICCUP_SHARE = 0.15
HICCUP_FACTOR = 2.0
IDLE_SHARE = 0.15
REREAD_SHARE = 0.3
SECOND_EPOCH = 1.5
RESIDENT_SHARE = 0.5
MEMORY_SHARE = 0.25
_LAKE = ("lake", "index", "plan")


def diagnose(run: Run) -> Verdict:
    """What bounds the run. Pure: the same figures give the same sentence."""
    for rule in _RULES:
        verdict = rule(run)
        if verdict is not None:
            return verdict
    waited = run.stall_share()
    marked = any(name != "other" for rank in run.steps for name in rank.phases)
    evidence = [f"{percent(run.share(row))} {row}" for row in run.rows() if run.share(row) >= 0.005]
    return Verdict(
        kind="healthy",
        sentence=f"healthy: the trainer waits {percent(waited)} of its time for data and sets the pace itself",
        evidence=evidence,
        knob="none" if marked else "none; with dalipipe.step('forward') … the trainer's own time has rows too",
    )


def _quarantine(run: Run) -> Verdict | None:
    samples = run.counter("samples")
    bad = run.counter("quarantined")
    share = bad / samples if samples else 0.0
    if bad < 2 or share < QUARANTINE_SHARE:
        return None
    salvage_s = run.counter("stage_s.salvage")
    return Verdict(
        kind="quarantine-storm",
        sentence=f"quarantine storm: {bad:.0f} samples, {percent(share)} of those delivered, cannot be decoded",
        evidence=[
            f"{salvage_s:.2f} thread seconds went into finding them",
            "quarantine.jsonl in the run folder lists id and reason of each",
        ],
        knob="find what wrote them: `dalipipe verify decode=all`; pack again with pack.drop_corrupt=true",
    )


def _straggler(run: Run) -> Verdict | None:
    if len(run.steps) < 2:
        return None
    own = []
    for rank, at in zip(run.steps, run.aligned(), strict=True):
        collective = rank.phases.get("collective", np.zeros_like(rank.wall_s))
        own.append((rank.wall_s - collective)[at])
    table = np.array(own)
    if table.shape[1] == 0:
        return None
    means = table.mean(axis=1)
    slow = int(means.argmax())
    rest = float(np.median(np.delete(means, slow)))
    wall = float(np.mean([rank.wall_s.mean() for rank in run.steps]))
    steps = float((table.argmax(axis=0) == slow).mean())
    if means[slow] - rest < STRAGGLER_EXCESS * wall or steps < STRAGGLER_STEPS:
        return None
    where = run.ranks[slow]
    row, excess = _largest_excess(run, slow)
    return Verdict(
        kind="straggler",
        sentence=(
            f"straggler: rank {where.rank} on {where.host or 'its node'} needs {1000 * means[slow]:.0f} ms a step of "
            f"its own where the others need {1000 * rest:.0f} ms, most of it in {row}, and all wait for it"
        ),
        evidence=[
            f"it is the slowest rank in {percent(steps)} of the steps",
            f"its {row} takes {1000 * excess:.0f} ms more a step than the others'",
        ],
        knob=(
            f"look at node {where.node}: its disk, its CPUs, its network, other jobs"
            if row in _waits(run)
            else f"look at the GPU and the CPUs of node {where.node}: clocks, temperature, other jobs"
        ),
    )


def _largest_excess(run: Run, slow: int) -> tuple[str, float]:
    def mean_s(rank: int, row: str) -> float:
        steps = run.steps[rank]
        seconds = steps.waits.get(row, steps.phases.get(row))
        return float(seconds.mean()) if seconds is not None else 0.0

    excess = {
        row: mean_s(slow, row) - float(np.median([mean_s(rank, row) for rank in range(len(run.steps)) if rank != slow]))
        for row in run.rows()
        if row != "collective"
    }
    row = max(excess, key=lambda name: excess[name])
    return row, excess[row]


def _waiting(run: Run) -> Verdict | None:
    shares = {name: run.share(name) for name in _waits(run)}
    if max(sum(shares.values()), run.stall_share()) < WAIT_SHARE:
        return None
    grouped = {
        "lake": sum(shares.get(name, 0.0) for name in _LAKE),
        "pool": shares.get("pool", 0.0),
        "nvme": shares.get("node", 0.0) + shares.get("memory", 0.0),
        "decode": shares.get("decode", 0.0),
        "hand-over": shares.get("handover", 0.0),
    }
    cause = max(grouped, key=lambda name: grouped[name])
    if grouped[cause] <= 0:
        return None
    finer = {"lake": (_double, _thrash, _depth), "nvme": (_double,), "decode": (_queue, _threads)}
    for rule in finer.get(cause, ()):
        verdict = rule(run, grouped[cause])
        if verdict is not None:
            return verdict
    return _BOUND[cause](run, grouped[cause])


def _lake_bound(run: Run, share: float) -> Verdict:
    return Verdict(
        kind="lake-bound",
        sentence=f"lake-bound: the trainer waits {percent(share)} of its time for bytes from the lake",
        evidence=_lake_evidence(run),
        knob=(
            "prefetch.threads and storage.concurrency up while the lake has bandwidth left; else cache.tiers.node."
            "capacity, or a pool near the cluster"
        ),
    )


def _lake_evidence(run: Run) -> list[str]:
    counts = [sum(column) for column in zip(*_histograms(run, "lake_read_s"), strict=True)]
    evidence = [f"{format_bytes(int(run.counter('bytes_read.lake')))} in {run.counter('lake_requests.read'):.0f} reads"]
    if counts:
        evidence.append(
            f"half of the reads took up to {duration(quantile(counts, 0.5))}, 99 % {duration(quantile(counts, 0.99))}"
        )
    bandwidth = run.gauge("lake_bandwidth")
    if bandwidth:
        evidence.append(f"highest rate seen {format_bytes(int(bandwidth))}/s a rank")
    if run.counter("retries"):
        evidence.append(f"{run.counter('retries'):.0f} reads were done again")
    return evidence


def _thrash(run: Run, share: float) -> Verdict | None:
    """Later epochs read most of the set from the lake again although a cache is there."""
    if run.fact("cache_policy") == "stream" or str(run.fact("cache_capacity")) == "0":
        return None
    dataset = float(run.fact("dataset_bytes", 0) or 0)
    samples, whole = run.counter("samples"), float(run.fact("dataset_samples", 0) or 0)
    epochs = samples / whole if whole else 0.0
    if not dataset or epochs < SECOND_EPOCH:
        return None
    # All ranks together read the set once in the first epoch, whatever there is of cache.
    again = (run.counter("bytes_read.lake") - dataset) / (dataset * (epochs - 1))
    if again < REREAD_SHARE:
        return None
    return Verdict(
        kind="cache-thrash",
        sentence=(
            f"cache too small: {percent(min(1.0, again))} of the data set comes from the lake again in every epoch, "
            f"and the trainer waits {percent(share)} of its time for it"
        ),
        evidence=[
            f"the set has {format_bytes(int(dataset))}, cache.tiers.node.capacity is {run.fact('cache_capacity')}",
            *_lake_evidence(run),
        ],
        knob="cache.tiers.node.capacity up to the node's share of the set; else a pool, or more nodes",
    )


def _double(run: Run, share: float) -> Verdict | None:
    lake, node = run.gauge("page_cache_share.lake"), run.gauge("page_cache_share.node")
    cached_bytes = max(run.counter("bytes_written.node"), run.counter("bytes_read.node"))
    if run.fact("lake") != "file" or min(lake, node) < RESIDENT_SHARE or not cached_bytes:
        return None
    return Verdict(
        kind="double-caching",
        sentence=(
            "double caching: the lake is a disk of this host, so its shards and the node cache hold the same bytes "
            f"twice in the page cache, and the trainer waits {percent(share)} of its time for them"
        ),
        evidence=[
            f"{percent(lake)} of the shards and {percent(node)} of the cached blocks looked at are in memory",
            f"{format_bytes(int(cached_bytes))} went through cache.dir",
        ],
        knob="cache.policy=stream: a disk of the host needs no copy on a disk of the host",
    )


def _double_alone(run: Run) -> Verdict | None:
    """Without waits it is worth a word only where it takes much of the memory."""
    doubled = min(run.counter("bytes_written.node"), float(run.fact("dataset_bytes", 0) or 0))
    if 2 * doubled < MEMORY_SHARE * float(run.fact("memory_bytes", 0) or float("inf")):
        return None
    return _double(run, run.stall_share())


def _depth(run: Run, share: float) -> Verdict | None:
    idle = run.idle_share("prefetch")
    if str(run.fact("prefetch_depth_set", "auto")) == "auto" or idle < IDLE_SHARE:
        return None
    return Verdict(
        kind="queue-depth",
        sentence=(
            f"queue too shallow: fetching stands still {percent(idle)} of the time with a full window, and yet the "
            f"trainer waits {percent(share)} of its time for bytes: fast enough on average, not every time"
        ),
        evidence=_lake_evidence(run),
        knob=f"prefetch.depth={run.fact('prefetch_depth_set')} up, or auto",
    )


def _queue(run: Run, share: float) -> Verdict | None:
    idle = run.idle_share("batches")
    if idle < IDLE_SHARE:
        return None
    batches, queue = run.fact("device_batches", "?"), run.fact("queue_depth", "?")
    return Verdict(
        kind="queue-depth",
        sentence=(
            f"queue too shallow: decoding stands still {percent(idle)} of the time with a full queue, and yet the "
            f"trainer waits {percent(share)} of its time for it: fast enough on average, not for every batch"
        ),
        evidence=[f"prefetch.device_batches={batches}, prefetch.queue_depth={queue}"],
        knob="prefetch.device_batches up until the waits are gone (each costs one batch of memory)",
    )


def _threads(run: Run, share: float) -> Verdict | None:
    cpus, threads = run.fact("cpus"), run.fact("decode_threads")
    if not cpus or not threads or cpus / 2 < threads <= 2 * cpus:
        return None
    few = threads <= cpus / 2
    return Verdict(
        kind="num-threads",
        sentence=(
            f"wrong number of decode threads: {threads:.0f} on {cpus:.0f} CPUs of this rank, and the trainer waits "
            f"{percent(share)} of its time for decoding"
        ),
        evidence=["CPUs stand still" if few else "threads take the CPUs from each other"],
        knob=f"graph.num_threads={cpus:.0f} (0 chooses it)",
    )


def _decode_bound(run: Run, share: float) -> Verdict:
    cpus, threads = run.fact("cpus", 0), run.fact("decode_threads", 0)
    images = run.counter("samples")
    cpu_s = run.counter("cpu_s.decode")
    evidence = [f"{threads:.0f} decode threads on {cpus:.0f} CPUs"] if cpus and threads else []
    if images and cpu_s:
        evidence.append(f"{1000 * cpu_s / images:.2f} CPU ms in decode threads a sample")
    return Verdict(
        kind="decode-bound",
        sentence=f"decode-bound: the trainer waits {percent(share)} of its time for decoding, with all CPUs at work",
        evidence=evidence,
        knob=(
            "a GPU decodes with device=cuda; on CPUs: smaller images (pack.resize, graph.jpeg_scale), more CPUs a "
            "rank, or preprocessing elsewhere"
        ),
    )


def _bound(kind: str, what: str, knob: str) -> Callable[[Run, float], Verdict]:
    def verdict(run: Run, share: float) -> Verdict:
        rows = [f"{percent(run.share(row))} {row}" for row in run.rows() if run.share(row) >= 0.005]
        return Verdict(
            kind=kind,
            sentence=f"{kind}: the trainer waits {percent(share)} of its time for {what}",
            evidence=rows,
            knob=knob,
        )

    return verdict


_BOUND: dict[str, Callable[[Run, float], Verdict]] = {
    "lake": _lake_bound,
    "decode": _decode_bound,
    "pool": _bound(
        "pool-bound",
        "bytes from the pool",
        "more pool nodes or bandwidth; cache.tiers.node.capacity up, so that less is asked of it",
    ),
    "nvme": _bound(
        "nvme-bound",
        "bytes from the node's cache",
        "cache.dir on a faster disk, prefetch.threads up; look at other users of the disk",
    ),
    "hand-over": _bound(
        "hand-over-bound",
        "batches that are decoded already",
        "smaller or fewer fields (data.fields, graph.dtype=uint8 or float16); look for a trainer that holds the GIL",
    ),
}


def _collective(run: Run) -> Verdict | None:
    share = run.share("collective")
    if share < COLLECTIVE_SHARE:
        return None
    return Verdict(
        kind="collective-bound",
        sentence=f"collective-bound: {percent(share)} of the time goes into collectives, evenly on all ranks",
        evidence=[f"the trainer waits {percent(run.stall_share())} of its time for data"],
        knob="the network and the size of the gradients: bucket sizes, overlap with backward, gradient accumulation",
    )


def _trainer(run: Run) -> Verdict | None:
    if not any(name != "other" for rank in run.steps for name in rank.phases):
        return None  # nothing is marked: the whole step is `other`, and nothing can be said of it
    other = run.share("other")
    own = np.concatenate([rank.wall_s - rank.waited_s for rank in run.steps])
    excess = np.maximum(0.0, own - HICCUP_FACTOR * np.median(own)).sum() / max(1e-9, own.sum())
    if other < UNMARKED_SHARE and excess < HICCUP_SHARE:
        return None
    if other >= UNMARKED_SHARE:
        what = f"{percent(other)} of the time is the trainer's, outside of the phases it marks"
    else:
        what = f"{percent(float(excess))} of the time goes into a few steps that take far longer than the median"
    return Verdict(
        kind="trainer-bound",
        sentence=f"trainer-bound: {what}; data is there in time",
        evidence=[
            f"the trainer waits {percent(run.stall_share())} of its time for data",
            f"median step {duration(float(np.median(own)))}, longest {duration(float(own.max()))} without waits",
        ],
        knob="look for .item(), logging, evaluation and checkpoints between steps; mark them with dalipipe.step",
    )


_RULES: tuple[Callable[[Run], Verdict | None], ...] = (
    _quarantine,
    _straggler,
    _waiting,
    _collective,
    _trainer,
    _double_alone,
)


def _waits(run: Run) -> list[str]:
    return list(dict.fromkeys(name for rank in run.steps for name in rank.waits))


def _histograms(run: Run, name: str) -> list[list[float]]:
    return [rank.histograms[name] for rank in run.ranks if name in rank.histograms]
