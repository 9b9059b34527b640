"""The folder of a run: whole at any moment, bounded, and enough for doctor, report and top."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch

import dalipipe as dp
from dalipipe.cli import main
from dalipipe.errors import ConfigError, DataError
from dalipipe.metrics import runfolder
from dalipipe.metrics.cost import make_bill
from dalipipe.metrics.evidence import open_run, quantile
from dalipipe.metrics.host import ThreadCpu, python_threads, resident_share
from dalipipe.metrics.runfolder import RunWriter, read_json_lines, read_ledger, read_snapshots
from dalipipe.telemetry import StepRow
from tests.support.waiting import wait_until

_ROOT = Path(__file__).parents[3]


def row(number: int) -> StepRow:
    return StepRow(
        number=number,
        epoch=number // 10,
        step=number % 10,
        samples=4,
        began_at=1e9 + number,
        wall_s=0.5,
        waits={"lake": 0.25} if number % 2 else {"decode": 0.25},
        phases={"forward": 0.25},
        lake_bytes=7,
    )


def test_parts_roll_and_the_oldest_go(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path, 0, rows_a_part=10, most_parts=3)
    for start in range(0, 47, 7):
        writer.steps([row(number) for number in range(start, min(start + 7, 47))])
    assert len(list((tmp_path / "ledger/rank-00000").iterdir())) == 3
    columns = read_ledger(tmp_path)[0]
    assert columns["number"] == list(range(20, 47))
    assert columns["wait_lake"] == [0.25 * (number % 2) for number in range(20, 47)]
    assert read_ledger(tmp_path, most_rows=5)[0]["number"] == [42, 43, 44, 45, 46]
    again = RunWriter(tmp_path, 0, rows_a_part=10, most_parts=3)  # the job was started again in the same folder
    again.steps([row(0)])
    assert read_ledger(tmp_path)[0]["number"][-2:] == [46, 0]


def test_events_are_rotated_and_a_torn_line_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runfolder, "EVENTS_MOST_BYTES", 2000)
    writer = RunWriter(tmp_path, 0)
    for number in range(100):
        writer.event("epoch", epoch=number)
    path = tmp_path / "events.jsonl"
    assert path.stat().st_size <= 2000
    assert path.with_suffix(".jsonl.1").stat().st_size <= 2000
    with path.open("a") as file:
        file.write('{"at": 1, "even')
    epochs = [line["epoch"] for line in read_json_lines(path)]
    assert epochs == list(range(epochs[0], 100))


def test_the_configuration_is_kept_without_passwords(tmp_path: Path) -> None:
    RunWriter(tmp_path, 0).config({"data": {"url": "http://me:secret@host/set"}})
    assert json.loads((tmp_path / "config.json").read_text())["data"]["url"] == "http://***@host/set"


def test_a_folder_that_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=re.escape(str(tmp_path))):
        read_snapshots(tmp_path)
    (tmp_path / "ranks").mkdir()
    (tmp_path / "ranks/00000.json").write_text('{"version": 99}')
    with pytest.raises(DataError, match="99"):
        read_snapshots(tmp_path)
    with pytest.raises(ConfigError, match="run_dir"):
        RunWriter(tmp_path / "ranks/00000.json", 0)


def test_a_killed_job_leaves_a_folder_that_doctor_reads(packed: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    command = [sys.executable, "-m", "tests.unit.metrics.watched_job", str(packed), str(tmp_path / "c"), str(run_dir)]
    job = subprocess.Popen(command, cwd=_ROOT, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    try:
        ledger = run_dir / "ledger/rank-00000"
        wait_until(
            lambda: (
                any(ledger.glob("*.parquet"))
                and len(read_ledger(run_dir)[0]["number"]) > 40
                and open_run(run_dir).num_steps > 40
            ),
            "a ledger and a snapshot of more than 40 steps",
            timeout_s=90,
            process=job,
        )
    finally:
        job.send_signal(signal.SIGKILL)
        job.wait(10)
    found = open_run(run_dir)
    assert found.num_steps > 40
    events = [line["event"] for line in read_json_lines(run_dir / "events.jsonl")]
    assert events[0] == "start"
    assert "stop" not in events
    assert json.loads((run_dir / "config.json").read_text())["loader"]["batch_size"] == 8
    assert main(["doctor", str(run_dir)]) == 0


def test_a_folder_that_cannot_be_written_costs_the_record_not_the_run(
    packed: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir = tmp_path / "run"
    words = [f"data.url={packed}", f"cache.dir={tmp_path / 'c'}", f"run_dir={run_dir}", "metrics.every_s=0.1"]
    with dp.load("train", [*words, "graph.size=32", "device=cpu", "loader.batch_size=8"]) as loader:
        while not run_dir.is_file():  # the writer of figures may make the folder again in between
            shutil.rmtree(run_dir, ignore_errors=True)
            with contextlib.suppress(IsADirectoryError):
                run_dir.write_text("in the way")
        delivered = 0
        deadline = time.monotonic() + 30
        while not (caplog.records and delivered) and time.monotonic() < deadline:
            delivered += sum(1 for _batch in loader)
    warnings = [record for record in caplog.records if "figures of the run" in record.message]
    assert len(warnings) == 1
    assert delivered >= len(loader)


@pytest.fixture(scope="module")
def finished(packed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small run of two ranks, one after the other."""
    root = tmp_path_factory.mktemp("finished")
    for rank in range(2):
        words = [f"data.url={packed}", f"cache.dir={root / 'cache'}", f"run_dir={root / 'run'}", "metrics.every_s=0.1"]
        words += ["graph.size=32", "device=cpu", "loader.batch_size=8", "cost.gpu_hour=3"]
        with dp.load("train", words, world=dp.World(rank=rank, world_size=2)) as loader:
            for _ in range(4):
                for _batch in loader:
                    with dp.step("forward"):
                        time.sleep(0.01)
                    with dp.step("backward"):
                        time.sleep(0.02)
    return root / "run"


