"""Plots as SVG text, without a plotting library: a report is one file that opens anywhere."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
_LEFT, _RIGHT, _TOP, _BOTTOM = 72, 14, 12, 34
_COLORS = {
    "forward": "#4c78a8",
    "backward": "#2f4b7c",
    "optimiser": "#7aa6c2",
    "collective": "#9c755f",
    "other": "#c7c7c7",
    "lake": "#e45756",
    "pool": "#f58518",
    "node": "#eeca3b",
    "memory": "#f2b8a0",
    "decode": "#b279a2",
    "handover": "#ff9da6",
    "index": "#d67195",
    "plan": "#a05195",
    "start": "#83786b",
}
_SPARE = ("#54a24b", "#e08b3e", "#6f4e7c", "#0b84a5", "#9dd866", "#ca472f", "#8dddd0", "#665191")


def color_of(name: str, place: int = 0) -> str:
    """One colour a row, the same in every plot; warm ones are waits."""
    return _COLORS.get(name, _SPARE[place % len(_SPARE)])


def stacked(
    x: Array, rows: Mapping[str, Array], *, y_unit: Callable[[float], str], x_label: str, width: int = 960
) -> str:
    """Layers on each other over x; arrays [num_points] each."""
    height = 260
    total = np.sum(list(rows.values()), axis=0)
    frame = _Frame(x, float(total.max(initial=0.0)), width, height)
    parts, base = [], np.zeros_like(x)
    for place, (name, values) in enumerate(rows.items()):
        top = base + values
        points = frame.points(x, top) + frame.points(x[::-1], base[::-1])
        title = f"{name}: mean {y_unit(float(values.mean()))}"
        parts.append(
            f'<polygon points="{" ".join(points)}" fill="{color_of(name, place)}" fill-opacity="0.9">'
            f"<title>{html.escape(title)}</title></polygon>"
        )
        base = top
    return frame.wrap("".join(parts), y_unit=y_unit, x_label=x_label) + legend(list(rows))


def lines(
    curves: Mapping[str, tuple[Array, Array]], *, y_unit: Callable[[float], str], x_label: str, width: int = 470
) -> str:
    """Curves by name: (x, y), arrays of equal length."""
    kept = {name: (x, y) for name, (x, y) in curves.items() if len(x)}
    if not kept:
        return '<p class="none">no figures in this run</p>'
    every_x = np.concatenate([x for x, _ in kept.values()])
    highest = max(float(y.max()) for _, y in kept.values())
    frame = _Frame(every_x, highest, width, 200)
    parts = [
        f'<polyline points="{" ".join(frame.points(x, y))}" fill="none" stroke="{color_of(name, place)}" '
        f'stroke-width="1.6"><title>{html.escape(name)}</title></polyline>'
        for place, (name, (x, y)) in enumerate(kept.items())
    ]
    return frame.wrap("".join(parts), y_unit=y_unit, x_label=x_label) + legend(list(kept))


def bars(rows: Mapping[str, Mapping[str, float]], *, unit: Callable[[float], str], width: int = 960) -> str:
    """One horizontal bar a key of `rows`, cut into its parts."""
    names = list(dict.fromkeys(part for parts in rows.values() for part in parts))
    longest = max((sum(parts.values()) for parts in rows.values()), default=0.0) or 1.0
    bar_height, gap, left, right = 20, 8, 90, 90
    height = len(rows) * (bar_height + gap) + gap
    drawn = []
    for number, (label, parts) in enumerate(rows.items()):
        y, x = gap + number * (bar_height + gap), float(left)
        drawn.append(f'<text x="{left - 8}" y="{y + 14}" text-anchor="end">{html.escape(label)}</text>')
        for name, value in parts.items():
            length = (width - left - right) * value / longest
            title = html.escape(f"{name}: {unit(value)}")
            drawn.append(
                f'<rect x="{x:.1f}" y="{y}" width="{max(length, 0):.1f}" height="{bar_height}" '
                f'fill="{color_of(name, names.index(name))}"><title>{title}</title></rect>'
            )
            x += length
        drawn.append(f'<text x="{x + 6:.1f}" y="{y + 14}">{html.escape(unit(sum(parts.values())))}</text>')
    body = "".join(drawn)
    return f'<svg viewBox="0 0 {width} {height}" width="{width}" role="img">{body}</svg>' + legend(names)


def legend(names: Sequence[str]) -> str:
    """The colours of these rows."""
    entries = "".join(
        f'<span><i style="background:{color_of(name, place)}"></i>{html.escape(name)}</span>'
        for place, name in enumerate(names)
    )
    return f'<div class="legend">{entries}</div>'


def binned(values: Array, num_bins: int) -> Array:
    """Means of `num_bins` neighbouring groups (fewer when there are fewer values)."""
    return np.array([part.mean() for part in np.array_split(values, min(num_bins, len(values))) if len(part)])


def ticks(highest: float) -> list[float]:
    """Three to six round values from 0 to `highest`."""
    if highest <= 0:
        return [0.0, 1.0]
    step = 10.0 ** math.floor(math.log10(highest / 4))
    step *= next(factor for factor in (1, 2, 2.5, 5, 10) if highest / (step * factor) <= 5)
    return [step * number for number in range(int(highest / step) + 1)]


class _Frame:
    """Axes: x from its least to its greatest value, y from 0 to `highest`."""

    def __init__(self, x: Array, highest: float, width: int, height: int) -> None:
        self._x_from, self._x_to = float(x.min()), float(x.max())
        self._highest = highest * 1.05 or 1.0
        self._width, self._height = width, height

    def points(self, x: Array, y: Array) -> list[str]:
        span = (self._x_to - self._x_from) or 1.0
        across = self._width - _LEFT - _RIGHT
        down = self._height - _TOP - _BOTTOM
        at_x = _LEFT + across * (x - self._x_from) / span
        at_y = self._height - _BOTTOM - down * np.minimum(y / self._highest, 1.0)
        return [f"{a:.1f},{b:.1f}" for a, b in zip(at_x, at_y, strict=True)]

    def wrap(self, body: str, *, y_unit: Callable[[float], str], x_label: str) -> str:
        grid = []
        for value in ticks(self._highest):
            y = self._height - _BOTTOM - (self._height - _TOP - _BOTTOM) * value / self._highest
            grid.append(
                f'<line x1="{_LEFT}" x2="{self._width - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>'
                f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{html.escape(y_unit(value))}</text>'
            )
        floor = self._height - _BOTTOM + 16
        grid += [
            f'<text x="{_LEFT}" y="{floor}">{self._x_from:,.0f}</text>',
            f'<text x="{self._width - _RIGHT}" y="{floor}" text-anchor="end">{self._x_to:,.0f}</text>',
            f'<text x="{(self._width + _LEFT) / 2:.0f}" y="{floor}" text-anchor="middle">{html.escape(x_label)}</text>',
        ]
        size = f'viewBox="0 0 {self._width} {self._height}" width="{self._width}"'
        return f'<svg {size} role="img">{"".join(grid)}{body}</svg>'
