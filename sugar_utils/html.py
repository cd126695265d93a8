# SPDX-License-Identifier: Apache-2.0
"""One HTML file that needs nothing else: no script, no font, no picture from elsewhere.

Pictures are inside the file, and so are models that turn, with the script that shows them. It reads
in light and dark, on a phone and on paper. All text is escaped: names of files and scenes may hold
anything.
"""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import numpy as np
from PIL import Image

from sugar_utils.charts import N_COLORS, Chart, chart_svg, number_text
from sugar_utils.files import write_text_atomic
from sugar_utils.html_style import page_style
from sugar_utils.memory import format_bytes
from sugar_utils.text import escape
from sugar_utils.turning_model import MODEL_STYLE, model_figure, model_scripts

PICTURE_WIDTH = 640
WIDE_PICTURE_WIDTH = 1600
_JPEG_QUALITY = 88
_TURN = "Turn it with the mouse or a finger. Reduced for this page; the files have all of it."


@dataclass(frozen=True)
class Picture:
    """A picture with a line below it.

    Attributes:
        image: (H, W, 3) uint8, or an image file.
        caption: Text; may be empty.
        alt: What it shows, for who cannot see it; the caption if empty.
    """

    image: np.ndarray | Path
    caption: str = ""
    alt: str = ""


class Page:
    """A report under construction; each method appends something.

    Args:
        title: Heading and window title.
        subtitle: A line below it.
    """

    def __init__(self, title: str, subtitle: str = "") -> None:
        self._title = title
        self._has_models = False
        self._parts = [f"<h1>{escape(title)}</h1>"]
        if subtitle:
            self._parts.append(f'<p class="sub">{escape(subtitle)}</p>')

    def heading(self, text: str, level: int = 2) -> None:
        """A heading of level 2 or 3."""
        self._parts.append(f"<h{level}>{escape(text)}</h{level}>")

    def paragraph(self, text: str, note: bool = False) -> None:
        """A paragraph; ``note`` marks what the reader should not miss."""
        kind = ' class="note"' if note else ""
        self._parts.append(f"<p{kind}>{escape(text)}</p>")

    def facts(self, rows: Iterable[tuple[str, object]]) -> None:
        """A few figures that matter, as many side by side as fit."""
        items = "".join(
            f"<div><dt>{escape(name)}</dt><dd>{escape(value_text(value))}</dd></div>"
            for name, value in rows
        )
        if items:
            self._parts.append(f'<dl class="facts">{items}</dl>')

    def pairs(self, rows: Iterable[tuple[str, object]], folded: str | None = None) -> None:
        """Names and values below each other.

        Args:
            rows: Values are shown by :func:`value_text`.
            folded: Text to click on to see the table, for long ones; None shows it at once.
        """
        cells = "".join(
            f'<tr><th scope="row">{escape(name)}</th><td>{escape(value_text(value))}</td></tr>'
            for name, value in rows
        )
        if not cells:
            return
        table = f'<div class="scroll"><table class="pairs"><tbody>{cells}</tbody></table></div>'
        self._parts.append(_folded(table, folded))

    def table(
        self, header: Sequence[str], rows: Iterable[Sequence[object]], text_columns: int = 1
    ) -> None:
        """A table.

        Args:
            header: Names of the columns.
            rows: As many cells each; paths become links.
            text_columns: Columns from the left whose cells are words; the others are numbers,
                except for paths.
        """
        rows = [list(row) for row in rows]
        if rows:
            self._parts.append(_table(header, rows, text_columns))

    def charts(self, charts: Iterable[Chart]) -> None:
        """Line charts side by side; empty ones are left out."""
        figures = [_chart_figure(chart) for chart in charts if chart.drawable()]
        if figures:
            self._parts.append(f'<div class="charts">{"".join(figures)}</div>')

    def pictures(self, pictures: Iterable[Picture], width: int = PICTURE_WIDTH) -> None:
        """Pictures side by side, four in a row where there is room.

        Args:
            pictures: Pictures that cannot be read are named in their caption.
            width: Larger ones are made smaller, pixels.
        """
        figures = "".join(_figure(picture, width) for picture in pictures)
        if figures:
            self._parts.append(f'<div class="pictures">{figures}</div>')

    def wide_picture(self, picture: Picture, width: int = WIDE_PICTURE_WIDTH) -> None:
        """One picture over the whole width; narrow screens scroll it."""
        self._parts.append(_figure(picture, width, kind=' class="wide"'))

    def model(self, glb: bytes) -> None:
        """A textured mesh that can be turned.

        Args:
            glb: A file with the variants ``textured`` and ``clay``.
        """
        self._parts.append(model_figure(glb, _TURN))
        self._has_models = True

    def files(self, paths: Iterable[Path], root: Path, folded: str | None = None) -> None:
        """Files with their sizes, as links relative to the folder of this page.

        Args:
            paths: Files and folders; a folder counts with all that is in it. Those that do not
                exist are left out.
            root: Folder that the page will be written to.
            folded: As in :meth:`pairs`.
        """
        rows = [(Link.to(path, root), format_bytes(size)) for path, size in sizes_of(paths)]
        if rows:
            self._parts.append(_folded(_table(("file", "size"), rows, 1), folded))

    def html(self) -> str:
        """The whole page."""
        style, scripts = page_style(), ""
        if self._has_models:
            style, scripts = style + MODEL_STYLE, model_scripts()
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            '<meta name="color-scheme" content="light dark">'
            f"<title>{escape(self._title)}</title><style>{style}</style></head>\n<body>\n"
            + "\n".join(self._parts)
            + f"\n{scripts}</body></html>\n"
        )


