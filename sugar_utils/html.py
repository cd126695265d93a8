# SPDX-License-Identifier: Apache-2.0
"""One HTML file that needs nothing else: no font, no picture from elsewhere.

The Jinja template ``web/page.html.j2`` shows blocks, in light and dark, on a phone and on paper.
Models turn by Google's ``<model-viewer>`` as published (version 4.4.0, Apache-2.0, with parts under
the BSD and MIT licences that it names). All text is escaped.
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
from typing import Any
from urllib.parse import quote

import numpy as np
from PIL import Image

from sugar_utils.errors import Notify, printable
from sugar_utils.files import flat_items, write_text_atomic
from sugar_utils.memory import format_bytes

MAX_POINTS = 400  # points drawn of a series
N_COLORS = 8
_WIDTH = 520
_HEIGHT = 290
_LEFT = 62
_RIGHT = 16
_TOP = 12
_BOTTOM = 46
_MARKED = 12
_FEW_DECADES = 2.4
Point = tuple[float, float]

_JPEG_QUALITY = 88
_WEB = Path(__file__).parent / "web"


@dataclass(frozen=True)
class Series:
    name: str
    points: Sequence[Point]


@dataclass(frozen=True)
class Chart:
    title: str
    series: Sequence[Series]
    x_label: str = "iteration"
    y_label: str = ""
    log_y: bool = False

    def can_draw(self, point: Point) -> bool:
        return all(map(math.isfinite, point)) and (point[1] > 0 or not self.log_y)

    def drawable(self) -> list[Series]:
        return [s for s in self.series if any(map(self.can_draw, s.points))]


def thinned(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
    """At most ``limit`` points of a line: the first, the last, and the extremes of each stretch."""
    if len(points) <= limit:
        return list(points)
    kept = [points[0]]
    for stretch in np.array_split(np.array(points[1:-1]), (limit - 2) // 2):
        extremes = {int(stretch[:, 1].argmin()), int(stretch[:, 1].argmax())}
        kept += [tuple(stretch[row].tolist()) for row in sorted(extremes)]
    return [*kept, points[-1]]


def nice_ticks(low: float, high: float, n: int = 5) -> list[float]:
    """About ``n`` round numbers (steps of 1, 2 or 5 times a power of ten) in [low, high]."""
    if not high > low:
        return [low]
    rough = (high - low) / n
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(f * power for f in (1, 2, 5, 10) if f * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [k * step for k in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten in [low, high], with 2 and 5 between few of them; else round numbers."""
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
    frame = _Frame.around([p for s in series for p in s.points if chart.can_draw(p)], chart.log_y)
    y_ticks = log_ticks(*frame.y) if chart.log_y else nice_ticks(*frame.y)
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
        "y_ticks": [(frame.at(frame.x[0], y)[1], tick_text(y)) for y in y_ticks],
        "x_ticks": [(frame.at(x, frame.y[0])[0], tick_text(x)) for x in nice_ticks(*frame.x)],
        "lines": [
            {"name": line.name, "color": number % N_COLORS, **_paths(line.points, chart, frame)}
            for number, line in enumerate(series)
        ],
    }


@dataclass(frozen=True)
class _Frame:
    x: tuple[float, float]
    y: tuple[float, float]
    log_y: bool

    @staticmethod
    def around(points: Sequence[Point], log_y: bool) -> _Frame:
        (x0, x1), (y0, y1) = ((min(v), max(v)) for v in zip(*points, strict=True))
        if x0 == x1:
            x0 = x0 - 1
            x1 = x1 + 1
        if log_y:
            room = max(1.03, (y1 / y0) ** 0.04)
            return _Frame((x0, x1), (max(y0 / room, 1e-300), y1 * room), True)
        room = 0.05 * (y1 - y0) or 0.05 * abs(y1) or 1.0
        # Counts and errors stay above zero: a margin must not invent negative ones.
        low = max(0.0, y0 - room) if y0 >= 0 else y0 - room
        return _Frame((x0, x1), (low, y1 + room), False)

    def at(self, x: float, y: float) -> Point:
        (x0, x1), (y0, y1) = self.x, self.y
        across = (x - x0) / (x1 - x0)
        up = math.log(y / y0) / math.log(y1 / y0) if self.log_y else (y - y0) / (y1 - y0)
        width = _WIDTH - _LEFT - _RIGHT
        height = _HEIGHT - _TOP - _BOTTOM
        return _LEFT + across * width, _HEIGHT - _BOTTOM - up * height


