"""Hydra: the shipped tree of YAML, the schema it must fit, and composed dataclasses.

The dataclasses beside each class are the schema. A key that they do not have is refused with its nearest neighbour,
also behind `+`, where Hydra itself would take it and nobody would ever read it.
"""

from __future__ import annotations

import functools
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import dalipipe
from dalipipe.cli.help import help_text
from dalipipe.cli.keys import config_keys, explain, first_line, is_known, keys_of, text_keys_of, unknown
from dalipipe.cli.printed import masked_output
from dalipipe.cli.schema import JOBS
from dalipipe.cli.words import flags_first, is_multirun, quote_texts, split_flags, wants_help
from dalipipe.errors import ConfigError, DalipipeError
from dalipipe.masking import masked
from dalipipe.storage.failures import presentable

SCHEMA_GROUP = "dalipipe_schema"
_COMPOSE_ERRORS = (HydraException, OmegaConfBaseException, yaml.YAMLError)

# What the shipped configs say too; a config of the user's own may not, and no verb leaves an `outputs/` folder.
_QUIET = ("hydra.output_subdir=null", "hydra.run.dir=.", "hydra/job_logging=none", "hydra/hydra_logging=none")

# Hydra keeps what it composes with in a singleton.
_GLOBAL_HYDRA = threading.RLock()


def config_dir() -> Path:
    """The shipped YAML tree: beside the package in a checkout, inside it in a wheel."""
    package = Path(dalipipe.__file__).resolve().parent
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def compose(name: str, overrides: Sequence[str] = (), *, directory: str | Path | None = None) -> Any:
    """Composes the primary config `name` with Hydra overrides into its plain dataclass.

    Thread-safe, and at home inside a program that uses Hydra itself.

    Args:
        name: a primary config, shipped (`train`, `eval`, a verb) or in `directory`.
        overrides: Hydra overrides such as `loader.batch_size=256` or `graph=image_eval`.
        directory: a folder of the user's own YAML; a config of the same name there wins over the shipped one.

    Raises:
        ConfigError: an unknown key or group (names the nearest), a value of a wrong type, a missing config.
    """
    register_schemas()
    if directory and not Path(directory).is_dir():
        raise ConfigError(f"configuration folder {str(directory)!r} does not exist")
    folders = [config_dir()]
    if directory:
        # Hydra takes the primary config from the first folder only.
        own = Path(directory).resolve()
        folders = [own, *folders] if (own / f"{name}.yaml").is_file() else [*folders, own]
    job = JOBS.get(name, JOBS["train"])
    words = quote_texts(overrides, _text_keys(job))
    search = [_search_path(folder) for folder in folders[1:]]
    try:
        with _own_hydra(), hydra.initialize_config_dir(str(folders[0]), version_base="1.3"):
            cfg = hydra.compose(name, overrides=[*words, *search])
    except _COMPOSE_ERRORS as error:
        raise explain(error, job, words) from presentable(error)
    return to_dataclass(cfg)


def run_hydra(verb: str, words: Sequence[str], task: Callable[[Any], int], *, about: str) -> int:
    """Runs `task` under `hydra.main` with the primary config of `verb`; returns the worst exit code of its jobs.

    Args:
        about: what the verb does, for its `--help`.
    """
    register_schemas()
    job_type = JOBS[verb]
    codes: list[int] = []
    failures: list[DalipipeError] = []

    def job(cfg: DictConfig) -> None:
        try:
            composed = to_dataclass(cfg)
            if not isinstance(composed, job_type):
                raise ConfigError(
                    f"this config is for {type(composed).__name__}, and `dalipipe {verb}` needs {job_type.__name__}: "
                    f"start its defaults list with `{verb}` instead"
                )
            with as_before():
                codes.append(task(composed))
        except DalipipeError as error:  # kept from Hydra, which would print a line of its own
            failures.append(error)

    words = quote_texts(flags_first(words), _text_keys(job_type), sweeps=is_multirun(words))
    if wants_help(words):
        try:
            with _own_hydra(), hydra.initialize_config_dir(str(config_dir()), version_base="1.3"):
                keys = OmegaConf.to_yaml(hydra.compose(verb, overrides=split_flags(words)[1]))
        except _COMPOSE_ERRORS as error:
            raise explain(error, job_type, split_flags(words)[1]) from presentable(error)
        print(help_text(verb, about, _choices(job_type), masked(keys)))
        return 0
    with _hydra_argv(verb, words), masked_output(words) as as_before:
        try:
            hydra.main(version_base="1.3", config_path=str(config_dir()), config_name=verb)(job)()
        except _COMPOSE_ERRORS as error:
            raise explain(error, job_type, split_flags(words)[1]) from presentable(error)
        except SystemExit as stop:  # argparse: --help (0) or an unknown flag (2)
            return int(stop.code or 0)
    if failures:
        raise type(failures[0])("\n".join(str(failure) for failure in failures))
    return max(codes, default=0)


