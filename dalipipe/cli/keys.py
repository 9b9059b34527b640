"""Which keys a configuration may have, and what to say of one that it may not."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from dalipipe.errors import ConfigError
from dalipipe.masking import masked


def keys_of(job: type, prefix: str = "") -> Iterator[str]:
    """All dotted keys of a dataclass; a free-form mapping counts as `key.*`."""
    for key, hint in _hints(job, prefix):
        yield key
        inner = _dataclass_in(hint)
        if inner is not None:
            yield from keys_of(inner, f"{key}.")
        elif any(get_origin(part) is dict or part is dict for part in (hint, *get_args(hint))):
            yield f"{key}.*"


def text_keys_of(job: type, prefix: str = "") -> Iterator[str]:
    """The keys whose values are text and nothing else."""
    for key, hint in _hints(job, prefix):
        inner = _dataclass_in(hint)
        if inner is not None:
            yield from text_keys_of(inner, f"{key}.")
        elif hint is str or (_is_union(hint) and set(get_args(hint)) == {str, type(None)}):
            yield key


def config_keys(cfg: DictConfig, prefix: str = "") -> Iterator[str]:
    """All dotted keys of a composed config."""
    for key in map(str, cfg):
        yield f"{prefix}{key}"
        value: Any = cfg._get_node(key)
        if OmegaConf.is_dict(value) and not value._is_none() and not value._is_missing():
            yield from config_keys(value, f"{prefix}{key}.")


def is_known(key: str, known: set[str]) -> bool:
    """Whether `key` is one of `known` (which may have `parent.*`)."""
    parts = key.split(".")
    return key in known or any(".".join([*parts[:cut], "*"]) in known for cut in range(1, len(parts)))


def explain(error: Exception, job: type, overrides: Sequence[str]) -> ConfigError:
    """One sentence for an error of Hydra: the unknown key with its nearest neighbour when there is one."""
    known = set(keys_of(job))
    for word in overrides:
        try:
            key = str(OverridesParser.create().parse_override(word).key_or_group or "")
        except HydraException as reason:
            said = f"override {word!r} cannot be read as KEY=VALUE: {first_line(reason)}"
            if masked(word) != word:  # the parser repeats parts of the secret
                said = f"the override of {word.partition('=')[0]} cannot be read as KEY=VALUE (it holds a secret)"
            return ConfigError(
                f"{said}; a value with other signs than letters, digits and -_./: goes in quotes inside the shell's: "
                "\"key='value'\""
            )
        if key and not is_known(key, known) and not key.startswith("hydra"):
            return unknown(key, known)
    texts = [first_line(cause) for cause in _chain(error)]
    for text in texts:
        key = text.rpartition("(full_key: ")[2].rstrip(")") if "(full_key: " in text else ""
        if key and not is_known(key, known):
            return unknown(key, known)
    return ConfigError(": ".join(dict.fromkeys(texts[:2])))


def unknown(key: str, known: set[str]) -> ConfigError:
    """What to say of a key that the schema does not have."""
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


def first_line(error: BaseException) -> str:
    """The first line of a message of Hydra or OmegaConf, with the key that it is about."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    key = next((line for line in lines if line.startswith("full_key:")), "")
    if "Config search path:" in lines:  # an unknown group option: Hydra lists the ones there are
        return " ".join(lines[: lines.index("Config search path:")])
    return f"{lines[0] if lines else type(error).__name__}{f' ({key})' if key else ''}"


def _hints(job: type, prefix: str) -> Iterator[tuple[str, Any]]:
    hints = get_type_hints(job)
    for item in fields(job):
        yield f"{prefix}{item.name}", hints[item.name]


def _dataclass_in(hint: Any) -> type | None:
    return next((part for part in (hint, *get_args(hint)) if isinstance(part, type) and is_dataclass(part)), None)


def _is_union(hint: Any) -> bool:
    return get_origin(hint) in (Union, types.UnionType)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__
