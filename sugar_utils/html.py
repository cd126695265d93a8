# SPDX-License-Identifier: Apache-2.0
"""One HTML file that needs nothing else: no font, no picture from elsewhere.

The Jinja template ``web/page.html.j2`` shows blocks, in light and dark, on a phone and on paper.
``web/scan.html.j2`` is the 3D viewer of a mesh and its Gaussians, which a report frames as the page
that it is. All text is escaped.
"""

from __future__ import annotations

import base64
import functools
import io
import itertools
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import numpy as np
from PIL import Image

from sugar_utils.errors import Notify, printable, reason_of
from sugar_utils.files import flat_items, write_text_atomic
from sugar_utils.memory import format_bytes

if TYPE_CHECKING:
    from jinja2 import Template

MAX_POINTS = 400  # points drawn of a series
N_COLORS = 8
MESH_ELEMENT = "mesh"
GAUSSIANS_ELEMENT = "gaussians"
# A chart and its margins, in units of its SVG canvas.
_WIDTH = 520
_HEIGHT = 290
_LEFT = 62
_RIGHT = 16
_TOP = 12
_BOTTOM = 46
_MAX_DOTS = 12  # points of a line that are marked with dots
_FEW_DECADES = 2.4  # of a logarithmic axis that also has ticks at 2 and 5
_STEP_FACTORS = (1, 2, 5, 10)
_JPEG_QUALITY = 88
WEB = Path(__file__).parent / "web"
"""Folder of the templates and programs of pages."""

Point = tuple[float, float]
Interval = tuple[float, float]  # its lower and its upper end


@dataclass(frozen=True)
class Series:
    """One line of a chart."""

    name: str
    points: Sequence[Point]


@dataclass(frozen=True)
class Chart:
    """A line chart of a page."""

    title: str
    series: Sequence[Series]
    x_label: str = "iteration"
    y_label: str = ""
    log_y: bool = False

    def can_draw(self, point: Point) -> bool:
        """Whether a point is finite and, on a logarithmic axis, positive."""
        x, y = point
        if not (math.isfinite(x) and math.isfinite(y)):
            return False
        return y > 0 or not self.log_y

    def drawable(self) -> list[Series]:
        """Series with at least one point to draw."""
        return [series for series in self.series if any(map(self.can_draw, series.points))]


