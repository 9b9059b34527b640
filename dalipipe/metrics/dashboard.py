"""The Grafana dashboard as data; `python -m dalipipe.metrics.dashboard` prints what deploy/grafana/dashboards holds."""

from __future__ import annotations

import json
import sys
from typing import Any

_SELECT = '{job=~"$job", rank=~"$rank"}'
_SOURCE = {"type": "prometheus", "uid": "${DS_PROMETHEUS}"}
_WIDTH, _HEIGHT, _COLUMNS = 8, 7, 3


def _rate(metric: str, by: str, *, more: str = "", window: str = "1m") -> str:
    select = _SELECT[:-1] + (f", {more}" if more else "") + "}"
    return f"sum by ({by}) (rate(dalipipe_{metric}{select}[{window}]))"


def _quantile(share: float, metric: str) -> str:
    return f"histogram_quantile({share}, {_rate(f'{metric}_bucket', 'le', window='5m')})"


# (title, unit, stacked, [(query, legend)], (green from, red from) or None)
_Panel = tuple[str, str, bool, list[tuple[str, str]], "tuple[float, float] | None"]
_PANELS: list[_Panel] = [
    ("Where a step's time goes", "percentunit", True,
     [(f"{_rate('step_seconds_total', 'stage')} / scalar(sum(rate(dalipipe_step_seconds_total{_SELECT}[1m])))",
       "{{stage}}")], None),
    ("Stall of the job (healthy below 5 %)", "percentunit", False,
     [('job:dalipipe_stall:ratio{job=~"$job"}', "{{job}}")], (0, 0.05)),
    ("Money lost a day", "currencyUSD", False, [('job:dalipipe_idle_cost:per_day{job=~"$job"}', "{{job}}")], None),
    ("Loader wait by what was lacking", "percentunit", True,
     [(_rate("loader_wait_seconds_total", "stage"), "{{stage}}")], None),
    ("Wait for a batch", "s", False,
     [(_quantile(share, "batch_wait_seconds"), f"p{100 * share:g}") for share in (0.5, 0.95, 0.99)], None),
    ("Samples", "cps", False, [(_rate("samples_total", "rank"), "rank {{rank}}")], None),
    ("Bytes read by tier", "binBps", True, [(_rate("bytes_read_total", "tier"), "{{tier}}")], None),
    ("Hit ratio (blocks and bytes)", "percentunit", False,
     [(f"rank:dalipipe_hit:ratio{_SELECT}", "blocks, rank {{rank}}"),
      (f"rank:dalipipe_near_bytes:ratio{_SELECT}", "bytes, rank {{rank}}")], None),
    ("Bytes written by tier", "binBps", True, [(_rate("bytes_written_total", "tier"), "{{tier}}")], None),
    ("Lake read latency", "s", False,
     [(_quantile(share, "lake_read_seconds"), f"p{100 * share:g}") for share in (0.5, 0.95, 0.99)], None),
    ("Lake head and list: requests", "reqps", False, [(_rate("lake_requests_total", "stage"), "{{stage}}")], None),
    ("Lake head and list: latency", "s", False,
     [(_quantile(0.99, "lake_head_seconds"), "head p99"), (_quantile(0.99, "lake_list_seconds"), "list p99")], None),
    ("Use of the lake's bandwidth (healthy below 85 %)", "percentunit", False,
     [(f"rank:dalipipe_lake_use:ratio{_SELECT}", "rank {{rank}}")], (0, 0.85)),
    ("Cross-node traffic (healthy below 1 GB/s a node)", "binBps", False,
     [(_rate("cross_node_bytes_total", "instance"), "{{instance}}")], (0, 1e9)),
    ("Retries, hedges, quarantine", "cps", False,
     [(_rate(f"{name}_total", "job"), name) for name in ("retries", "hedges", "quarantined")], None),
    ("Queues: batches ready, prefetch depth", "short", False,
     [(f"dalipipe_batches_ready{_SELECT}", "ready, rank {{rank}}"),
      (f"dalipipe_prefetch_depth_steps{_SELECT}", "depth, rank {{rank}}")], None),
    ("CPU of decode threads (healthy 60 to 80 %)", "percentunit", False,
     [(f"rank:dalipipe_decode_cpu:ratio{_SELECT}", "rank {{rank}}")], (0, 0.8)),
    ("Thread time by stage", "percentunit", True, [(_rate("stage_seconds_total", "stage"), "{{stage}}")], None),
    ("SM activity (healthy above 85 %)", "percentunit", False,
     [(f"dalipipe_gpu_sm_active_ratio{_SELECT}", "rank {{rank}}"),
      ("avg by (gpu, Hostname) (DCGM_FI_PROF_SM_ACTIVE)", "DCGM {{Hostname}} gpu {{gpu}}")], None),
    ("Checkpoint upload", "binBps", False, [(_rate("checkpoint_upload_bytes_total", "rank"), "rank {{rank}}")], None),
    ("Node cache: blocks it could not keep", "cps", False,
     [(_rate("node_write_failures_total", "rank"), "rank {{rank}}")], None),
]  # fmt: skip


def dashboard() -> dict[str, Any]:
    """The dashboard, as Grafana imports or provisions it; needs the recording rules in deploy/prometheus."""
    return {
        "uid": "dalipipe",
        "id": None,
        "title": "dalipipe",
        "tags": ["dalipipe"],
        "schemaVersion": 39,
        "version": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {"name": "DS_PROMETHEUS", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
                _variable("job", "label_values(dalipipe_steps_total, job)"),
                _variable("rank", 'label_values(dalipipe_steps_total{job=~"$job"}, rank)'),
            ]
        },
        "panels": [_panel(place, panel) for place, panel in enumerate(_PANELS)],
    }


def queries() -> list[str]:
    """Every query of the dashboard."""
    return [query for _, _, _, targets, _ in _PANELS for query, _ in targets]


def _variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _panel(place: int, panel: _Panel) -> dict[str, Any]:
    title, unit, stacked, targets, limits = panel
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    if limits is not None:
        steps.append({"color": "red", "value": limits[1]})
    custom: dict[str, Any] = {"fillOpacity": 40 if stacked else 5, "lineWidth": 1, "showPoints": "never"}
    if stacked:
        custom["stacking"] = {"mode": "normal", "group": "A"}
    if limits is not None:
        custom["thresholdsStyle"] = {"mode": "line"}
    return {
        "id": place + 1,
        "type": "timeseries",
        "title": title,
        "datasource": _SOURCE,
        "gridPos": {
            "x": _WIDTH * (place % _COLUMNS),
            "y": _HEIGHT * (place // _COLUMNS),
            "w": _WIDTH,
            "h": _HEIGHT,
        },
        "fieldConfig": {
            "defaults": {
                "unit": unit,
                "min": 0,
                "custom": custom,
                "thresholds": {"mode": "absolute", "steps": steps},
            },
            "overrides": [],
        },
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + number), "datasource": _SOURCE, "expr": query, "legendFormat": legend}
            for number, (query, legend) in enumerate(targets)
        ],
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(dashboard(), indent=2) + "\n")
