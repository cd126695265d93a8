# SPDX-License-Identifier: Apache-2.0
"""Files of control points: positions on the map, and the pixels of photographs that show them.

Two layouts are read. ``gcp_list.txt`` of OpenDroneMap has a coordinate system in its first line,
then lines ``x y z u v image [name]``. Metashape and RealityScan export a table of markers, and a
second one says where photographs show them: image, marker, x, y.

Columns are parted by tabs, semicolons, commas or blanks, whichever makes rows of most lines, and
quotes keep together what belongs together. Numbers may have a decimal comma.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gaussian_splatting.data.names import PHOTOGRAPH_SUFFIXES, RAW_SUFFIXES
from sugar_capture.camera_readers.parsing import decoded_text, with_decimal_point
from sugar_maps.map_systems import WGS84, MapSystem, system_of_code, system_of_text
from sugar_utils.errors import UserError, printable
from sugar_utils.schemas import FAR

_ADVICE = "correct the line"
_CHECK_WORDS = ("check", "chk")  # in the names of points that are held out
_SYSTEM_COMMENT = re.compile(r"#\s*CoordinateSystem:\s*(.+)", re.IGNORECASE)
_NUMBER = re.compile(r"(?<!\d)\d{1,6}(?!\d)")  # of a target, in the name of a point
_DIGITS = re.compile(r"[-+]?(\d[\d.,]*)?\d")  # also with signs of thousands, which are refused
_PARTED = re.compile(r"\d[,'’\s]\d")  # digits with something between thousands
_LIST_COLUMNS = 6  # of gcp_list.txt, without the name
_PROJECTIONS = "projections.csv"
_BLANKS = " "  # any number of blanks and tabs
_DELIMITERS = (";", "\t", _BLANKS, ",")  # of columns; the first of those that fit equally counts
_IMAGE_ENDS = (*PHOTOGRAPH_SUFFIXES, *RAW_SUFFIXES)
_MARKER_COLUMNS = {
    "label": ("label", "name", "marker", "point", "id", "gcp", "marker label", "number", "target"),
    "x": ("x", "easting", "east", "e", "longitude", "lon", "long"),
    "y": ("y", "northing", "north", "n", "latitude", "lat"),
    "z": ("z", "altitude", "height", "elevation", "alt", "up", "h"),
}
_PROJECTION_COLUMNS = {
    "image": ("image", "camera", "photo", "image label", "camera label", "photo label", "filename"),
    "marker": ("marker", "point", "gcp", "label", "marker label", "name", "gcp label"),
    "x": ("x", "u", "pixel x", "x px", "im x", "column"),
    "y": ("y", "v", "pixel y", "y px", "im y", "row"),
}
_DEGREES = ("longitude", "lon", "long")


class PointObservation(NamedTuple):
    """A pixel that shows a control point."""

    image: str  # name of the photograph, as the file gives it
    u: float  # pixels from the left edge of the photograph
    v: float  # pixels from its top edge
    context: str  # file and line, for errors


@dataclass(frozen=True)
class ControlPoint:
    """A position on the map, and the pixels that show it."""

    name: str
    position: np.ndarray  # in the system of its file, (3,) float64
    observations: tuple[PointObservation, ...]

    @property
    def target_number(self) -> int | None:
        """Number of the printed target in its name; None for other names."""
        numbers = _NUMBER.findall(self.name)
        return int(numbers[0]) if len(numbers) == 1 else None

    @property
    def is_check(self) -> bool:
        """Whether its name says that it is held out."""
        name = self.name.lower()
        return any(word in name for word in _CHECK_WORDS)


@dataclass(frozen=True)
class ControlPoints:
    """The control points of a file, and their coordinate system; None if it has none."""

    points: tuple[ControlPoint, ...]
    system: MapSystem | None
    context: str  # the file, for errors


class _Line(NamedTuple):
    """A line of a text file that has content."""

    text: str
    context: str  # file and number


def read_control_points(paths: Sequence[Path], needs_pixels: bool = True) -> ControlPoints:
    """Read a ``gcp_list.txt``, or markers and their projections of Metashape.

    Args:
        needs_pixels: Whether markers need projections; points that are printed targets have none.
        paths: The file, and for Metashape the one with the projections, which may be left out
            where it lies beside the first as ``projections.csv`` or ``NAME_projections.csv``.

    Raises:
        UserError: A file is missing, or a line does not fit; the message names file and line.
    """
    if len(paths) > 2:
        raise UserError(f"--gcp {paths[2]}: is a third file; pass the markers and the projections")
    lines = _lines_of(paths[0])
    if not lines:
        raise UserError(f"{paths[0]}: is empty; write control points into it")
    delimiter = _list_delimiter(lines) if len(paths) == 1 else None
    if delimiter is not None:
        return _read_list(paths[0], lines, delimiter)
    return _read_markers(paths[0], lines, _projections_of(paths, needs_pixels))


def _lines_of(path: Path) -> list[_Line]:
    """Return the lines of a text file that are not empty."""
    lines = []
    for number, text in enumerate(decoded_text(path).splitlines(), start=1):
        if text.strip():
            lines.append(_Line(text.strip(), f"{path}, line {number}"))
    return lines


def _split(text: str, delimiter: str) -> list[str]:
    """Return the columns of a line; quoted text is one column."""
    if delimiter == _BLANKS:
        text = re.sub(r"\s", " ", text)
    try:
        row = next(csv.reader([text], delimiter=delimiter, skipinitialspace=True), [])
    except csv.Error:
        # A row without values is refused where it is read.
        row = []
    words = [word.strip() for word in row]
    return [word for word in words if word] if delimiter == _BLANKS else words


def _delimiter_of(lines: Sequence[_Line], is_row: Callable[[Sequence[str]], bool]) -> str | None:
    """Return the delimiter of most lines; None if no line is a row.

    Args:
        is_row: Whether the columns of a line are a row of the file.
    """
    texts = [line.text for line in lines if not line.text.startswith("#")]
    counts = {
        delimiter: sum(is_row(_split(text, delimiter)) for text in texts)
        for delimiter in _DELIMITERS
    }
    best = max(_DELIMITERS, key=counts.__getitem__)
    return best if counts[best] else None


def _list_delimiter(lines: Sequence[_Line]) -> str | None:
    """Return the delimiter of a ``gcp_list.txt``; None for a table of markers."""
    delimiter = _delimiter_of(lines[1:], _is_list_row)
    if delimiter is None:
        # Rows may be damaged; a table of markers has commas or semicolons, or names its columns.
        rows = [line for line in lines[1:] if not line.text.startswith("#")]
        row = rows[0] if rows else lines[0]
        is_short = bool(rows) and len(row.text.split()) < _LIST_COLUMNS - 1
        if is_short or re.search("[,;]", row.text):
            return None
        delimiter = _BLANKS
    header = _indices_of(_split(lines[0].text.lstrip("#"), delimiter), _MARKER_COLUMNS)
    return None if len(header) == len(_MARKER_COLUMNS) else delimiter


def _is_list_row(words: Sequence[str]) -> bool:
    """Whether columns are x, y, z, u, v and an image, or numbers that end in an image."""
    if len(words) < _LIST_COLUMNS or not _DIGITS.fullmatch(words[0]):
        return False
    numbers = [_is_number(word) for word in words[:_LIST_COLUMNS]]
    return any(map(_is_photograph, words)) or (all(numbers[:-1]) and not numbers[-1])


def _is_photograph(word: str) -> bool:
    return word.lower().endswith(_IMAGE_ENDS)


class _ListRow(NamedTuple):
    """A line of a ``gcp_list.txt``."""

    position: np.ndarray  # (3,)
    observation: PointObservation
    words: list[str]  # the name of the point and what else follows the image


def _read_list(path: Path, lines: Sequence[_Line], delimiter: str) -> ControlPoints:
    """Read a ``gcp_list.txt`` of OpenDroneMap."""
    system = system_of_text(lines[0].text, lines[0].context)
    rows = [_list_row(line, delimiter) for line in lines[1:] if not line.text.startswith("#")]
    has_blanks = delimiter == _BLANKS and _are_names_cut(rows)
    collected = _Collected()
    for row in rows:
        # Points without a name are identified by their coordinates.
        name = " ".join(f"{value:.15g}" for value in row.position)
        if row.words:
            name = printable(" ".join(row.words) if has_blanks else row.words[0])
        collected.add_position(name, row.position, row.observation.context)
        collected.add_observation(name, row.observation)
    return ControlPoints(collected.points(), system, str(path))


def _list_row(line: _Line, delimiter: str) -> _ListRow:
    words = _split(line.text, delimiter)
    context = line.context
    if len(words) < _LIST_COLUMNS:
        raise UserError(f"{context}: has {len(words)} columns of x y z u v image; {_ADVICE}")
    first = _LIST_COLUMNS - 1
    if delimiter == "," and _is_number(words[first]) and any(map(_is_photograph, words)):
        raise UserError(
            f"{context}: has {len(words)} columns of x y z u v image: commas part columns, and are "
            "in numbers; write decimal points"
        )
    x, y, z, u, v = (_number(word, context) for word in words[:first])
    end = first + 1
    if delimiter == _BLANKS:
        # A name of an image may have blanks; it ends at its suffix.
        ends = [row for row in range(end, len(words) + 1) if _is_photograph(words[row - 1])]
        end = ends[0] if ends else end
    image = " ".join(words[first:end])
    names = [word for word in words[end:] if word]
    return _ListRow(np.array([x, y, z]), PointObservation(image, u, v, context), names)


def _are_names_cut(rows: Sequence[_ListRow]) -> bool:
    """Whether the first words of names, of rows with several, belong to several positions."""
    positions: dict[str, np.ndarray] = {}
    for row in rows:
        if len(row.words) > 1:
            previous = positions.setdefault(row.words[0], row.position)
            if not np.array_equal(previous, row.position):
                return True
    return False


class _Collected:
    """Positions and observations of control points, collected line by line."""

    def __init__(self) -> None:
        self._positions: dict[str, np.ndarray] = {}
        self._observations: dict[str, list[PointObservation]] = {}

    def add_position(self, name: str, position: np.ndarray, context: str) -> None:
        """Note where a point is; a ``UserError`` where it is somewhere else already."""
        previous = self._positions.setdefault(name, position)
        if not np.array_equal(previous, position):
            raise UserError(f"{context}: {name} has another position than before; {_ADVICE}")
        self._observations.setdefault(name, [])

    def add_observation(self, name: str, observation: PointObservation) -> None:
        """Note a pixel of a point; a ``UserError`` where its image shows the point already."""
        observations = self._observations[name]
        for other in observations:
            if other.image == observation.image:
                raise UserError(
                    f"{observation.context}: {name} is in {observation.image} already "
                    f"({other.context}); remove one of the lines"
                )
        observations.append(observation)

    def has(self, name: str) -> bool:
        """Whether a point of this name has a position."""
        return name in self._positions

    def points(self) -> tuple[ControlPoint, ...]:
        """Return the points in the order of their first lines."""
        return tuple(
            ControlPoint(name, position, tuple(self._observations[name]))
            for name, position in self._positions.items()
        )


def _projections_of(paths: Sequence[Path], needs_pixels: bool) -> Path | None:
    """Return the file that says where photographs show markers; None where it may be missing."""
    if len(paths) == 2:
        return paths[1]
    markers = paths[0]
    candidates = [
        markers.with_name(f"{markers.stem}_{_PROJECTIONS}"),
        markers.with_name(_PROJECTIONS),
    ]
    for path in candidates:
        if path.is_file():
            return path
    if not needs_pixels:
        return None
    raise UserError(
        f"{markers}: has no pixels, and there is no {candidates[0].name} beside it; pass the file "
        "with image, marker, x, y as the second of --gcp, or --targets for printed targets"
    )


def _read_markers(path: Path, lines: Sequence[_Line], projections: Path | None) -> ControlPoints:
    """Read markers of Metashape, and their projections where there are any."""
    system = _system_of_comments(lines)
    table = _Table(lines, _MARKER_COLUMNS)
    if system is None and any(word in table.header.get("x", "") for word in _DEGREES):
        system = system_of_code(WGS84, str(path))
    collected = _Collected()
    for row, context in table.rows():
        name = printable(row["label"])
        if collected.has(name):
            raise UserError(f"{context}: {name} is there twice; {_ADVICE}")
        numbers = [_number(row[axis], context) for axis in "xyz"]
        collected.add_position(name, np.array(numbers), context)
    if projections is None:
        return ControlPoints(collected.points(), system, str(path))
    for row, context in _Table(_lines_of(projections), _PROJECTION_COLUMNS).rows():
        name = printable(row["marker"])
        if not collected.has(name):
            raise UserError(f"{context}: {path.name} has no marker {name}; {_ADVICE}")
        u = _number(row["x"], context)
        v = _number(row["y"], context)
        collected.add_observation(name, PointObservation(row["image"], u, v, context))
    return ControlPoints(collected.points(), system, str(path))


def _system_of_comments(lines: Sequence[_Line]) -> MapSystem | None:
    """Return the system that a comment of Metashape names; None without such a comment."""
    for text, context in lines:
        match = _SYSTEM_COMMENT.match(text)
        if match is not None:
            return system_of_text(match[1], context)
    return None


class _Table:
    """A table of text: its columns by our names, and its rows.

    A table without a line of names has its columns in the order of ``columns``.
    """

    def __init__(self, lines: Sequence[_Line], columns: Mapping[str, Sequence[str]]) -> None:
        self._columns = columns
        self._lines = lines
        n_numbers = len(set(columns) & set("xyz"))

        def is_row(words: Sequence[str]) -> bool:
            return len(words) >= len(columns) and sum(map(_is_number, words)) >= n_numbers

        self._delimiter = _delimiter_of(lines, is_row) or _first_delimiter(lines)
        self._indices = {name: index for index, name in enumerate(columns)}
        self._header_context = ""
        self._n_named = 0  # columns of the line of names; 0 without one
        self.header: dict[str, str] = {}  # names that the file gives to our columns, lower case
        for text, context in lines:
            words = _split(text.lstrip("#"), self._delimiter)
            indices = _indices_of(words, columns)
            if len(indices) == len(columns):
                self._indices = indices
                self._header_context = context
                self._n_named = len(words)
                self.header = {name: words[index].lower() for name, index in indices.items()}
                break

    def rows(self) -> Iterator[tuple[dict[str, str], str]]:
        """Yield the texts of each row by our names of its columns, and its file and line."""
        last = max(self._indices.values())
        for text, context in self._lines:
            if text.startswith("#") or context == self._header_context:
                continue
            words = _split(text, self._delimiter)
            while words and not words[-1]:
                words.pop()
            if self._n_named and len(words) > self._n_named:
                raise UserError(
                    f"{context}: has {len(words)} columns, and the line of names {self._n_named}; "
                    "write decimal points, and quote names with blanks or commas"
                )
            if len(words) <= last or not all(words[index] for index in self._indices.values()):
                names = ", ".join(self._columns)
                raise UserError(f"{context}: has no value for each of {names}; {_ADVICE}")
            yield {name: words[index] for name, index in self._indices.items()}, context


def _first_delimiter(lines: Sequence[_Line]) -> str:
    """Return the first delimiter in a table without rows."""
    for text, _ in lines:
        if _SYSTEM_COMMENT.match(text):
            continue
        for delimiter in (";", "\t", ","):
            if delimiter in text:
                return delimiter
    return _BLANKS


def _indices_of(words: Sequence[str], columns: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """Return the columns that a line of names has, by our names of them."""
    indices: dict[str, int] = {}
    for index, word in enumerate(words):
        parts = [_plain(part) for part in word.split("/")]
        for name, synonyms in columns.items():
            is_named = any(part in synonyms for part in parts)
            if is_named and name not in indices and index not in indices.values():
                indices[name] = index
    return indices


def _plain(text: str) -> str:
    """Return the name of a column in lower case, without units and underscores."""
    without_units = re.sub(r"\(.*?\)|_m$", "", text.lower())
    return re.sub(r"[\s_]+", " ", without_units).strip()


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(with_decimal_point(text)))
    except ValueError:
        return False


def _number(text: str, context: str) -> float:
    """Parse a number; a ``UserError`` that names the line for any other text."""
    try:
        value = float(with_decimal_point(text))
    except ValueError:
        value = math.nan
    # Comparisons with NaN are false.
    if not abs(value) <= FAR:
        advice = _ADVICE
        if _PARTED.search(text):
            advice = "write a decimal point, and nothing between thousands"
        raise UserError(f"{context}: {text!r:.40} is no number; {advice}")
    return value
