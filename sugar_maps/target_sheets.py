# SPDX-License-Identifier: Apache-2.0
"""Sheets of numbered targets to print, as PDF in exact size.

Targets are drawn as paths: they have sharp edges at every size, and no program smooths them as it
does small pictures.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from sugar_maps.printed_targets import (
    DEFAULT_KIND,
    TARGET_KINDS,
    dictionary_of,
    load_opencv,
)
from sugar_utils.command_text import command_text
from sugar_utils.console import Console
from sugar_utils.errors import UserError
from sugar_utils.files import atomic_path, check_writable
from sugar_utils.flags import non_negative_int, positive_float, positive_int
from sugar_utils.libraries import load_package
from sugar_utils.settings import flag

PAGES = {"a4": (0.210, 0.297), "a3": (0.297, 0.420), "letter": (0.2159, 0.2794)}
"""Width and height of the papers, metres."""

_POINTS = 72 / 0.0254  # of PDF, a metre
_PAGE_MARGIN = 0.008  # metres, which printers leave white
_QUIET_CELLS = 1.5  # white cells around a target
_TEXT_HEIGHT = 0.008  # below a target, metres
_FONT = "Helvetica"
_FONT_SIZE = 9.0  # points
_LEAST_FONT_SIZE = 4.0
_CUT_GRAY = 0.75
_CUT_WIDTH = 0.3  # points
_NON_ZERO = 1  # rule of filling, by which what two rectangles cover is filled as well
_flag = partial(flag, group="targets")


@dataclass(frozen=True)
class TargetSheetOptions:
    """Flags of ``sugar targets``."""

    output: Path = _flag(
        Path("targets.pdf"),
        "PDF to write",
        positional=True,
        parse=Path,
        nargs="?",
    )
    target_size: float = _flag(0.1, "side of the black squares in metres", parse=positive_float)
    count: int = _flag(12, "how many targets", parse=positive_int)
    first: int = _flag(0, "number of the first one", parse=non_negative_int)
    kind: str = _flag(
        DEFAULT_KIND, "which targets; pass --targets KIND later", choices=tuple(TARGET_KINDS)
    )
    page: str = _flag("a4", "paper", choices=tuple(PAGES))
    overwrite: bool = _flag(False, "replace a file that is there")

    def __post_init__(self) -> None:
        if self.output.suffix.lower() != ".pdf":
            raise UserError(f"{self.output}: targets are printed from a PDF; name it NAME.pdf")


class _Grid(NamedTuple):
    """Columns and rows of targets on a page, and the room of each."""

    columns: int
    rows: int
    width: float  # metres
    height: float


def write_target_sheet(options: TargetSheetOptions, console: Console | None = None) -> Path:
    """Write numbered targets for a printer and return the file.

    Raises:
        UserError: OpenCV is missing, the kind has fewer targets, or one does not fit on a page.
    """
    console = console or Console()
    path = options.output
    if path.exists() and not options.overwrite:
        raise UserError(f"{path}: is there already; pass --overwrite True, or another name")
    check_writable(path.parent)
    opencv = load_opencv(command_text("targets"))
    (pdf,) = load_package(command_text("targets"), "reportlab", "reportlab.pdfgen.canvas")
    dictionary = dictionary_of(opencv, options.kind)
    n_kind = len(dictionary.bytesList)
    end = options.first + options.count
    if end > n_kind:
        raise UserError(
            f"--first {options.first} --count {options.count}: {options.kind} has the numbers 0 to "
            f"{n_kind - 1}; choose fewer"
        )
    n_cells = dictionary.markerSize + 2
    grid = _grid_of(options, n_cells)
    per_page = grid.columns * grid.rows
    starts = range(options.first, end, per_page)
    with atomic_path(path) as temporary:
        canvas = _new_canvas(pdf, temporary, PAGES[options.page])
        for start in starts:
            for index, number in enumerate(range(start, min(start + per_page, end))):
                cells = opencv.aruco.generateImageMarker(dictionary, number, n_cells) > 0
                row, column = divmod(index, grid.columns)
                _draw_target(canvas, cells, number, options, grid, (column, row))
            canvas.showPage()
        canvas.save()
    console.info(
        f"{options.count} targets of {1000 * options.target_size:g} mm on {len(starts)} pages: "
        f"{path}; print at 100 %, measure a side, and pass what you measure as --target_size"
    )
    return path


def _grid_of(options: TargetSheetOptions, n_cells: int) -> _Grid:
    """Return how targets are laid out; a ``UserError`` where one is larger than the page."""
    width, height = (side - 2 * _PAGE_MARGIN for side in PAGES[options.page])
    room = options.target_size * (1 + 2 * _QUIET_CELLS / n_cells)
    columns = int(width / room + 1e-9)
    rows = int(height / (room + _TEXT_HEIGHT) + 1e-9)
    if not (columns and rows):
        largest = min(width, height - _TEXT_HEIGHT) / (1 + 2 * _QUIET_CELLS / n_cells)
        raise UserError(
            f"--target_size {options.target_size:g}: does not fit on {options.page} with its white "
            f"border; use {np.floor(1000 * largest) / 1000:g} or less, or a larger --page"
        )
    return _Grid(columns, rows, width / columns, height / rows)


def _new_canvas(pdf: ModuleType, path: Path, page: tuple[float, float]) -> Any:
    """Return a PDF that is drawn on in points from the lower left corner of a page, in metres."""
    size = (_POINTS * page[0], _POINTS * page[1])
    # The same targets are the same bytes each time.
    canvas = pdf.Canvas(str(path), pagesize=size, invariant=1)
    # Viewers fit pages to the paper unless they are asked not to.
    canvas.setViewerPreference("PrintScaling", "None")
    return canvas


def _draw_target(
    canvas: Any,
    cells: np.ndarray,
    number: int,
    options: TargetSheetOptions,
    grid: _Grid,
    place: tuple[int, int],
) -> None:
    """Draw a target, its cutting line and its text.

    Args:
        cells: Which are white. (N, N)
        place: Column and row on the page.
    """
    side = options.target_size
    cell = side / len(cells)
    quiet = _QUIET_CELLS * cell
    page_height = PAGES[options.page][1]
    x_left = _PAGE_MARGIN + place[0] * grid.width + (grid.width - side) / 2
    top = page_height - _PAGE_MARGIN - place[1] * grid.height - quiet
    canvas.setStrokeGray(_CUT_GRAY)
    canvas.setLineWidth(_CUT_WIDTH)
    border = (x_left - quiet, top - side - quiet, side + 2 * quiet, side + 2 * quiet)
    canvas.rect(*_in_points(*border))
    # Runs of both directions in one path, so that no line of white is seen between black cells.
    black = canvas.beginPath()
    for start, end, row in _runs(~cells):
        run = (x_left + start * cell, top - (row + 1) * cell, (end - start) * cell, cell)
        black.rect(*_in_points(*run))
    for start, end, column in _runs(~cells.T):
        run = (x_left + column * cell, top - end * cell, cell, (end - start) * cell)
        black.rect(*_in_points(*run))
    canvas.setFillGray(0)
    canvas.drawPath(black, stroke=0, fill=1, fillMode=_NON_ZERO)
    text = f"{number}   {options.kind}   side {1000 * side:g} mm"
    width = canvas.stringWidth(text, _FONT, 1.0)
    font_size = max(min(_FONT_SIZE, _POINTS * grid.width / width), _LEAST_FONT_SIZE)
    canvas.setFont(_FONT, font_size)
    baseline = top - side - quiet - _TEXT_HEIGHT / 2
    canvas.drawString(_POINTS * (x_left - quiet), _POINTS * baseline, text)


def _in_points(*metres: float) -> list[float]:
    """Return lengths in points of PDF."""
    return [_POINTS * value for value in metres]


def _runs(is_black: np.ndarray) -> list[tuple[int, int, int]]:
    """Return the runs of black cells in each row of a target: start, end and row."""
    runs = []
    for row, values in enumerate(is_black):
        changes = np.flatnonzero(np.diff(np.concatenate([[0], values.astype(int), [0]])))
        for start, end in changes.reshape(-1, 2):
            runs.append((int(start), int(end), row))
    return runs
