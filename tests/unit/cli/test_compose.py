"""Configuration: what is accepted, and what is refused with which words."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from dalipipe.build import LoadConfig
from dalipipe.cli import main
from dalipipe.cli.compose import compose, config_dir
from dalipipe.cli.schema import JOBS
from dalipipe.errors import ConfigError


def test_every_primary_config_composes_to_its_dataclass() -> None:
    for name, job in JOBS.items():
        assert type(compose(name)) is job
    shipped = {path.stem for path in config_dir().glob("*.yaml")}
    assert shipped == set(JOBS)


def test_keys_of_users_and_scripts() -> None:
    cfg = compose(
        "train",
        [
            "data.url=s3://bucket/set",
            "data.fields=[image,label,json]",
            "shuffle.mode=full",
            "shuffle.seed=3",
            "shuffle.window=64MiB",
            "shuffle.lanes=8",
            "shuffle.exchange=0.5",
            "cache.dir=/nvme",
            "cache.policy=pin",
            "cache.tiers.node.capacity=100G",
            "prefetch.depth=4",
            "prefetch.queue_depth=3",
            "prefetch.device_batches=3",
            "prefetch.memory_cap=1G",
            "storage.concurrency=4",
            "storage.read_timeout_s=2",
            "storage.retries=1",
            "graph=image_eval",
            "graph.size=160",
            "graph.dtype=uint8",
            "graph.layout=NHWC",
            "graph.num_threads=2",
            "graph.hw_decoder_load=0.5",
            "loader.global_batch_size=64",
            "loader.last_batch=pad",
            "assign=static",
            "quarantine.policy=raise",
            "quarantine.max_fraction=0.01",
            "quarantine.max_pixels=1000",
            "run_dir=/runs/1",
            "device=cpu",
        ],
    )
    assert isinstance(cfg, LoadConfig)
    assert cfg.data.url == "s3://bucket/set"
    assert cfg.cache.tiers.node.capacity == "100G"
    assert cfg.graph.name == "image_eval"
    assert cfg.shuffle.exchange == 0.5
    assert cfg.loader.global_batch_size == 64


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("loader.batchsize=3", "unknown key 'loader.batchsize'; did you mean 'loader.batch_size'"),
        ("+loader.batchsize=3", "unknown key 'loader.batchsize'; did you mean 'loader.batch_size'"),
        ("++shufle.seed=3", "unknown key 'shufle"),
        ("batch_size=3", "did you mean 'loader.batch_size'"),
        ("+nonsense=1", "unknown key 'nonsense'; keys at the top: assign"),
        ("loader.batch_size=many", "could not be converted to Integer"),
        ("graph=image_trian", "image_eval image_raw image_train"),
        ("loader.batch_size=[1", "loader.batch_size"),
    ],
)
def test_wrong_keys_and_values_are_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose("train", [override])
    assert message in str(caught.value)


def test_unknown_config_and_missing_folder() -> None:
    with pytest.raises(ConfigError, match="trian"):
        compose("trian")
    with pytest.raises(ConfigError, match="does not exist"):
        compose("train", directory="/nonexistent")


def test_a_folder_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "defaults:\n  - train\n  - _self_\nloader:\n  batch_size: 7\nshuffle:\n  seed: 11\n"
    )
    cfg = compose("mine", ["graph=image_eval"], directory=tmp_path)
    assert (cfg.loader.batch_size, cfg.shuffle.seed, cfg.graph.name) == (7, 11, "image_eval")
    (tmp_path / "wrong.yaml").write_text("defaults:\n  - train\n  - _self_\nloader:\n  batchsize: 7\n")
    with pytest.raises(ConfigError, match="batchsize"):
        compose("wrong", directory=tmp_path)


@pytest.mark.parametrize("variable", ["AWS_ENDPOINT_URL", "S3_ENDPOINT_URL"])
def test_both_endpoint_variables_are_honoured(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    monkeypatch.delenv("S3_ENDPOINT_URL", raising=False)
    assert compose("train").storage.endpoint_url is None
    monkeypatch.setenv(variable, "http://127.0.0.1:9000")
    assert compose("train").storage.endpoint_url == "http://127.0.0.1:9000"


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["pakc"], 2, "did you mean 'pack'"),
        (["pack", "pack.wrokers=2"], 2, "did you mean 'pack.workers'"),
        (["pack", "+pack.wrokers=2"], 2, "did you mean 'pack.workers'"),
        (["pack"], 2, "source=URL and target=URL"),
        (["info"], 2, "data.url is required"),
        (["verify"], 2, "data.url is required"),
        (["verify", "x", "decode=some"], 2, "none, sample, all"),
        (["cache", "burn"], 2, "stat, warm, verify, clear"),
        (["bench", "--nope"], 2, "unrecognized arguments"),
        (["bench", "data.url=x", "loader.batch_size=1", "loader.global_batch_size=1", "assign=lease"], 2, "assign"),
    ],
)
def test_wrong_usage_exits_with_2(
    words: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    before = sorted(Path.cwd().iterdir())
    assert main(words) == code
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.out == ""
    assert sorted(Path.cwd().iterdir()) == before


def test_cfg_job_and_multirun(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["pack", "--cfg", "job"]) == 0
    assert "shard_bytes: 512MiB" in capsys.readouterr().out
    assert main(["cache", "stat", "--json", "--multirun", f"cache.dir={tmp_path}/a,{tmp_path}/b"]) == 0
    assert capsys.readouterr().out.count('"blocks": 0') == 2


def test_warnings_of_the_pipeline_are_not_silenced_by_hydra(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    log = logging.getLogger("dalipipe.cache")
    assert main(["cache", "stat", f"cache.dir={tmp_path}"]) == 0
    log.warning("the disk is full")
    assert "the disk is full" in caplog.text
