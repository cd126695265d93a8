# SPDX-License-Identifier: Apache-2.0
"""Line charts: where their lines, ticks and labels lie. The template of a page paints them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MAX_POINTS = 400
"""Points drawn of a series."""

N_COLORS = 8
_WIDTH, _HEIGHT = 520, 290
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 16, 12, 46
_MARKED = 12
_FEW_DECADES = 2.4

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """One line of a chart."""

    name: str
    points: Sequence[Point]


@dataclass(frozen=True)
class Chart:
    """A line chart.

    Attributes:
        series: Lines; those without a drawable point are left out.
    """

    title: str
    series: Sequence[Series]
    x_label: str = "iteration"
    y_label: str = ""
    log_y: bool = False

    def drawable(self) -> list[Series]:
        """Series with at least one point to draw."""
        return [s for s in self.series if any(_is_drawable(p, self.log_y) for p in s.points)]


def thinned(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
    """At most ``limit`` points of a line, the lowest and the highest of each stretch.

    Peaks survive, which every n-th point would lose. First and last point stay.

    Args:
        limit: At least 4.
    """
    if len(points) <= limit:
        return list(points)
    inner, n_stretches = points[1:-1], (limit - 2) // 2
    kept = [points[0]]
    for k in range(n_stretches):
        first = k * len(inner) // n_stretches
        rows = range(first, (k + 1) * len(inner) // n_stretches)
        low = min(rows, key=lambda row: inner[row][1])
        high = max(rows, key=lambda row: inner[row][1])
        kept += [inner[row] for row in sorted({low, high})]
    return [*kept, points[-1]]


def nice_ticks(low: float, high: float, n: int = 5) -> list[float]:
    """About ``n`` round numbers (steps of 1, 2 or 5 times a power of ten) in [low, high]."""
    if not high > low:
        return [low]
    rough = (high - low) / n
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(f * power for f in (1, 2, 5, 10) if f * power >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [k * step for k in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten in [low, high], with 2 and 5 between them where there are few.

    Where fewer than two lie inside, round numbers as on a linear axis.
    """
    decades = math.log10(high / low)
    steps = (1,) if decades > _FEW_DECADES else (1, 2, 5)
    every = max(1, math.ceil(decades / 6)) if len(steps) == 1 else 1
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [f * 10.0**p for p in powers if p % every == 0 for f in steps]
    inside = [t for t in ticks if low * 0.999 <= t <= high * 1.001]
    return inside if len(inside) >= 3 else nice_ticks(low, high)


def number_text(value: float) -> str:
    """A number for people: ``12,000``, ``0.25``, ``3e-07``."""
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        text = f"{value:,.6f}".rstrip("0").rstrip(".")
        return text if len(text) <= 9 else f"{value:,.4g}"
    return f"{value:.3g}"


def tick_text(value: float) -> str:
    """The same, short enough for an axis: ``15k``, ``2M``."""
    if abs(value) >= 1e6:
        return f"{value / 1e6:.6g}M"
    if abs(value) >= 1e4:
        return f"{value / 1e3:.6g}k"
    return number_text(value)


def drawn(chart: Chart) -> dict[str, Any]:
    """What of a chart with something to draw lies where on a canvas, in its units."""
    series = chart.drawable()
    frame = _Frame.around(series, chart.log_y)
    y_ticks = log_ticks(*frame.y) if chart.log_y else nice_ticks(*frame.y)
    return {
        "title": chart.title, "x_label": chart.x_label, "y_label": chart.y_label,
        "width": _WIDTH, "height": _HEIGHT,
        "left": _LEFT, "right": _WIDTH - _RIGHT, "top": _TOP, "bottom": _HEIGHT - _BOTTOM,
        "y_ticks": [(frame.at(frame.x[0], y)[1], tick_text(y)) for y in y_ticks],
        "x_ticks": [(frame.at(x, frame.y[0])[0], tick_text(x)) for x in nice_ticks(*frame.x)],
        "lines": [_line(line, frame, number) for number, line in enumerate(series)],
    }  # fmt: skip


def _is_drawable(point: Point, log_y: bool) -> bool:
    x, y = point
    return math.isfinite(x) and math.isfinite(y) and (y > 0 or not log_y)


@dataclass(frozen=True)
class _Frame:
    """Ranges of the axes, and where their values lie on the canvas."""

    x: tuple[float, float]
    y: tuple[float, float]
    log_y: bool

    @staticmethod
    def around(series: Sequence[Series], log_y: bool) -> _Frame:
        points = [p for s in series for p in s.points if _is_drawable(p, log_y)]
        (x0, x1), (y0, y1) = ((min(v), max(v)) for v in zip(*points, strict=True))
        if x0 == x1:
            x0, x1 = x0 - 1, x1 + 1
        if log_y:
            room = max(1.03, (y1 / y0) ** 0.04)
            return _Frame((x0, x1), (max(y0 / room, 1e-300), y1 * room), True)
        room = 0.05 * (y1 - y0) or 0.05 * abs(y1) or 1.0
        # Counts and errors stay above zero: a margin must not invent negative ones.
        low = max(0.0, y0 - room) if y0 >= 0 else y0 - room
        return _Frame((x0, x1), (low, y1 + room), False)

    def at(self, x: float, y: float) -> Point:
        """Canvas position of a value."""
        (x0, x1), (y0, y1) = self.x, self.y
        across = (x - x0) / (x1 - x0)
        up = math.log(y / y0) / math.log(y1 / y0) if self.log_y else (y - y0) / (y1 - y0)
        return (
            _LEFT + across * (_WIDTH - _LEFT - _RIGHT),
            _HEIGHT - _BOTTOM - up * (_HEIGHT - _TOP - _BOTTOM),
        )


def _line(series: Series, frame: _Frame, number: int) -> dict[str, Any]:
    """Name, number of the colour, paths between gaps, and dots where the points are few."""
    runs: list[list[Point]] = [[]]
    for point in series.points:
        if _is_drawable(point, frame.log_y):
            runs[-1].append(point)
        elif runs[-1]:
            runs.append([])
    total = sum(map(len, runs))
    paths, dots = [], []
    for run in filter(None, runs):
        limit = max(4, MAX_POINTS * len(run) // total)
        places = [frame.at(x, y) for x, y in thinned(run, limit)]
        paths.append("L".join(f"{x:.1f} {y:.1f}" for x, y in places))
        if total <= _MARKED or len(run) == 1:
            dots += places
    return {"name": series.name, "color": number % N_COLORS, "paths": paths, "dots": dots}
