"""Hydra: the shipped tree of YAML, the schema it must fit, and composed dataclasses.

The dataclasses beside each class are the schema. A key that they do not have is refused with its nearest neighbour,
also behind `+`, where Hydra itself would take it and nobody would ever read it.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import dalipipe
from dalipipe.cli.schema import JOBS
from dalipipe.errors import ConfigError, DalipipeError

SCHEMA_GROUP = "dalipipe_schema"
_FLAGS_WITH_VALUE = frozenset(
    ("--cfg", "-c", "--package", "-p", "--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd")
)


def config_dir() -> Path:
    """The shipped YAML tree: beside the package in a checkout, inside it in a wheel."""
    package = Path(dalipipe.__file__).resolve().parent
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def compose(name: str, overrides: Sequence[str] = (), *, directory: str | Path | None = None) -> Any:
    """Composes the primary config `name` with Hydra overrides into its plain dataclass.

    Args:
        name: a primary config, shipped (`train`, `eval`, a verb) or in `directory`.
        overrides: Hydra overrides such as `loader.batch_size=256` or `graph=image_eval`.
        directory: a folder of the user's own YAML, searched before the shipped one.

    Raises:
        ConfigError: an unknown key or group (names the nearest), a value of a wrong type, a missing config.
    """
    register_schemas()
    search, extra = (directory, [_search_path()]) if directory else (config_dir(), [])
    if directory and not Path(directory).is_dir():
        raise ConfigError(f"configuration folder {str(directory)!r} does not exist")
    try:
        with hydra.initialize_config_dir(str(Path(search).resolve()), version_base="1.3"):
            cfg = hydra.compose(name, overrides=[*overrides, *extra])
    except (HydraException, OmegaConfBaseException) as error:
        raise _explain(error, name, overrides) from error
    return to_dataclass(cfg)


def run_hydra(verb: str, words: Sequence[str], task: Callable[[Any], int]) -> int:
    """Runs `task` under `hydra.main` with the primary config of `verb`; returns the worst exit code of its jobs."""
    register_schemas()
    codes: list[int] = []
    failures: list[DalipipeError] = []

    def job(cfg: DictConfig) -> None:
        try:
            codes.append(task(to_dataclass(cfg)))
        except DalipipeError as error:  # kept from Hydra, which would print a line of its own
            failures.append(error)

    overrides = [word for word in words if not word.startswith("-")]
    # Hydra prints an exception and exits by itself unless it is asked for the whole of it; we map errors instead.
    saved_argv, saved_env = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv, os.environ["HYDRA_FULL_ERROR"] = (
        [f"dalipipe {verb}", *_flags_first(words), *_shared_search_path(words)],
        "1",
    )
    try:
        hydra.main(version_base="1.3", config_path=str(config_dir()), config_name=verb)(job)()
    except (HydraException, OmegaConfBaseException) as error:
        raise _explain(error, verb, overrides) from error
    except SystemExit as stop:  # argparse: --help (0) or an unknown flag (2)
        return int(stop.code or 0)
    finally:
        sys.argv = saved_argv
        if saved_env is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = saved_env
    if failures:
        raise failures[0]
    return max(codes, default=0)


def register_schemas() -> None:
    """Puts every job's dataclass into Hydra's ConfigStore (idempotent)."""
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
    known = set(_keys(job))
    for key in _config_keys(cfg):
        if not _is_known(key, known):
            raise _unknown(key, known)
    try:
        return OmegaConf.to_object(cfg)
    except OmegaConfBaseException as error:
        raise ConfigError(_first_line(error)) from error


def _open_for_overrides(node: Any) -> None:
    """Frozen dataclasses make read-only nodes, and free-form mappings refuse new keys: undo both for composing."""
    if not OmegaConf.is_dict(node) or node._is_none():
        return
    OmegaConf.set_readonly(node, None)
    if OmegaConf.get_type(node) is dict:
        OmegaConf.set_struct(node, False)
    for key in node:
        _open_for_overrides(node._get_node(key))


def _keys(job: type, prefix: str = "") -> Iterator[str]:
    """All dotted keys of a dataclass; a free-form mapping counts as `key.*`."""
    hints = get_type_hints(job)
    for item in fields(job):
        hint, key = hints[item.name], f"{prefix}{item.name}"
        inner = [part for part in (hint, *get_args(hint)) if isinstance(part, type) and is_dataclass(part)]
        yield key
        if inner:
            yield from _keys(inner[0], f"{key}.")
        elif any(getattr(part, "__origin__", part) is dict for part in (hint, *get_args(hint))):
            yield f"{key}.*"


def _config_keys(cfg: DictConfig, prefix: str = "") -> Iterator[str]:
    for key in map(str, cfg):
        yield f"{prefix}{key}"
        value: Any = cfg._get_node(key)
        if OmegaConf.is_dict(value) and not value._is_none() and not value._is_missing():
            yield from _config_keys(value, f"{prefix}{key}.")


def _is_known(key: str, known: set[str]) -> bool:
    parts = key.split(".")
    return key in known or any(".".join([*parts[:cut], "*"]) in known for cut in range(1, len(parts)))


def _explain(error: Exception, name: str, overrides: Sequence[str]) -> ConfigError:
    """One sentence for a Hydra error: the unknown key with its nearest neighbour when there is one."""
    job = JOBS.get(name)
    if job is not None:
        known = set(_keys(job))
        for word in overrides:
            try:
                key = str(OverridesParser.create().parse_override(word).key_or_group or "")
            except HydraException as reason:
                return ConfigError(f"override {word!r} cannot be read (KEY=VALUE): {_first_line(reason)}")
            if key and not _is_known(key, known) and not key.startswith("hydra"):
                return _unknown(key, known)
    cause = error.__cause__
    text = _first_line(error)
    if cause is not None and _first_line(cause) not in text:
        text = f"{text}: {_first_line(cause)}"
    return ConfigError(text)


def _unknown(key: str, known: set[str]) -> ConfigError:
    names = sorted(name for name in known if not name.endswith("*"))
    parent, _, leaf = key.rpartition(".")
    siblings = [name for name in names if name.rpartition(".")[0] == parent]
    near = (
        difflib.get_close_matches(key, siblings, n=1, cutoff=0.75)
        or [name for name in names if difflib.get_close_matches(leaf, [name.rpartition(".")[2]], n=1, cutoff=0.75)]
        or difflib.get_close_matches(key, names, n=1, cutoff=0.8)
    )
    if near:
        return ConfigError(f"unknown key '{key}'; did you mean '{near[0]}'?")
    where = f"keys of '{parent}'" if siblings and parent else "keys at the top"
    listed = siblings or [name for name in names if "." not in name]
    return ConfigError(f"unknown key '{key}'; {where}: {', '.join(name.rpartition('.')[2] for name in listed)}")


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    key = next((line for line in lines if line.startswith("full_key:")), "")
    if "Config search path:" in lines:  # an unknown group option: Hydra lists the ones there are
        return " ".join(lines[: lines.index("Config search path:")])
    return f"{lines[0] if lines else type(error).__name__}{f' ({key})' if key else ''}"


def _search_path() -> str:
    return f"hydra.searchpath=[file://{config_dir()}]"


def _shared_search_path(words: Sequence[str]) -> list[str]:
    """`--config-path` replaces the tree of YAML; keep the shipped one on the search path then."""
    replaced = any(word.split("=", 1)[0] in ("--config-path", "-cp") for word in words)
    return [_search_path()] if replaced else []


def _flags_first(words: Sequence[str]) -> list[str]:
    """argparse takes overrides in one run only; people write flags between them."""
    flags, overrides, rest = [], [], list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-"):
            overrides.append(word)
            continue
        flags.append(word)
        if word in _FLAGS_WITH_VALUE and rest:
            flags.append(rest.pop(0))
    return [*flags, *overrides]