@functools.cache
def register_schemas() -> None:
    """Puts every job's dataclass into Hydra's ConfigStore, once."""
    store = ConfigStore.instance()
    for name, job in JOBS.items():
        node = OmegaConf.structured(job)
        _open_for_overrides(node)
        store.store(name=name, group=SCHEMA_GROUP, node=node)


def to_dataclass(cfg: DictConfig) -> Any:
    """Turns a composed config into its dataclass; every key must be one that the schema knows.

    Raises:
        ConfigError: a key nobody would read, or a mandatory value that is missing.
    """
    job = OmegaConf.get_type(cfg)
    if not is_dataclass(job):
        raise ConfigError(
            "the primary config has no schema: start its defaults list with one of "
            + ", ".join(f"{SCHEMA_GROUP}/{name}@_here_" for name in JOBS)
        )
    known = set(keys_of(job))
    for key in config_keys(cfg):
        if not is_known(key, known):
            raise unknown(key, known)
    try:
        for key in text_keys_of(job):
            value = OmegaConf.select(cfg, key)
            if isinstance(value, str) and value.startswith("~/"):
                OmegaConf.update(cfg, key, str(Path(value).expanduser()))
        return OmegaConf.to_object(cfg)
    except OmegaConfBaseException as error:
        raise ConfigError(first_line(error)) from error


def _open_for_overrides(node: Any) -> None:
    """Frozen dataclasses make read-only nodes, and free-form mappings refuse new keys: undo both for composing."""
    if not OmegaConf.is_dict(node) or node._is_none():
        return
    OmegaConf.set_readonly(node, None)
    if OmegaConf.get_type(node) is dict:
        OmegaConf.set_struct(node, False)
    for key in node:
        _open_for_overrides(node._get_node(key))


def _choices(job: type) -> list[str]:
    """The groups of files that this job's keys are taken from, with the names to choose from."""
    groups = [path for path in sorted(config_dir().iterdir()) if path.is_dir() and path.name in _first_parts(job)]
    return [f"{path.name}={'|'.join(sorted(file.stem for file in path.glob('*.yaml')))}" for path in groups]


def _first_parts(job: type) -> set[str]:
    return {key.split(".")[0] for key in keys_of(job)}


def _text_keys(job: type) -> set[str]:
    """Keys whose values are text; not those that choose a file of a group."""
    groups = {path.name for path in config_dir().iterdir() if path.is_dir()}
    return set(text_keys_of(job)) - groups


def _search_path(folder: Path) -> str:
    return f"hydra.searchpath=['file://{folder}']"


@contextmanager
def _own_hydra() -> Iterator[None]:
    """Puts the Hydra of the calling program aside for a while."""
    with _GLOBAL_HYDRA:
        holder = GlobalHydra.instance()
        saved, holder.hydra = holder.hydra, None
        try:
            yield
        finally:
            GlobalHydra.instance().hydra = saved


@contextmanager
def _hydra_argv(verb: str, words: Sequence[str]) -> Iterator[None]:
    """What `hydra.main` reads from the process: its arguments, and that errors are ours to print."""
    extra = [word for word in _QUIET if not any(own.startswith(word.split("=")[0]) for own in words)]
    if any(word.split("=", 1)[0] in ("--config-path", "-cp") for word in words):
        extra.append(_search_path(config_dir()))  # the flag replaces the tree of YAML: keep the shipped one in reach
    # Hydra joins all overrides to one text, a name for folders, in which a secret cannot be told from what follows.
    secret = [f"'{word.partition('=')[0].lstrip('+')}'" for word in words if masked(word) != word]
    if secret:
        extra.append(f"hydra.job.config.override_dirname.exclude_keys=[{','.join(secret)}]")
    sweep_dir = tempfile.mkdtemp(prefix="dalipipe-sweep-") if is_multirun(words) else ""
    if sweep_dir:
        extra.append(f"hydra.sweep.dir={sweep_dir}")  # Hydra writes a multirun.yaml, whatever else is turned off
    saved_argv, saved_env = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv, os.environ["HYDRA_FULL_ERROR"] = [f"dalipipe {verb}", *words, *extra], "1"
    try:
        yield
    finally:
        sys.argv = saved_argv
        if saved_env is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = saved_env
        if sweep_dir:
            shutil.rmtree(sweep_dir, ignore_errors=True)
