"""The names under which figures are exported, and the figure behind each. Nothing here needs prometheus_client."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dalipipe.metrics.snapshot import RankSnapshot

PREFIX = "dalipipe_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One exported metric. `source` is the dotted name behind it; with a label, what follows `source.` is its value."""

    name: str
    source: str
    kind: str  # counter | gauge | histogram
    help: str
    label: str = ""


FAMILIES = (
    Family(name="samples", source="samples", kind="counter", help="Samples handed to the trainer."),
    Family(name="batches", source="batches", kind="counter", help="Batches handed to the trainer."),
    Family(
        name="loader_wait_seconds",
        source="wait_s",
        kind="counter",
        label="stage",
        help="Time the trainer spent in the loader, by what the awaited batch lacked.",
    ),
    Family(name="batch_wait_seconds", source="wait_s", kind="histogram", help="Wait for one batch."),
    Family(
        name="stage_seconds",
        source="stage_s",
        kind="counter",
        label="stage",
        help="Thread time in each stage of the pipeline.",
    ),
    Family(
        name="hand_over_put_wait_seconds",
        source="put_wait_s",
        kind="counter",
        label="stage",
        help="Time a full hand-over waited for its downstream side.",
    ),
    Family(
        name="hand_over_get_wait_seconds",
        source="get_wait_s",
        kind="counter",
        label="stage",
        help="Time an empty hand-over waited for its upstream side, by what was lacking.",
    ),
    Family(name="bytes_read", source="bytes_read", kind="counter", label="tier", help="Bytes read, by tier."),
    Family(name="bytes_written", source="bytes_written", kind="counter", label="tier", help="Bytes written, by tier."),
    Family(
        name="cross_node_bytes",
        source="cross_node_bytes",
        kind="counter",
        help="Bytes that came from another node of the cluster (pool and preprocessing service).",
    ),
    Family(name="blocks_hit", source="blocks_hit", kind="counter", label="tier", help="Blocks found near, by tier."),
    Family(name="blocks_missed", source="blocks_missed", kind="counter", help="Blocks that came from the lake."),
    Family(
        name="blocks_joined",
        source="blocks_joined",
        kind="counter",
        help="Of those, blocks that came with the request for a neighbour.",
    ),
    Family(
        name="lake_requests",
        source="lake_requests",
        kind="counter",
        label="stage",
        help="Requests to the lake: read, head, list.",
    ),
    Family(name="lake_read_seconds", source="lake_read_s", kind="histogram", help="One read from the lake."),
    Family(name="lake_block_seconds", source="lake_block_s", kind="histogram", help="One block from the lake."),
    Family(name="lake_head_seconds", source="lake_head_s", kind="histogram", help="One head request to the lake."),
    Family(name="lake_list_seconds", source="lake_list_s", kind="histogram", help="One listing of the lake."),
    Family(
        name="lake_bandwidth_bytes_per_second",
        source="lake_bandwidth",
        kind="gauge",
        help="Declared bandwidth of the lake, else the highest seen by this rank.",
    ),
    Family(name="retries", source="retries", kind="counter", help="Reads of the lake that were done again."),
    Family(name="hedges", source="hedges", kind="counter", help="Second requests sent because the first was slow."),
    Family(name="hedges_won", source="hedges_won", kind="counter", help="Second requests that answered first."),
    Family(name="throttled", source="throttled", kind="counter", help="Answers of the lake that asked for less."),
    Family(name="quarantined", source="quarantined", kind="counter", help="Samples that could not be decoded."),
    Family(
        name="node_write_failures",
        source="node_write_failures",
        kind="counter",
        help="Blocks the node cache could not keep.",
    ),
    Family(
        name="late_on_device",
        source="late_on_device",
        kind="counter",
        help="Batches whose work on the GPU was not done when they were handed over.",
    ),
    Family(
        name="cpu_seconds",
        source="cpu_s",
        kind="counter",
        label="stage",
        help="CPU time of this process, and of its decode and fetch threads.",
    ),
    Family(name="prefetch_depth_steps", source="prefetch_depth", kind="gauge", help="Steps kept ready or under way."),
    Family(name="batches_ready", source="batches_ready", kind="gauge", help="Decoded batches that lie ready."),
    Family(name="decode_threads", source="decode_threads", kind="gauge", help="Threads that decode."),
    Family(name="cpus", source="cpus", kind="gauge", help="CPUs this process may use, its share of the node."),
    Family(name="gpu_hour_cost", source="gpu_hour", kind="gauge", help="cost.gpu_hour."),
    Family(
        name="gpu_sm_active_ratio",
        source="gpu_sm_active",
        kind="gauge",
        help="Share of time SMs had a warp (NVML GPM).",
    ),
    Family(
        name="gpu_utilization_ratio",
        source="gpu_utilization",
        kind="gauge",
        help="Share of time any kernel was resident (NVML); 1 also while spinning in NCCL.",
    ),
    Family(name="gpu_memory_used_bytes", source="gpu_memory_used", kind="gauge", help="GPU memory in use."),
    Family(name="gpu_pcie_rx_bytes_per_second", source="gpu_pcie_rx", kind="gauge", help="PCIe traffic to the GPU."),
    Family(name="gpu_jpeg_utilization_ratio", source="gpu_jpeg", kind="gauge", help="Use of the JPEG engines."),
    Family(
        name="checkpoint_upload_bytes",
        source="checkpoint_upload_bytes",
        kind="counter",
        help="Bytes of checkpoints uploaded.",
    ),
    Family(
        name="checkpoint_upload_seconds",
        source="checkpoint_upload_s",
        kind="counter",
        help="Time of checkpoint uploads.",
    ),
)
# Served even while 0, so that a query finds the series from the first scrape on.
_ALWAYS = ("retries", "hedges", "quarantined", "blocks_missed", "samples", "batches", "cross_node_bytes")


def values_of(family: Family, snapshot: RankSnapshot) -> Iterator[tuple[str, float]]:
    """(label value, figure) of one counter or gauge family in a snapshot."""
    figures = snapshot.counters if family.kind == "counter" else {**snapshot.gauges, **_numbers(snapshot)}
    if family.source == "cross_node_bytes":
        yield "", figures.get("bytes_read.pool", 0.0) + figures.get("bytes_read.service", 0.0)
    elif family.label:
        start = f"{family.source}."
        yield from ((name[len(start) :], value) for name, value in figures.items() if name.startswith(start))
    elif family.source in figures or family.source in _ALWAYS:
        yield "", figures.get(family.source, 0.0)


def _numbers(snapshot: RankSnapshot) -> dict[str, float]:
    return {name: float(fact) for name, fact in snapshot.facts.items() if isinstance(fact, (int, float))}
