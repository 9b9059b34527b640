"""Prometheus: a collector that reads plain counters when it is scraped, served over HTTP or as a text file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dalipipe.errors import ConfigError, DependencyError
from dalipipe.metrics.catalogue import FAMILIES, PREFIX, Family, values_of
from dalipipe.metrics.snapshot import RankSnapshot
from dalipipe.telemetry import LATENCY_BOUNDS_S

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_STEPS = "step_seconds"
Snapshot = Callable[[], RankSnapshot]


class RankCollector:
    """Turns the figures of one rank into Prometheus families at each scrape; labels are stage, tier and rank only."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Any]:
        """Called by prometheus_client."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        now = self._snapshot()
        rank = str(now.rank)
        rows = CounterMetricFamily(
            PREFIX + _STEPS, "Wall time of steps by row of the ledger; rows sum to wall time.", labels=["stage", "rank"]
        )
        for row, seconds in now.rows.items():
            rows.add_metric([row, rank], seconds)
        yield rows
        steps = CounterMetricFamily(f"{PREFIX}steps", "Steps that are done.", labels=["rank"])
        steps.add_metric([rank], now.num_steps)
        yield steps
        for family in FAMILIES:
            name, labels = PREFIX + family.name, [*([family.label] if family.label else []), "rank"]
            if family.kind == "histogram":
                counts = now.histograms.get(family.source)
                if counts is not None:
                    histogram = HistogramMetricFamily(name, family.help, labels=labels)
                    histogram.add_metric([rank], buckets=_buckets(counts), sum_value=counts[-1])
                    yield histogram
                continue
            kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
            found = [(label, value) for label, value in values_of(family, now)]
            if found:
                metric = kind(name, family.help, labels=labels)
                for label, value in found:
                    metric.add_metric([label, rank] if family.label else [rank], value)
                yield metric


def new_registry(snapshot: Snapshot) -> CollectorRegistry:
    """A registry of one rank's figures only.

    Raises:
        DependencyError: prometheus_client is not installed.
    """
    try:
        from prometheus_client import CollectorRegistry
    except ImportError as error:
        raise DependencyError(
            "metrics.port and metrics.textfile need prometheus_client: pip install 'dalipipe[metrics]'"
        ) from error
    registry = CollectorRegistry(auto_describe=False)
    registry.register(RankCollector(snapshot))
    return registry


class MetricsServer:
    """Serves a registry over HTTP on a thread; `port` is the one that it listens on.

    Raises:
        ConfigError: the port is taken or not allowed.
    """

    def __init__(self, registry: CollectorRegistry, *, host: str, port: int) -> None:
        from prometheus_client import start_http_server

        try:
            self._server, self._thread = start_http_server(port, addr=host, registry=registry)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"metrics.port: {host}:{port} (base port + local rank) cannot be listened on: {error}; another job of "
                "this node may use it, choose another metrics.port"
            ) from error
        self.port: int = self._server.server_port

    def close(self) -> None:
        """Ends the server; joins its thread. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(2.0)


def write_textfile(registry: CollectorRegistry, path: Path) -> None:
    """Writes the exposition format atomically."""
    from prometheus_client import generate_latest

    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_bytes(generate_latest(registry))
    draft.replace(path)


def parse_exposition(text: str) -> RankSnapshot:
    """Reads back what `RankCollector` serves: the figures of one rank, without facts that are no numbers.

    Raises:
        DependencyError: prometheus_client is not installed.
        ConfigError: the text holds no figures of dalipipe.
    """
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError as error:
        raise DependencyError(
            "reading metrics ports needs prometheus_client: pip install 'dalipipe[metrics]'"
        ) from error
    rows: dict[str, float] = {}
    counters: dict[str, float] = {}
    gauges: dict[str, float] = {}
    histograms: dict[str, list[float]] = {}
    num_steps, rank = 0, 0
    known = {PREFIX + family.name: family for family in FAMILIES}
    for metric in text_string_to_metric_families(text):
        family = known.get(metric.name)
        for sample in metric.samples:
            if not sample.name.startswith(PREFIX) or sample.name.endswith("_created"):
                continue
            rank = int(sample.labels["rank"])
            if metric.name == PREFIX + _STEPS:
                rows[sample.labels["stage"]] = sample.value
            elif metric.name == f"{PREFIX}steps":
                num_steps = int(sample.value)
            elif family is not None and family.kind == "histogram":
                _read_histogram(histograms, family, sample)
            elif family is not None:
                label = sample.labels.get(family.label, "") if family.label else ""
                target = counters if family.kind == "counter" else gauges
                target[f"{family.source}.{label}" if label else family.source] = sample.value
    if not counters:
        raise ConfigError("the address serves no figures of dalipipe; is it the metrics.port of a running job?")
    counters["wait_s"] = sum(value for name, value in counters.items() if name.startswith("wait_s."))
    return RankSnapshot(
        rank=rank,
        world_size=1,
        wall_s=sum(rows.values()),
        num_steps=num_steps,
        rows=rows,
        counters=counters,
        gauges=gauges,
        histograms=histograms,
        facts={name: gauges[name] for name in ("cpus", "decode_threads", "gpu_hour") if name in gauges},
    )


def _read_histogram(histograms: dict[str, list[float]], family: Family, sample: Any) -> None:
    counts = histograms.setdefault(family.source, [0.0] * (len(LATENCY_BOUNDS_S) + 2))
    if sample.name.endswith("_sum"):
        counts[-1] = sample.value
    elif sample.name.endswith("_bucket"):
        bound = float(sample.labels["le"])
        place = len(LATENCY_BOUNDS_S) if bound == float("inf") else LATENCY_BOUNDS_S.index(bound)
        counts[place] = sample.value - sum(counts[:place])


def _buckets(counts: list[float]) -> list[tuple[str, float]]:
    cumulative, buckets = 0.0, []
    for bound, count in zip((*map(str, LATENCY_BOUNDS_S), "+Inf"), counts[:-1], strict=True):
        cumulative += count
        buckets.append((bound, cumulative))
    return buckets
