"""Which data set is read, and which of its fields (`data.*`)."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from dalipipe.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """`data.*`."""

    url: str = ""
    """The folder or bucket prefix that holds `manifest.json`; with `mix`, the one that holds the sets' folders."""
    fields: list[str] = field(default_factory=lambda: ["image", "label"])
    """The fields of a sample that are read into a batch; `id` always comes along."""
    mix: dict[str, float] = field(default_factory=dict)
    """Data sets that are read together, with the weight of each: `{photos: 0.7, drawings: 0.3}`. Ids count on from
    set to set in this order. A name is looked up in `sources`, else it is a URL or a folder below `url`."""
    sources: dict[str, str] = field(default_factory=dict)
    """URLs of sets of the mix, by name."""
    repeat: dict[str, float] = field(default_factory=dict)
    """How often per epoch the samples of a shard, of a pattern of shards (`*`: all) or of a class come: 2, or 1.7 for
    once and a hash-chosen 70 % once more. In a mix, `SET/NAME`."""


def source_urls(data: DataConfig) -> dict[str, str]:
    """The URL of each data set that is read, by its name; the name of one that is read alone is empty.

    Raises:
        ConfigError: no URL is given for a set, or `data.sources` names one that is not in the mix.
    """
    if not data.mix:
        if data.sources:
            raise ConfigError("data.sources names data sets of a mix, and data.mix is empty: give each a weight there")
        return {"": data.url}
    unused = sorted(set(data.sources) - set(data.mix))
    if unused:
        raise ConfigError(
            f"data.sources names {', '.join(unused)}, which data.mix does not weigh ({', '.join(data.mix)})"
        )
    return {name: data.sources.get(name) or _below(data.url, name) for name in data.mix}


def repeats_by_source(data: DataConfig) -> dict[str, dict[str, float]]:
    """`data.repeat` as set ▸ name in that set ▸ factor.

    Raises:
        ConfigError: a key does not say of which set of the mix, or a factor is negative or not finite.
    """
    found: dict[str, dict[str, float]] = {}
    for key, factor in data.repeat.items():
        if not 0 <= factor < float("inf"):
            raise ConfigError(f"data.repeat.{key}={factor} must be a finite factor of at least 0")
        name, own = "", key
        if data.mix:
            if key in data.mix:
                raise ConfigError(f"data.repeat.{key}: how often a set of a mix comes is its weight, data.mix.{key}")
            sets = [one for one in data.mix if key.startswith(f"{one}/")]
            if not sets:
                raise ConfigError(
                    f"data.repeat.{key}: in a mix the name begins with that of the set, such as "
                    f"{next(iter(data.mix))}/{key}"
                )
            name = max(sets, key=len)
            own = key[len(name) + 1 :]
        found.setdefault(name, {})[own] = factor
    return found


def _below(url: str, name: str) -> str:
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://|/", name):
        return name
    if not url:
        raise ConfigError(
            f"data.mix.{name}: where is that set? Give data.sources.{name}=URL, or data.url=FOLDER that holds {name}/"
        )
    return f"{url.rstrip('/')}/{name}"