def _paths(points: Sequence[Point], chart: Chart, frame: _Frame) -> dict[str, Any]:
    """Paths between gaps, and dots where the points are few."""
    groups = itertools.groupby(points, chart.can_draw)
    runs = [list(run) for can_draw, run in groups if can_draw]
    total = sum(map(len, runs))
    paths = []
    dots = []
    for run in runs:
        places = [frame.at(*p) for p in thinned(run, max(4, MAX_POINTS * len(run) // total))]
        paths.append("L".join(f"{x:.1f} {y:.1f}" for x, y in places))
        if total <= _MARKED or len(run) == 1:
            dots += places
    return {"paths": paths, "dots": dots}


@dataclass(frozen=True)
class Picture:
    image: np.ndarray | Path  # (H, W, 3) uint8, or an image file
    caption: str = ""
    alt: str = ""


class Page:
    """A report under construction; each method appends something, or nothing where it is empty."""

    def __init__(self, title: str, subtitle: str = "") -> None:
        self._title = title
        self._subtitle = subtitle
        self._blocks: list[dict[str, Any]] = []

    def _add(self, kind: str, **content: Any) -> None:
        self._blocks.append({"kind": kind, **content})

    def heading(self, text: str, level: int = 2) -> None:
        self._add("heading", text=text, level=level)

    def paragraph(self, text: str, note: bool = False) -> None:
        self._add("paragraph", text=text, note=note)

    def facts(self, rows: Iterable[tuple[str, object]]) -> None:
        if rows := list(rows):
            self._add("facts", rows=rows)

    def pairs(self, rows: Iterable[tuple[str, object]], folded: str | None = None) -> None:
        """Names and values below each other; ``folded``: the text to click on to see them."""
        if rows := list(rows):
            self._add("pairs", rows=rows, folded=folded)

    def table(
        self,
        header: Sequence[str],
        rows: Iterable[Sequence[object]],
        text_columns: int = 1,
        folded: str | None = None,
    ) -> None:
        """A table; the first columns, and those with links, are words, the others numbers."""
        if rows := [list(row) for row in rows]:
            links = {i for row in rows for i, cell in enumerate(row) if isinstance(cell, Link)}
            words = links | set(range(text_columns))
            self._add("table", header=header, rows=rows, words=words, folded=folded)

    def charts(self, charts: Iterable[Chart]) -> None:
        """Line charts side by side; empty ones are left out."""
        if figures := [drawn(chart) for chart in charts if chart.drawable()]:
            self._add("charts", charts=figures)

    def pictures(self, pictures: Iterable[Picture], width: int = 640) -> None:
        """Pictures side by side, four in a row where there is room."""
        if figures := [_figure(picture, width) for picture in pictures]:
            self._add("pictures", figures=figures)

    def wide_picture(self, picture: Picture) -> None:
        """One picture over the whole width; narrow screens scroll it."""
        self._add("wide", figure=_figure(picture, width=1600))

    def model(self, glb: bytes) -> None:
        """A textured mesh that can be turned: a GLB with the variants ``textured`` and ``clay``."""
        self._add("model", glb=_base64(glb))

    def files(self, paths: Iterable[Path], root: Path, folded: str | None = None) -> None:
        """Files with their sizes, as links relative to the folder of this page."""
        rows = [(Link.to(path, root), format_bytes(size)) for path, size in sizes_of(paths)]
        self.table(("file", "size"), rows, folded=folded)

    def html(self) -> str:
        component = None
        if any(block["kind"] == "model" for block in self._blocks):
            source = (_WEB / "model-viewer-umd.min.js").read_text(encoding="utf-8")
            # Maps of the source are not carried along.
            component = source.split("\n//# sourceMappingURL")[0]
        return _template().render(
            title=self._title, subtitle=self._subtitle, blocks=self._blocks, component=component
        )


@functools.cache
def _template() -> Any:
    # Only when a page is written: it takes a tenth of a second.
    from jinja2 import Environment, FileSystemLoader

    environment = Environment(
        loader=FileSystemLoader(_WEB),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        # Text in one line that moves no cursor; what is marked as HTML already stays as it is.
        finalize=lambda value: printable(value) if type(value) is str else value,
    )
    environment.filters["shown"] = value_text
    return environment.get_template("page.html.j2")


@dataclass(frozen=True)
class Link:
    """A table cell that leads to a file; plain text without an address."""

    text: str
    href: str = ""

    @staticmethod
    def to(path: Path, root: Path) -> Link:
        """A link from a page in ``root``; plain text where no relative path leads there."""
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
        reason = " ".join(str(error).split()) or type(error).__name__
        notify(f"no report {path}: {reason}; the results themselves are complete")
        return None
    return path


def value_text(value: object) -> str:
    """A value for people: numbers grouped and rounded, lists joined, None a dash."""
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
    """Time for people: ``8.3 s``, ``4 min 05 s``, ``2 h 10 min``."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def flattened(settings: Mapping[str, object]) -> list[tuple[str, object]]:
    """Nested settings as rows with dotted names; numbers as one would type them."""
    return [(name, v if isinstance(v, bool) else _typed(v)) for name, v in flat_items(settings)]


def sizes_of(paths: Iterable[Path]) -> list[tuple[Path, int]]:
    return [
        (path, sum(p.stat().st_size for p in (path, *path.rglob("*")) if p.is_file()))
        for path in paths
        if path.exists()
    ]


def _typed(value: object) -> object:
    if isinstance(value, int | float):
        return f"{value:g}" if isinstance(value, float) else str(value)
    if isinstance(value, list | tuple):
        return ", ".join(str(_typed(v)) for v in value) or None
    return value


def _figure(picture: Picture, width: int) -> dict[str, Any]:
    try:
        uri, (width, height) = _data_uri(picture.image, width)
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        return {"caption": f"{picture.caption} (no picture: {error})"}
    alt = picture.alt or picture.caption
    return {"uri": uri, "width": width, "height": height, "caption": picture.caption, "alt": alt}


def _data_uri(image: np.ndarray | Path, width: int) -> tuple[str, tuple[int, int]]:
    """A picture as text and its size in pixels: PNG where that is smaller, else JPEG."""
    if isinstance(image, np.ndarray):
        picture = Image.fromarray(image)
    else:
        with Image.open(image) as opened:
            picture = opened.convert("RGB")
    if picture.width > width:
        height = max(1, round(picture.height * width / picture.width))
        picture = picture.resize((width, height), Image.Resampling.LANCZOS)
    encoded = {}
    for kind, options in (("jpeg", {"quality": _JPEG_QUALITY}), ("png", {"optimize": False})):
        buffer = io.BytesIO()
        picture.save(buffer, kind, **options)
        encoded[kind] = buffer.getvalue()
    kind, data = min(encoded.items(), key=lambda item: len(item[1]))
    return f"data:image/{kind};base64,{_base64(data)}", picture.size


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode("ascii")
