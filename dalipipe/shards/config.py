"""Which data set is read, and which of its fields (`data.*`)."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """`data.*`."""

    url: str = ""
    """The folder or bucket prefix that holds `manifest.json`."""
    fields: list[str] = field(default_factory=lambda: ["image", "label"])
    """The fields of a sample that are read into a batch; `id` always comes along."""
