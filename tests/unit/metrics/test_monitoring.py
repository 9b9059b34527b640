"""Prometheus: what is served, what the rules say of it, and a real server that scrapes a real run."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import generate_latest

import dalipipe as dp
from dalipipe.errors import ConfigError
from dalipipe.metrics.catalogue import FAMILIES
from dalipipe.metrics.dashboard import dashboard, queries
from dalipipe.metrics.evidence import run_from_snapshots
from dalipipe.metrics.exporter import new_registry, parse_exposition
from dalipipe.metrics.live import addresses, scrape, watch_for
from dalipipe.metrics.snapshot import RankSnapshot, take_snapshot
from dalipipe.telemetry import Recorder, StepBook
from tests.support.waiting import wait_until

_ROOT = Path(__file__).parents[3]
_RULES = _ROOT / "deploy/prometheus/dalipipe.rules.yaml"
_DASHBOARD = _ROOT / "deploy/grafana/dashboards/dalipipe.json"

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (Debian package prometheus)"
)
needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="no Prometheus server here (Debian package prometheus)"
)


def full_snapshot() -> RankSnapshot:
    """A snapshot in which every family has a figure."""
    recorder, steps = Recorder(), StepBook()
    for family in FAMILIES:
        if family.kind == "histogram":
            recorder.observe(family.source, 0.02)
        elif family.kind == "gauge":
            recorder.gauge(family.source, lambda: 0.5)
        else:
            recorder.add(f"{family.source}.lake" if family.label else family.source, 3)
    for number in range(3):
        steps.ask()
        steps.got(epoch=0, step=number, samples=4, waits={"lake": 0.0})
        with dp.step("forward"):
            pass
    steps.leave()
    return take_snapshot(recorder, steps, dp.World(rank=3, world_size=4), {"gpu_hour": 2.0})


def test_what_is_served_reads_back_as_the_same_figures() -> None:
    now = full_snapshot()
    text = generate_latest(new_registry(lambda: now)).decode()
    back = parse_exposition(text)
    assert back.rank == 3
    assert back.num_steps == 3
    assert back.rows == pytest.approx(now.rows)
    assert back.histograms == now.histograms
    for name in ("bytes_read.lake", "samples", "wait_s.lake", "put_wait_s.lake", "lake_requests.lake"):
        assert back.counters[name] == now.counters[name]
    labels = {label for line in text.splitlines() if "{" in line for label in _labels(line)}
    assert labels == {"rank", "stage", "tier", "le"}


def _labels(line: str) -> list[str]:
    return [part.partition("=")[0] for part in line[line.index("{") + 1 : line.index("}")].split(",")]


@needs_promtool
def test_promtool_likes_names_rules_and_every_query_of_the_dashboard(tmp_path: Path) -> None:
    text = generate_latest(new_registry(full_snapshot))
    found = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, check=False, timeout=30)
    assert found.returncode == 0, found.stdout + found.stderr
    asked = [
        target["expr"].replace("$job", ".*").replace("$rank", ".*")
        for panel in dashboard()["panels"]
        for target in panel["targets"]
    ]
    assert len(asked) == len(queries()) >= 30
    rules = [{"record": f"panel:query:{number}", "expr": query} for number, query in enumerate(asked)]
    path = tmp_path / "dashboard.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    for file in (_RULES, path):
        found = subprocess.run(["promtool", "check", "rules", str(file)], capture_output=True, check=False, timeout=30)
        assert found.returncode == 0, found.stdout + found.stderr
    path.write_text(path.read_text().replace("rate(", "rate((", 1))
    broken = subprocess.run(["promtool", "check", "rules", str(path)], capture_output=True, check=False, timeout=30)
    assert broken.returncode != 0


@needs_promtool
def test_alerts_fire_when_they_should_and_only_then(tmp_path: Path) -> None:
    def series(name: str, per_15_s: float, more: str = "", rank: int = 0) -> dict[str, str]:
        return {
            "series": f'dalipipe_{name}{{job="j", instance="h:1", rank="{rank}"{more}}}',
            "values": f"0+{per_15_s}x200",
        }

    def case(name: str, inputs: list[dict[str, str]], alert: str, fires: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "name": name,
            "interval": "15s",
            "input_series": inputs,
            "alert_rule_test": [{"eval_time": "40m", "alertname": alert, "exp_alerts": fires}],
        }

    stall = {
        "exp_labels": {"job": "j", "severity": "warning"},
        "exp_annotations": {
            "summary": "j waits 20% of its time for data",
            "action": "dalipipe doctor HOST:PORT-PORT names the stage and the knob",
        },
    }
    waits = "loader_wait_seconds_total"
    slow = [series(waits, 3, ', stage="lake"', rank=1), series(waits, 0.1, ', stage="lake"')]
    quick = [series(waits, 0.1, ', stage="lake"'), series(waits, 9, ', stage="start"')]
    storm = [series("quarantined_total", 1), series("samples_total", 50)]
    tests = [
        case("slow lake", slow, "DalipipeWaitsForData", [stall]),
        case("healthy", quick, "DalipipeWaitsForData", []),
        case("few bad", [series("quarantined_total", 1), series("samples_total", 500)], "DalipipeQuarantineStorm", []),
        case(
            "storm",
            storm,
            "DalipipeQuarantineStorm",
            [
                {
                    "exp_labels": {"job": "j", "severity": "critical"},
                    "exp_annotations": {"summary": "2% of the samples of j cannot be decoded"},
                }
            ],
        ),
    ]
    path = tmp_path / "tests.yml"
    path.write_text(yaml.safe_dump({"rule_files": [str(_RULES)], "evaluation_interval": "15s", "tests": tests}))
    found = subprocess.run(["promtool", "test", "rules", str(path)], capture_output=True, check=False, timeout=60)
    assert found.returncode == 0, found.stdout.decode() + found.stderr.decode()


def test_the_shipped_dashboard_is_the_one_of_the_code() -> None:
    assert json.loads(_DASHBOARD.read_text()) == dashboard(), (
        "renew it: python -m dalipipe.metrics.dashboard > deploy/grafana/dashboards/dalipipe.json"
    )


def test_every_metric_that_a_query_names_is_exported() -> None:
    exported = {f"dalipipe_{family.name}" for family in FAMILIES} | {"dalipipe_step_seconds", "dalipipe_steps"}
    recorded = {rule["record"] for group in yaml.safe_load(_RULES.read_text())["groups"] for rule in group["rules"]
                if "record" in rule}  # fmt: skip
    asked = queries() + [r["expr"] for g in yaml.safe_load(_RULES.read_text())["groups"] for r in g["rules"]]
    for query in asked:
        for word in _names(query):
            base = word.removesuffix("_bucket").removesuffix("_total")
            assert word in recorded or base in exported or word in exported, word


def _names(query: str) -> list[str]:
    import re

    return re.findall(r"(?:rank:|job:)?dalipipe_[a-z_]+(?::[a-z_]+)?", query)


@contextmanager
def training(packed: Path, root: Path, *more: str) -> Iterator[Callable[[int], None]]:
    """A run on free ports; gives a function that trains some steps."""
    port = free_port()
    words = [f"data.url={packed}", f"cache.dir={root / 'cache'}", "graph.size=32", "device=cpu"]
    words += ["loader.batch_size=8", f"metrics.port={port}", "metrics.host=127.0.0.1", "metrics.every_s=0.2", *more]
    with dp.load("train", words) as loader:
        endless = (batch for _ in range(1000) for batch in loader)

        def train(num_steps: int) -> None:
            for _ in range(num_steps):
                next(endless)
                with dp.step("forward"):
                    time.sleep(0.005)

        train.port = port  # type: ignore[attr-defined]
        yield train
        endless.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@needs_prometheus
def test_a_prometheus_server_scrapes_a_real_run(packed: Path, tmp_path: Path) -> None:
    with training(packed, tmp_path) as train, prometheus(tmp_path, train.port) as ask:  # type: ignore[attr-defined]
        seen: dict[str, Any] = {}
        deadline = time.monotonic() + 60
        wanted = {
            "rows": "sum(dalipipe_step_seconds_total)",
            "steps": "dalipipe_steps_total",
            "wait": "job:dalipipe_stall:ratio",
            "rate": "sum by (rank) (rate(dalipipe_samples_total[5s]))",
        }
        while len(seen) < len(wanted) and time.monotonic() < deadline:
            train(10)
            seen = {name: value for name, query in wanted.items() if (value := ask(query)) is not None}
        assert set(seen) == set(wanted)
        assert seen["steps"] >= 5
        assert seen["rate"] > 0
        assert 0 <= seen["wait"] <= 1


@contextmanager
def prometheus(root: Path, port: int) -> Iterator[Callable[[str], float | None]]:
    """A server that scrapes `port` each second; gives a function that evaluates a query."""
    rules = yaml.safe_load(_RULES.read_text())
    for group in rules["groups"]:
        group["interval"] = "1s"
    (root / "rules.yml").write_text(yaml.safe_dump(rules).replace("[1m]", "[5s]"))
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": ["rules.yml"],
        "scrape_configs": [{"job_name": "train", "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}],
    }
    (root / "prometheus.yml").write_text(yaml.safe_dump(config))
    own = free_port()
    server = subprocess.Popen(
        [
            "prometheus",
            f"--config.file={root / 'prometheus.yml'}",
            f"--storage.tsdb.path={root / 'tsdb'}",
            f"--web.listen-address=127.0.0.1:{own}",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def ask(query: str) -> float | None:
        url = f"http://127.0.0.1:{own}/api/v1/query?" + urllib.parse.urlencode({"query": query})
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                result = json.load(answer)["data"]["result"]
        except OSError:
            return None
        return float(result[0]["value"][1]) if result else None

    try:
        yield ask
    finally:
        server.terminate()
        server.wait(20)


def test_ports_tell_what_a_run_did_meanwhile(packed: Path, tmp_path: Path) -> None:
    with training(packed, tmp_path) as train:
        url = addresses(f"127.0.0.1:{train.port}")  # type: ignore[attr-defined]
        train(5)
        before = scrape(url)[0]
        done = watch_for(url, 1.0, sleep=lambda _: train(7))[0]
        assert done.num_steps == 7
        assert done.rows["forward"] >= 7 * 0.005
        assert done.wall_s == pytest.approx(sum(done.rows.values()))
        steps = run_from_snapshots([done], "here").steps[0]
        assert float(steps.wall_s[0]) == pytest.approx(done.wall_s / 7)  # a mean step, as the sentences say
        assert before.num_steps >= 4


def test_a_textfile_is_whole_at_any_time(packed: Path, tmp_path: Path) -> None:
    path = tmp_path / "dalipipe-{rank}.prom"
    with training(packed, tmp_path, f"metrics.textfile='{path}'") as train:
        train(20)
    back = parse_exposition((tmp_path / "dalipipe-0.prom").read_text())
    assert back.num_steps == 20


def test_a_declared_bandwidth_is_what_use_is_measured_against(packed: Path, tmp_path: Path) -> None:
    path = tmp_path / "dalipipe.prom"
    with training(packed, tmp_path, f"metrics.textfile='{path}'", "storage.bandwidth=100MB") as train:
        train(3)
        # Taken once a second, not at each step.
        wait_until(lambda: path.exists() and parse_exposition(path.read_text()).gauges.get("lake_bandwidth") == 100e6)


def test_a_port_in_use_is_named(packed: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match=r"metrics\.port.*127\.0\.0\.1"):
            with training(packed, tmp_path, f"metrics.port={taken.getsockname()[1]}"):
                pass


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["metrics.every_s=0"], "metrics.every_s"),
        (["metrics.port=70000"], "metrics.port=70000"),
        (["metrics.phases=guess"], "metrics.phases='guess'"),
        (["metrics.textfile=/no/such/folder/file.prom"], "metrics.textfile"),
        (["metrics.profile_every=3"], "metrics.profile_every"),
    ],
)
def test_values_that_can_never_work_are_refused(packed: Path, tmp_path: Path, words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dp.load("train", [f"data.url={packed}", f"cache.dir={tmp_path}", "loader.batch_size=8", *words])


@pytest.mark.parametrize("text", ["nowhere", "host:1-0", "host:99999", ""])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        addresses(text)


def test_addresses() -> None:
    assert addresses("a:1-2,http://b:3") == ["http://a:1/metrics", "http://a:2/metrics", "http://b:3/metrics"]