def thinned(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
    """At most ``limit`` points of a line: the first, the last, and the extremes of each stretch."""
    if len(points) <= limit:
        return list(points)
    selected = [points[0]]
    inner_points = np.array(points[1:-1])
    for stretch in np.array_split(inner_points, (limit - 2) // 2):
        values = stretch[:, 1]
        extremes = {int(values.argmin()), int(values.argmax())}
        for row in sorted(extremes):
            x, y = stretch[row].tolist()
            selected.append((x, y))
    return [*selected, points[-1]]


def nice_ticks(low: float, high: float, n: int = 5) -> list[float]:
    """About ``n`` round numbers (steps of 1, 2 or 5 times a power of ten) in [low, high]."""
    if not high > low:
        return [low]
    least_step = (high - low) / n
    power = 10.0 ** math.floor(math.log10(least_step))
    steps = [factor * power for factor in _STEP_FACTORS]
    step = next(step for step in steps if step >= least_step * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [k * step for k in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten in [low, high], with 2 and 5 between few of them; else round numbers."""
    decades = math.log10(high / low)
    if decades > _FEW_DECADES:
        factors = (1,)
        power_step = max(1, math.ceil(decades / 6))
    else:
        factors = (1, 2, 5)
        power_step = 1
    first = math.floor(math.log10(low))
    last = math.ceil(math.log10(high))
    ticks = []
    for power in range(first, last + 1):
        if power % power_step == 0:
            ticks += [factor * 10.0**power for factor in factors]
    inside = [tick for tick in ticks if low * 0.999 <= tick <= high * 1.001]
    return inside if len(inside) >= 3 else nice_ticks(low, high)


def number_text(value: float) -> str:
    """Format a number for people: ``12,000``, ``0.25``, ``3e-07``."""
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        text = f"{value:,.6f}".rstrip("0").rstrip(".")
        return text if len(text) <= 9 else f"{value:,.4g}"
    return f"{value:.3g}"


def tick_text(value: float) -> str:
    """Format a number for an axis, shorter: ``15k``, ``2M``."""
    if abs(value) >= 1e6:
        return f"{value / 1e6:.6g}M"
    if abs(value) >= 1e4:
        return f"{value / 1e3:.6g}k"
    return number_text(value)


def drawn(chart: Chart) -> dict[str, object]:
    """Lay out a chart that has something to draw: values of the page's template."""
    series = chart.drawable()
    points = []
    for line in series:
        points += [point for point in line.points if chart.can_draw(point)]
    axes = _Axes.around(points, chart.log_y)
    y_values = log_ticks(*axes.y) if chart.log_y else nice_ticks(*axes.y)
    x_ticks = [(axes.canvas_x(x), tick_text(x)) for x in nice_ticks(*axes.x)]
    y_ticks = [(axes.canvas_y(y), tick_text(y)) for y in y_values]
    lines = []
    for number, line in enumerate(series):
        layout = _line_layout(line.points, chart, axes)
        lines.append({"name": line.name, "color": number % N_COLORS, **layout})
    return {
        "title": chart.title,
        "x_label": chart.x_label,
        "y_label": chart.y_label,
        "width": _WIDTH,
        "height": _HEIGHT,
        "left": _LEFT,
        "right": _WIDTH - _RIGHT,
        "top": _TOP,
        "bottom": _HEIGHT - _BOTTOM,
        "y_ticks": y_ticks,
        "x_ticks": x_ticks,
        "lines": lines,
    }


@dataclass(frozen=True)
class _Axes:
    """Intervals of a chart's axes, and where its values are on the canvas."""

    x: Interval
    y: Interval
    log_y: bool

    @staticmethod
    def around(points: Sequence[Point], log_y: bool) -> _Axes:
        """Make axes that span the points, with a margin above and below."""
        x_values = [x for x, _ in points]
        y_values = [y for _, y in points]
        x_interval = (min(x_values), max(x_values))
        if x_interval[0] == x_interval[1]:
            x_interval = (x_interval[0] - 1, x_interval[1] + 1)
        low = min(y_values)
        high = max(y_values)
        if log_y:
            margin = max(1.03, (high / low) ** 0.04)
            return _Axes(x_interval, (max(low / margin, 1e-300), high * margin), True)
        margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
        # Counts and errors stay above zero: a margin must not invent negative ones.
        bottom = max(0.0, low - margin) if low >= 0 else low - margin
        return _Axes(x_interval, (bottom, high + margin), False)

    def canvas_x(self, x: float) -> float:
        """Horizontal position of a value on the canvas."""
        low, high = self.x
        share = (x - low) / (high - low)
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def canvas_y(self, y: float) -> float:
        """Vertical position of a value on the canvas, from its top."""
        bottom, top = self.y
        if self.log_y:
            share = math.log(y / bottom) / math.log(top / bottom)
        else:
            share = (y - bottom) / (top - bottom)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)

    def canvas_point(self, point: Point) -> Point:
        """Position of a point on the canvas."""
        x, y = point
        return self.canvas_x(x), self.canvas_y(y)


def _line_layout(points: Sequence[Point], chart: Chart, axes: _Axes) -> dict[str, object]:
    """SVG paths between gaps of a line, and positions of dots where the points are few."""
    groups = itertools.groupby(points, chart.can_draw)
    runs = [list(run) for can_draw, run in groups if can_draw]
    total = sum(len(run) for run in runs)
    paths = []
    dots = []
    for run in runs:
        limit = max(4, MAX_POINTS * len(run) // total)
        positions = [axes.canvas_point(point) for point in thinned(run, limit)]
        paths.append("L".join(f"{x:.1f} {y:.1f}" for x, y in positions))
        if total <= _MAX_DOTS or len(run) == 1:
            dots += positions
    return {"paths": paths, "dots": dots}


@dataclass(frozen=True)
class Picture:
    """A picture of a page, with a line below it."""

    image: np.ndarray | Path  # (H, W, 3) uint8, or an image file
    caption: str = ""
    alt: str = ""  # text in place of the picture; unset: the caption


class Page:
    """A report under construction; each method appends something, or nothing where it is empty."""

    def __init__(self, title: str, subtitle: str = "") -> None:
        self._title = title
        self._subtitle = subtitle
        self._blocks: list[dict[str, object]] = []

    def _add(self, kind: str, **content: object) -> None:
        self._blocks.append({"kind": kind, **content})

    def heading(self, text: str, level: int = 2) -> None:
        """Append a heading."""
        self._add("heading", text=text, level=level)

    def paragraph(self, text: str, note: bool = False) -> None:
        """Append a paragraph; a note is set apart."""
        self._add("paragraph", text=text, note=note)

    def facts(self, rows: Iterable[tuple[str, object]]) -> None:
        """Append names and values next to each other."""
        facts = list(rows)
        if facts:
            self._add("facts", rows=facts)

    def pairs(self, rows: Iterable[tuple[str, object]], folded: str | None = None) -> None:
        """Append names and values below each other; ``folded``: the text to click on for them."""
        pairs = list(rows)
        if pairs:
            self._add("pairs", rows=pairs, folded=folded)

    def table(
        self,
        header: Sequence[str],
        rows: Iterable[Sequence[object]],
        text_columns: int = 1,
        folded: str | None = None,
    ) -> None:
        """Append a table; the first columns, and those with links, are text, the others numbers."""
        cells = [list(row) for row in rows]
        if not cells:
            return
        columns = set(range(text_columns))
        for row in cells:
            columns |= {number for number, cell in enumerate(row) if isinstance(cell, Link)}
        self._add("table", header=header, rows=cells, words=columns, folded=folded)

    def charts(self, charts: Iterable[Chart]) -> None:
        """Append line charts side by side; empty ones are left out."""
        layouts = [drawn(chart) for chart in charts if chart.drawable()]
        if layouts:
            self._add("charts", charts=layouts)

    def pictures(self, pictures: Iterable[Picture], width: int = 640) -> None:
        """Append pictures side by side, four in a row where there is room."""
        figures = [_figure(picture, width) for picture in pictures]
        if figures:
            self._add("pictures", figures=figures)

    def wide_picture(self, picture: Picture) -> None:
        """Append one picture over the whole width; narrow screens scroll it."""
        self._add("wide", figure=_figure(picture, width=1600))

    def frame(self, path: Path, root: Path, title: str) -> None:
        """Append another page, by a link relative to the folder of this one.

        Browsers load it when its title is clicked, because pages of scans are large.
        """
        link = Link.to(path, root)
        if link.href:
            self._add("frame", href=link.href, folded=title)

    def files(self, paths: Iterable[Path], root: Path, folded: str | None = None) -> None:
        """Append files with their sizes, as links relative to the folder of this page."""
        rows = [(Link.to(path, root), format_bytes(size)) for path, size in sizes_of(paths)]
        self.table(("file", "size"), rows, folded=folded)

    def html(self) -> str:
        """The page as text."""
        return _template("page.html.j2").render(
            title=self._title, subtitle=self._subtitle, blocks=self._blocks
        )


def scan_page(title: str, glb: bytes, spz: bytes, program: str) -> str:
    """Return a page with a mesh and Gaussians side by side, which needs nothing else.

    Args:
        title: Heading of the page.
        glb: The mesh, y up.
        spz: The Gaussians, in the same world.
        program: The script that draws both.
    """
    return _template("scan.html.j2").render(
        title=title,
        parts={MESH_ELEMENT: _base64(glb), GAUSSIANS_ELEMENT: _base64(spz)},
        program=program,
    )


def element_bytes(page: str, element: str) -> bytes:
    """Return what a page of :func:`scan_page` holds in an element.

    Raises:
        ValueError: There is no such element.
    """
    start = page.index(f'id="{element}">') + len(f'id="{element}">')
    return base64.b64decode(page[start : page.index("<", start)])


@functools.cache
def _template(name: str) -> Template:
    # Only when a page is written: it takes a tenth of a second.
    from jinja2 import Environment, FileSystemLoader

    environment = Environment(
        loader=FileSystemLoader(WEB),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_without_controls,
    )
    environment.filters["shown"] = value_text
    return environment.get_template(name)


def _without_controls(value: object) -> object:
    """Escape control characters of plain text; text that is marked as HTML is of another type."""
    return printable(value) if type(value) is str else value


@dataclass(frozen=True)
class Link:
    """A table cell that leads to a file; plain text without an address."""

    text: str
    href: str = ""

    @staticmethod
    def to(path: Path, root: Path) -> Link:
        """Make a link from a page in ``root``; plain text where no relative path leads there."""
        try:
            relative = Path(os.path.relpath(path, root)).as_posix()
        except ValueError:
            # Another drive on Windows.
            return Link(str(path))
        return Link(relative, quote(os.fsencode(relative)))


def write_page(path: Path, build: Callable[[], Page], notify: Notify) -> Path | None:
    """Build a report and write it, complete or not at all; None where that failed."""
    try:
        write_text_atomic(path, build().html())
    # The results a report is about are on the disk already and may have taken a day. No defect
    # of the report, and no file it stumbles over, may turn them into a failed run.
    except Exception as error:
        reason = reason_of(error)
        notify(f"no report {path}: {reason}; the results themselves are complete")
        return None
    return path


def value_text(value: object) -> str:
    """Format a value for people: numbers grouped and rounded, lists joined, None a dash."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return number_text(value)
    if isinstance(value, list | tuple):
        return ", ".join(map(value_text, value)) or "–"
    return str(value)


def duration_text(seconds: float) -> str:
    """Format a time for people: ``8.3 s``, ``4 min 05 s``, ``2 h 10 min``."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def flattened(settings: Mapping[str, object]) -> list[tuple[str, object]]:
    """Nested settings as rows with dotted names; numbers as one would type them."""
    rows = []
    for name, value in flat_items(settings):
        # Pages show a truth value as yes or no.
        rows.append((name, value if isinstance(value, bool) else _typed(value)))
    return rows


def _typed(value: object) -> object:
    """Numbers, and lists of them, as one would type them; None for an empty list."""
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, list | tuple):
        return ", ".join(str(_typed(item)) for item in value) or None
    return value


def sizes_of(paths: Iterable[Path]) -> list[tuple[Path, int]]:
    """Files and folders that exist, with their sizes in bytes."""
    sizes = []
    for path in paths:
        if path.exists():
            files = [file for file in (path, *path.rglob("*")) if file.is_file()]
            sizes.append((path, sum(file.stat().st_size for file in files)))
    return sizes


def _figure(picture: Picture, width: int) -> dict[str, object]:
    """Encode a picture for the page's template; only the caption where it cannot be read."""
    try:
        image = _small_image(picture.image, width)
        uri = _data_uri(image)
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        return {"caption": f"{picture.caption} (no picture: {error})"}
    return {
        "uri": uri,
        "width": image.width,
        "height": image.height,
        "caption": picture.caption,
        "alt": picture.alt or picture.caption,
    }


def _small_image(source: np.ndarray | Path, width: int) -> Image.Image:
    """Read an image, no wider than ``width`` pixels."""
    if isinstance(source, np.ndarray):
        image = Image.fromarray(source)
    else:
        with Image.open(source) as opened:
            image = opened.convert("RGB")
    if image.width <= width:
        return image
    height = max(1, round(image.height * width / image.width))
    return image.resize((width, height), Image.Resampling.LANCZOS)


def _data_uri(image: Image.Image) -> str:
    """Encode an image as text: as PNG where that is smaller, else as JPEG."""
    jpeg_buffer = io.BytesIO()
    image.save(jpeg_buffer, "jpeg", quality=_JPEG_QUALITY)
    png_buffer = io.BytesIO()
    image.save(png_buffer, "png", optimize=False)
    jpeg = jpeg_buffer.getvalue()
    png = png_buffer.getvalue()
    if len(png) < len(jpeg):
        return f"data:image/png;base64,{_base64(png)}"
    return f"data:image/jpeg;base64,{_base64(jpeg)}"


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode("ascii")
