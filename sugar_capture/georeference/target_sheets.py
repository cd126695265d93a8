# SPDX-License-Identifier: Apache-2.0
"""Sheets of numbered targets to print, as PDF in exact size.

A PDF of squares and a few words is written here: drawn as paths, targets have sharp edges at every
size, and no program smooths them as it does small pictures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sugar_capture.georeference.printed_targets import (
    DEFAULT_KIND,
    TARGET_KINDS,
    dictionary_of,
    load_opencv,
)
from sugar_utils.console import Console
from sugar_utils.errors import UserError
from sugar_utils.files import atomic_path, check_writable
from sugar_utils.flags import non_negative_int, positive_float, positive_int
from sugar_utils.settings import flag

PAGES = {"a4": (0.210, 0.297), "a3": (0.297, 0.420), "letter": (0.2159, 0.2794)}
"""Width and height of the papers, metres."""

_POINTS = 72 / 0.0254  # of PDF, a metre
_PAGE_MARGIN = 0.008  # metres, which printers leave white
_QUIET_CELLS = 1.5  # white cells around a target
_TEXT_HEIGHT = 0.008  # below a target, metres
_FONT_SIZE = 9.0  # points
_FONT_WIDTH = 0.5  # of the size: the mean width of a letter of Helvetica
_LEAST_FONT_SIZE = 4.0
_CUT_GRAY = 0.75
_flag = partial(flag, group="targets")


@dataclass(frozen=True)
class TargetSheetOptions:
    """Flags of ``print_targets.py``."""

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
    opencv = load_opencv("print_targets.py")
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
    pages = []
    for start in range(options.first, end, per_page):
        commands: list[str] = []
        for index, number in enumerate(range(start, min(start + per_page, end))):
            cells = opencv.aruco.generateImageMarker(dictionary, number, n_cells) > 0
            row, column = divmod(index, grid.columns)
            commands += _target_commands(cells, number, options, grid, (column, row))
        pages.append("\n".join(commands))
    with atomic_path(path) as temporary:
        temporary.write_bytes(_pdf_of(pages, PAGES[options.page]))
    console.info(
        f"{options.count} targets of {1000 * options.target_size:g} mm on {len(pages)} pages: "
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


def _target_commands(
    cells: np.ndarray,
    number: int,
    options: TargetSheetOptions,
    grid: _Grid,
    place: tuple[int, int],
) -> list[str]:
    """Return the PDF commands that draw a target, its cutting line and its text.

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
    commands = [
        f"{_CUT_GRAY} G 0.3 w",
        f"{_rectangle(x_left - quiet, top - side - quiet, side + 2 * quiet, side + 2 * quiet)} S",
        "0 g",
    ]
    # Runs of both directions, so that no line of white is seen between black neighbours.
    for start, end, row in _runs(~cells):
        low = top - (row + 1) * cell
        commands.append(_rectangle(x_left + start * cell, low, (end - start) * cell, cell))
    for start, end, column in _runs(~cells.T):
        low = top - end * cell
        commands.append(_rectangle(x_left + column * cell, low, cell, (end - start) * cell))
    commands.append("f")
    text = f"{number}   {options.kind}   side {1000 * side:g} mm"
    available = _POINTS * grid.width / (_FONT_WIDTH * len(text))
    font_size = max(min(_FONT_SIZE, available), _LEAST_FONT_SIZE)
    x = _POINTS * (x_left - quiet)
    y = _POINTS * (top - side - quiet - _TEXT_HEIGHT / 2)
    commands.append(f"BT /F1 {font_size:.2f} Tf {x:.3f} {y:.3f} Td ({text}) Tj ET")
    return commands


def _rectangle(left: float, low: float, width: float, height: float) -> str:
    """Return the PDF command of a rectangle, from metres."""
    return " ".join(f"{_POINTS * value:.4f}" for value in (left, low, width, height)) + " re"


def _runs(is_black: np.ndarray) -> list[tuple[int, int, int]]:
    """Return the runs of black cells in each row of a target: start, end and row."""
    runs = []
    for row, values in enumerate(is_black):
        changes = np.flatnonzero(np.diff(np.concatenate([[0], values.astype(int), [0]])))
        for start, end in changes.reshape(-1, 2):
            runs.append((int(start), int(end), row))
    return runs


def _pdf_of(pages: Sequence[str], size: tuple[float, float]) -> bytes:
    """Return a PDF.

    Args:
        pages: The commands of each page.
        size: Width and height of a page, metres.
    """
    width, height = (_POINTS * side for side in size)
    first_page = 4
    numbers = [first_page + 2 * index for index in range(len(pages))]
    children = " ".join(f"{number} 0 R" for number in numbers)
    objects = [
        # Viewers fit pages to the paper unless they are asked not to.
        b"<< /Type /Catalog /Pages 2 0 R /ViewerPreferences << /PrintScaling /None >> >>",
        f"<< /Type /Pages /Kids [{children}] /Count {len(pages)} >>".encode(),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for number, commands in zip(numbers, pages, strict=True):
        content = commands.encode()
        objects.append(
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 {width:.4f} {height:.4f}] "
            f"/Resources << /Font << /F1 3 0 R >> >> /Contents {number + 1} 0 R >>".encode()
        )
        objects.append(b"<< /Length %d >>\nstream\n" % len(content) + content + b"\nendstream")
    parts = [b"%PDF-1.6\n"]
    offsets = []
    for number, body in enumerate(objects, start=1):
        offsets.append(sum(len(part) for part in parts))
        parts.append(b"%d 0 obj\n" % number + body + b"\nendobj\n")
    table_offset = sum(len(part) for part in parts)
    table = [f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n"]
    table += [f"{offset:010d} 00000 n \n" for offset in offsets]
    table.append(f"trailer\n<< /Size {len(objects) + 1} /Root 1 0 R >>\n")
    table.append(f"startxref\n{table_offset}\n%%EOF\n")
    return b"".join([*parts, "".join(table).encode()])