@dataclass(frozen=True)
class Link:
    """A table cell that leads to a file."""

    html: str

    @staticmethod
    def to(path: Path, root: Path) -> Link:
        """A link from a page in ``root``; plain text where no relative path leads there."""
        try:
            relative = Path(os.path.relpath(path, root)).as_posix()
        except ValueError:
            # Another drive on Windows.
            return Link(escape(str(path)))
        return Link(f'<a href="{escape(quote(os.fsencode(relative)))}">{escape(relative)}</a>')


def write_page(path: Path, build: Callable[[], Page], notify: Callable[[str], None]) -> Path | None:
    """Build a report and write it, complete or not at all; whatever goes wrong is only told.

    Args:
        path: The file.
        build: Makes the page.
        notify: Told why there is no report.

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


def _folded(table: str, summary: str | None) -> str:
    if summary is None:
        return table
    return f"<details><summary>{escape(summary)}</summary>{table}</details>"


def _table(header: Sequence[str], rows: Sequence[Sequence[object]], text_columns: int) -> str:
    # A column of files is one of words, wherever it stands.
    paths = {i for row in rows for i, cell in enumerate(row) if isinstance(cell, Link)}
    words = paths | set(range(text_columns))

    def cell(tag: str, column: int, content: object) -> str:
        if isinstance(content, Link):
            return f'<{tag} class="path">{content.html}</{tag}>'
        kind = "" if column in words else ' class="number"'
        return f"<{tag}{kind}>{escape(value_text(content))}</{tag}>"

    head = "".join(cell("th", i, name) for i, name in enumerate(header))
    body = "".join(
        "<tr>" + "".join(cell("td", i, value) for i, value in enumerate(row)) + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _chart_figure(chart: Chart) -> str:
    series = chart.drawable()
    legend = ""
    if len(series) > 1:
        items = "".join(
            f'<li><svg viewBox="0 0 22 10" aria-hidden="true"><path class="line s{k % N_COLORS}" '
            f'd="M1 5H21" style="stroke-width:3"/></svg>{escape(line.name)}</li>'
            for k, line in enumerate(series)
        )
        legend = f'<ul class="legend">{items}</ul>'
    return (
        f'<figure class="chart"><figcaption>{escape(chart.title)}</figcaption>{legend}'
        f"{chart_svg(chart)}</figure>"
    )


def _figure(picture: Picture, width: int, kind: str = "") -> str:
    caption, alt = escape(picture.caption), escape(picture.alt or picture.caption)
    try:
        uri, size = _data_uri(picture.image, width)
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        reason = f"{caption} (no picture: {escape(str(error))})"
        return f"<figure{kind}><figcaption>{reason}</figcaption></figure>"
    image = f'<img src="{uri}" width="{size[0]}" height="{size[1]}" alt="{alt}">'
    below = f"<figcaption>{caption}</figcaption>" if caption else ""
    return f"<figure{kind}>{image}{below}</figure>"


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
    return f"data:image/{kind};base64,{base64.b64encode(data).decode('ascii')}", picture.size
