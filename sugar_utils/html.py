# SPDX-License-Identifier: Apache-2.0
"""One HTML file that needs nothing else: no font, no picture from elsewhere.

A page collects blocks; the Jinja template ``web/page.html.j2`` shows them, in light and dark, on a
phone and on paper. Pictures are inside the file, and so are models that turn, with the script that
shows them: Google's ``<model-viewer>`` as published (version 4.4.0, Apache-2.0, with parts under
the BSD and MIT licences that it names). All text is escaped: names of files and scenes may hold
anything.
"""

from __future__ import annotations

import base64
import functools
import io
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from PIL import Image

from sugar_utils.charts import Chart, drawn, number_text
from sugar_utils.files import write_text_atomic
from sugar_utils.memory import format_bytes
from sugar_utils.text import printable

PICTURE_WIDTH = 640
WIDE_PICTURE_WIDTH = 1600
_JPEG_QUALITY = 88
_WEB = Path(__file__).parent / "web"


@dataclass(frozen=True)
class Picture:
    """A picture with a line below it.

    Attributes:
        image: (H, W, 3) uint8, or an image file.
        alt: What it shows, for who cannot see it; the caption if empty.
    """

    image: np.ndarray | Path
    caption: str = ""
    alt: str = ""


class Page:
    """A report under construction; each method appends something, or nothing where it is empty."""

    def __init__(self, title: str, subtitle: str = "") -> None:
        self._title, self._subtitle = title, subtitle
        self._blocks: list[dict[str, Any]] = []

    def _add(self, kind: str, **content: Any) -> None:
        self._blocks.append({"kind": kind, **content})

    def heading(self, text: str, level: int = 2) -> None:
        """A heading of level 2 or 3."""
        self._add("heading", text=text, level=level)

    def paragraph(self, text: str, note: bool = False) -> None:
        """A paragraph; ``note`` marks what the reader should not miss."""
        self._add("paragraph", text=text, note=note)

    def facts(self, rows: Iterable[tuple[str, object]]) -> None:
        """A few figures that matter, as many side by side as fit."""
        if rows := list(rows):
            self._add("facts", rows=rows)

    def pairs(self, rows: Iterable[tuple[str, object]], folded: str | None = None) -> None:
        """Names and values below each other.

        Args:
            folded: Text to click on to see the table, for long ones; None shows it at once.
        """
        if rows := list(rows):
            self._add("pairs", rows=rows, folded=folded)

    def table(
        self, header: Sequence[str], rows: Iterable[Sequence[object]], text_columns: int = 1,
        folded: str | None = None,
    ) -> None:  # fmt: skip
        """A table.

        Args:
            rows: As many cells each; paths become links.
            text_columns: Columns from the left whose cells are words; the others are numbers,
                except for paths.
        """
        if rows := [list(row) for row in rows]:
            # A column of files is one of words, wherever it stands.
            links = {i for row in rows for i, cell in enumerate(row) if isinstance(cell, Link)}
            words = links | set(range(text_columns))
            self._add("table", header=header, rows=rows, words=words, folded=folded)

    def charts(self, charts: Iterable[Chart]) -> None:
        """Line charts side by side; empty ones are left out."""
        if figures := [drawn(chart) for chart in charts if chart.drawable()]:
            self._add("charts", charts=figures)

    def pictures(self, pictures: Iterable[Picture], width: int = PICTURE_WIDTH) -> None:
        """Pictures side by side, four in a row where there is room.

        Args:
            width: Larger ones are made smaller, pixels.
        """
        if figures := [_figure(picture, width) for picture in pictures]:
            self._add("pictures", figures=figures)

    def wide_picture(self, picture: Picture, width: int = WIDE_PICTURE_WIDTH) -> None:
        """One picture over the whole width; narrow screens scroll it."""
        self._add("wide", figure=_figure(picture, width))

    def model(self, glb: bytes) -> None:
        """A textured mesh that can be turned: a GLB with the variants ``textured`` and ``clay``."""
        self._add("model", glb=_base64(glb))

    def files(self, paths: Iterable[Path], root: Path, folded: str | None = None) -> None:
        """Files with their sizes, as links relative to the folder of this page.

        Args:
            paths: Files and folders; a folder counts with all that is in it. Those that do not
                exist are left out.
        """
        rows = [(Link.to(path, root), format_bytes(size)) for path, size in sizes_of(paths)]
        self.table(("file", "size"), rows, folded=folded)

    def html(self) -> str:
        """The whole page."""
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


def chart_svg(chart: Chart) -> str:
    """The chart as an ``<svg>`` element; empty text when there is nothing to draw."""
    return _template().module.chart_svg(drawn(chart)) if chart.drawable() else ""


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


def write_page(path: Path, build: Callable[[], Page], notify: Callable[[str], None]) -> Path | None:
    """Build a report and write it, complete or not at all; whatever goes wrong is only told.

    Returns:
        The file, or None without a report.
    """
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


def flattened(settings: Mapping[str, object], prefix: str = "") -> list[tuple[str, object]]:
    """Nested settings as rows with dotted names; numbers as one would type them."""
    rows: list[tuple[str, object]] = []
    for name, value in settings.items():
        if isinstance(value, Mapping):
            rows += flattened(value, f"{prefix}{name}.")
        else:
            rows.append((f"{prefix}{name}", value if isinstance(value, bool) else _typed(value)))
    return rows


def sizes_of(paths: Iterable[Path]) -> list[tuple[Path, int]]:
    """Files and folders that exist, with their bytes."""
    found = []
    for path in paths:
        if path.is_dir():
            found.append((path, sum(p.stat().st_size for p in path.rglob("*") if p.is_file())))
        elif path.is_file():
            found.append((path, path.stat().st_size))
    return found


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
