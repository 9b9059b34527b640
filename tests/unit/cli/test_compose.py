"""Configuration: what is accepted, and what is refused with which words."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import pytest
import yaml

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


@pytest.mark.parametrize(
    "flags",
    [
        ["--cfg", "job"],
        ["--cfg=all", "--resolve"],
        ["-c", "job", "-p", "storage.options"],
        ["--cfg", "job", "--package", "storage.options.password"],
        ["--info", "config"],
        ["--info"],
        ["--help"],
        ["--no-such-flag"],
    ],
)
def test_what_is_printed_of_a_configuration_holds_no_secret(
    flags: list[str], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAKE_PASSWORD", "pw4")
    words = ["data.url=sftp://me:pw1@host/x?sig=pw2", "+storage.options.client_kwargs.auth={name: pw3}"]
    words += ["+storage.options.password=${oc.env:LAKE_PASSWORD}", "+storage.options.port=2222"]
    code = main(["info", *words, *flags])
    shown = "".join(capfd.readouterr())
    assert "pw" not in shown
    if flags == ["--no-such-flag"]:
        assert code == 2
        assert "unrecognized arguments: --no-such-flag" in shown
        return
    assert code == 0
    assert shown == "***\n" if flags[-1] == "storage.options.password" else "port: 2222\n" in shown


@pytest.mark.parametrize(
    "word",
    [
        "+storage.options={password: pw1, token: 'pw2 pw3'}",
        "+storage={options: {user: me, password: 'pw1 pw2'}}",
        "+storage.options.proxies=[{password: pw1}, {token: [pw2]}]",
        f"+storage.options.passphrase='{'pw1 ' * 40}'",
        f"+storage.options.passphrase='{'pw1, x= ' * 40}'",
        "+storage.options.passphrase='pw1 \\' pw2'",
        "+storage.options.passphrase='pw1\n\npw2'",
    ],
)
def test_what_hydra_prints_of_overrides_holds_no_secret_however_it_is_written(
    word: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["info", "data.url=/a", word, "--cfg", "all"]) == 0
    shown = capfd.readouterr().out
    assert "pw" not in shown
    assert "data.url" in yaml.safe_load(shown)["hydra"]["job"]["override_dirname"]


@pytest.mark.parametrize("word", ["+storage.options.password=pw1(pw2", "+storage={options: {token: pw1(pw2}}"])
def test_an_override_that_cannot_be_read_is_named_without_its_secret(
    word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["info", "data.url=/a", word]) == 2
    shown = capsys.readouterr().err
    assert f"the override of {word.partition('=')[0]} cannot be read as KEY=VALUE" in shown
    assert "goes in quotes" in shown
    assert "pw" not in shown


def test_a_configuration_without_secrets_is_printed_as_hydra_does(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["data.url=/a", "+storage.options.user=me", "+storage.options.host_key_policy=auto_add"]
    assert main(["info", "--cfg", "job", "--resolve", *words]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == dataclasses.asdict(compose("info", words))


def test_warnings_of_the_pipeline_are_not_silenced_by_hydra(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    log = logging.getLogger("dalipipe.cache")
    assert main(["cache", "stat", f"cache.dir={tmp_path}"]) == 0
    log.warning("the disk is full")
    assert "the disk is full" in caplog.text


@pytest.mark.parametrize("path", ["/data/ü", "/a=b", "/a(b)/c", "/a,b", "/it's", "/a b", "s3://bucket/x=1/y", "/a\\b"])
def test_paths_of_ordinary_people_need_no_second_quoting(path: str) -> None:
    assert compose("train", [f"data.url={path}"]).data.url == path
    assert compose("train", [f"run_dir={path}"]).run_dir == path


def test_quoted_values_null_and_interpolations_stay_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAKE", "s3://lake")
    assert compose("train", ["data.url='/a b'"]).data.url == "/a b"
    assert compose("train", ["run_dir=null"]).run_dir is None
    assert compose("train", ["data.url=${oc.env:LAKE}/set"]).data.url == "s3://lake/set"


def test_a_home_folder_is_expanded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert compose("train", ["cache.dir=~/cache"]).cache.dir == "/home/someone/cache"
    (tmp_path / "mine.yaml").write_text("defaults:\n  - train\n  - _self_\ncache:\n  dir: ~/cache\n")
    assert compose("mine", directory=tmp_path).cache.dir == "/home/someone/cache"


def test_shipped_configs_stay_within_reach_of_a_folder_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "graph").mkdir()
    (tmp_path / "graph/tiny.yaml").write_text("name: image_train\nsize: 32\n")
    assert compose("train", ["graph=tiny"], directory=tmp_path).graph.size == 32
    (tmp_path / "wrong.yaml").write_text("defaults:\n  - train\n  - _self_\nloader:\n  batchsize: 7\n")
    with pytest.raises(ConfigError, match=r"'loader\.batchsize'; did you mean 'loader\.batch_size'"):
        compose("wrong", directory=tmp_path)
    (tmp_path / "mine.yaml").write_text("defaults:\n  - train\n  - _self_\n")
    with pytest.raises(ConfigError, match=r"did you mean 'loader\.batch_size'"):
        compose("mine", ["loader.batchsize=3"], directory=tmp_path)
    (tmp_path / "torn.yaml").write_text("loader: [1\n")
    with pytest.raises(ConfigError):
        compose("torn", directory=tmp_path)


def test_composing_inside_a_program_that_uses_hydra_itself(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    import hydra
    from hydra.core.global_hydra import GlobalHydra

    (tmp_path / "theirs.yaml").write_text("lr: 0.1\n")
    with hydra.initialize_config_dir(str(tmp_path), version_base="1.3"):
        assert compose("train", ["loader.batch_size=3"]).loader.batch_size == 3
        with ThreadPoolExecutor(4) as pool:
            sizes = list(pool.map(lambda n: compose("train", [f"loader.batch_size={n}"]).loader.batch_size, range(8)))
        assert sizes == list(range(8))
        assert hydra.compose("theirs").lr == 0.1
    assert not GlobalHydra.instance().is_initialized()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["bench", "--config-dir", "CONF", "--config-name", "mine"], "start its defaults list with `bench`"),
        (["info", "loader.batch_size=x", "/nowhere"], "Integer"),
    ],
)
def test_more_wrong_usage(words: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults:\n  - train\n  - _self_\n")
    before = sorted(Path.cwd().iterdir())
    assert main([str(tmp_path) if word == "CONF" else word for word in words]) == 2
    assert sorted(Path.cwd().iterdir()) == before
    assert message in capsys.readouterr().err


def test_a_wrong_log_level_and_an_unforeseen_error_are_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from dalipipe.cache import inspect

    def broken(config: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(inspect, "stat", broken)
    assert main(["cache", "stat", f"cache.dir={tmp_path}"]) == 1
    assert "RuntimeError: a bug" in capsys.readouterr().err
    monkeypatch.setenv("DALIPIPE_LOG", "LOUD")
    assert main(["cache", "stat", f"cache.dir={tmp_path}"]) == 2
    assert "DALIPIPE_LOG=LOUD" in capsys.readouterr().err


def test_a_bare_url_may_stand_anywhere(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / "a=b ü"
    folder.mkdir()
    for words in (["info", str(folder)], ["info", "data.fields=[image]", str(folder)]):
        assert main(words) == 1
        assert str(folder) in capsys.readouterr().err