class Page(HTMLParser):
    """Collects tags, and what would be fetched from elsewhere."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.outside: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag != "meta":
            self.open.append(tag)
        self.outside += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert tag in self.open, tag
        self.open.remove(tag)


def test_the_report_is_one_whole_file(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "page.html"
    assert main(["report", str(finished), f"out={out}", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    text = out.read_text()
    page = Page(text)
    assert page.outside == []
    assert page.open == []
    assert page.tags.count("svg") >= 8
    assert said["sentence"] in text
    assert "nan" not in text.lower().replace("nanum", "")
    assert main(["report", str(tmp_path / "nowhere")]) == 2


def test_doctor_tells_rows_that_sum_and_a_bill(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(finished), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert sum(said["rows"].values()) == pytest.approx(1, abs=0.001)
    assert said["ranks"] == 2
    assert said["bill"]["per_day"]["100"] == pytest.approx(24 * 3 * 100 * said["bill"]["stall_share"])
    assert main(["doctor", str(finished), "cost.gpu_hour=6"]) == 0
    assert "money lost" in capsys.readouterr().out


def test_top_draws_what_happened_between_two_looks(finished: Path, tmp_path: Path) -> None:
    picture = tmp_path / "top.svg"
    assert main(["top", str(finished), "times=1", "every_s=0.2", f"svg={picture}"]) == 0
    assert "AU" in picture.read_text()
    assert main(["top", "times=1"]) == 2


def test_spin_restores_the_loader_and_orders_the_three(packed: Path, tmp_path: Path) -> None:
    words = [f"data.url={packed}", f"cache.dir={tmp_path}", "graph.size=32", "device=cpu", "loader.batch_size=8"]
    seen: list[torch.Tensor] = []
    with dp.load("train", words) as loader:
        before = loader.state_dict()

        def step(batch: dict[str, torch.Tensor]) -> None:
            seen.append(batch["id"])
            time.sleep(0.002)

        found = dp.spin(loader, step, num_steps=20, num_batches=3, run_dir=tmp_path / "run")
        assert loader.state_dict() == before
    assert len(seen) == 3 * 22
    assert len({tuple(ids.tolist()) for ids in seen[22:44]}) == 3  # replayed from memory
    assert found.synthetic_step_s >= 0.002
    assert found.spin_step_s < found.loader_step_s + 0.01
    assert 0 < found.au <= 1
    assert json.loads((tmp_path / "run/spin.json").read_text())["synthetic_step_s"] == found.synthetic_step_s
    with pytest.raises(ConfigError, match="num_steps"):
        dp.spin(loader, step, num_steps=0)


def test_a_bill_is_arithmetic() -> None:
    prices = {"gpu_hour": 3.0, "disk_gb_month": 0.1, "egress_gb": 0.05, "requests_1k": 0.005}
    bill = make_bill(
        gpus=8,
        wall_s=3600.0,
        num_steps=36_000,
        stall_share=0.25,
        prices=prices,
        lake_bytes=100e9,
        lake_requests=20_000,
        cache_bytes=3000e9,
    )
    assert bill.gpu_hours == 8
    assert bill.gpu_hours_lost == 2
    assert bill.money_lost == 6
    assert bill.per_day[1000] == 24 * 3 * 1000 * 0.25
    data_a_day = 3000 * 0.1 / 30 + 24 * (100 * 0.05 + 20 * 0.005)
    assert bill.data_money_per_day == pytest.approx(data_a_day)
    assert bill.net_per_day[100] == pytest.approx(24 * 3 * 100 * 0.25 - data_a_day * 100 / 8)
    strict = make_bill(gpus=8, wall_s=3600.0, num_steps=36_000, stall_share=0.25, prices=prices, synthetic_step_s=0.08)
    assert strict.stall_share == pytest.approx(0.2)  # 0.05 of the 0.25 is no fault of the loader


def test_a_baseline_in_the_folder_replaces_the_waits(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = open_run(finished)
    step_s = max(rank.wall_s / rank.num_steps for rank in run.ranks)
    (finished / "spin.json").write_text(json.dumps({"synthetic_step_s": step_s / 2}))
    try:
        main(["doctor", str(finished), "--json"])
        assert json.loads(capsys.readouterr().out)["bill"]["stall_share"] == pytest.approx(0.5, abs=0.05)
    finally:
        (finished / "spin.json").unlink()


def test_lock_step_pays_the_slowest_rank(finished: Path) -> None:
    run = open_run(finished)
    num = 20
    wall_s = np.full(num, 0.1)
    # Each rank waits in every other step, never both in one.
    steps = [
        replace(
            run.steps[at],
            wall_s=wall_s,
            waits={"lake": np.tile([0.05, 0.0], num)[at : at + num]},
            phases={},
            key=np.arange(num),
        )
        for at in range(2)
    ]
    both = replace(run, steps=steps)
    assert both.share("lake") == pytest.approx(0.25)
    assert both.stall_share() == pytest.approx(0.5)


def test_what_the_host_tells(tmp_path: Path) -> None:
    threads, began_s = ThreadCpu(), time.process_time()
    while time.process_time() - began_s < 0.1:
        pass
    assert sum(threads.read(python_threads()).values()) >= 0.09
    file = tmp_path / "file"
    file.write_bytes(b"x" * 2**20)
    assert resident_share([file]) == 1.0
    assert resident_share([tmp_path / "missing"]) == 0.0
    assert quantile([0, 2, 0, 8, *[0] * 11, 0, 1.0], 0.5) == 0.005
