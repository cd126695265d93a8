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

MESH_ELEMENT = "mesh"
GAUSSIANS_ELEMENT = "gaussians"
_JPEG_QUALITY = 88
WEB = Path(__file__).parent / "web"
"""Folder of the templates and programs of pages."""


def number_text(value: float) -> str:
    """Format a number for people: ``12,000``, ``0.25``, ``3e-07``."""
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        text = f"{value:,.6f}".rstrip("0").rstrip(".")
        return text if len(text) <= 9 else f"{value:,.4g}"
    return f"{value:.3g}"


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
    """Return the contents of an element of a page of :func:`scan_page`.

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
