# SPDX-License-Identifier: Apache-2.0
"""Files of laser scans: LAS and LAZ by laspy, E57 by pye57, both optional, and PLY."""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gaussian_splatting.core.color_bytes import rounded_bytes
from gaussian_splatting.data.scans.voxel_grid import VoxelGrid
from gaussian_splatting.formats.ply import columns_of, read_point_table
from sugar_utils.errors import Notify, UserError, explained
from sugar_utils.files import require_regular_file
from sugar_utils.libraries import load_package
from sugar_utils.schemas import FAR

MAX_SCAN_POINTS = 1_000_000
LAS_SUFFIXES = (".las", ".laz")
E57_SUFFIX = ".e57"
SCAN_SUFFIXES = (*LAS_SUFFIXES, E57_SUFFIX)
"""Suffixes of files that are always scans; a PLY may hold Gaussians."""

_PIECE = 1_000_000  # points that are read at once
_COLOR_NAMES = ("red", "green", "blue")
_LINEAR_UNITS_KEY = 3076  # keys of GeoTIFF: EPSG codes of what a LAS file is in
_VERTICAL_SYSTEM_KEY = 4096
_VERTICAL_UNITS_KEY = 4099
_METRE = 9001
_UNIT_METRES = {_METRE: 1.0, 9002: 0.3048, 9003: 1200 / 3937}  # metres, feet, US survey feet
_HEIGHTS = (
    'VERTCRS["heights",VDATUM["unknown"],CS[vertical,1],AXIS["up",up,LENGTHUNIT["unit",{:.17g}]]]'
)
_E57_SYSTEM = "coordinateMetadata"
_E57_COLORS = ("colorRed", "colorGreen", "colorBlue")
_GREY = 128.0
_ADVICE = "export the scan again"
# Where the header of a LAS file has the numbers of its records, the second one since version 1.4.
_LAS_RECORD_COUNTS = (100, 243)
_LAS_RECORD_BYTES = 54  # of a record at least
_LAS_HEADER_BYTES = 247
_LAS_1_4 = b"\x01\x04"

ToWorld = Callable[[np.ndarray], np.ndarray]  # (N, 3) float64 -> (N, 3)
InRange = Callable[[np.ndarray], np.ndarray]  # (N, 3) -> (N,) bool


@dataclass(frozen=True)
class Scan:
    """The points of a scan, thinned."""

    positions: np.ndarray  # world units, (N, 3) float64
    colors: np.ndarray  # grey where the file has none, (N, 3) uint8
    n_points: int  # in the file
    has_colors: bool
    middle: np.ndarray  # median of a part of the file, before it was cut, world units, (3,)


class _Piece(NamedTuple):
    """Some points of a file."""

    positions: np.ndarray  # as the file has them, (N, 3) float64
    colors: np.ndarray | None  # of any range, (N, 3)


def is_scan(path: Path | None) -> bool:
    """Whether a path has the suffix of a scan."""
    return path is not None and path.suffix.lower() in SCAN_SUFFIXES


def read_scan(path: Path, limit: int, notify: Notify, to_world: ToWorld, in_range: InRange) -> Scan:
    """Read the points of a LAS, LAZ, E57 or PLY file, piece by piece.

    Args:
        limit: Points that are kept at most; more are thinned by a grid.
        to_world: From the coordinates of the file to those of the scene.
        in_range: Which points, in the world of the scene, are of use.

    Raises:
        UserError: A library is missing, or the file is damaged or has no points.
    """
    grid = VoxelGrid(limit)
    n_points = 0
    n_in_range = 0
    largest = 0.0
    middle: np.ndarray | None = None
    for piece in _pieces(path):
        with np.errstate(invalid="ignore", over="ignore"):
            is_finite = (np.abs(piece.positions) <= FAR).all(axis=1)
        positions = to_world(piece.positions[is_finite])
        n_points += len(positions)
        if not len(positions):
            continue
        if middle is None:
            middle = np.median(positions, axis=0)
        rows = in_range(positions)
        n_in_range += int(rows.sum())
        # Red, green, blue, and whether the point has a colour.
        values = np.zeros((int(rows.sum()), 4), np.float32)
        # Scanners without a camera leave the colours of a format at 0.
        if piece.colors is not None and piece.colors.any():
            values[:, :3] = piece.colors[is_finite][rows]
            values[:, 3] = 1
            largest = max(largest, float(piece.colors.max()))
        grid.add(positions[rows], values)
    if middle is None:
        raise UserError(f"{path}: has no points; {_ADVICE}")
    positions, values = grid.points()
    has_colors = largest > 0
    if not has_colors:
        notify(f"{path}: has no colours; the points start grey")
    thinned = ""
    if grid.side > 0:
        thinned = f", thinned to {len(positions):,}, one in each {grid.side:.3g} units"
    notify(f"{path.name}: {n_in_range:,} of {n_points:,} points near the cameras{thinned}")
    colors = _colors_of(values, is_deep=largest > 255)
    return Scan(positions, colors, n_points, has_colors, middle)


def _colors_of(values: np.ndarray, is_deep: bool) -> np.ndarray:
    """Return the mean colours of points that have some, grey of others. (N, 3) uint8

    Args:
        values: Means of red, green, blue, and of 1 for points with a colour. (N, 4)
        is_deep: Whether colours have 16 bits, as LAS has them; some programs leave 8 bits in them.
    """
    share = values[:, -1:]
    colors = values[:, :3] / np.maximum(share, 1e-6)
    if is_deep:
        colors = colors / 257
    colors = np.where(share > 0, colors, _GREY)
    return rounded_bytes(colors)


def scan_system(path: Path) -> str | None:
    """Return the coordinate system that a LAS or E57 file names, as WKT; None where it names none.

    Without pyproj it is None for LAS, too.

    Raises:
        UserError: It names units that cannot be converted, since its system cannot be read.
    """
    require_regular_file(path)
    suffix = path.suffix.lower()
    if suffix in LAS_SUFFIXES:
        with _scan_errors(path), _open_las(path) as reader:
            return _las_system(path, reader.header)
    if suffix == E57_SUFFIX:
        pye57 = _load_pye57(path)
        with _scan_errors(path), contextlib.closing(pye57.E57(str(path))) as file:
            if file.root.isDefined(_E57_SYSTEM):
                return file.root[_E57_SYSTEM].value().strip() or None
    return None


def _las_system(path: Path, header: Any) -> str | None:
    """Return the system of a ``laspy.LasHeader`` as WKT, with heights as GeoTIFF keys name them."""
    keys = {
        key.id: key.value_offset
        for record in header.vlrs
        for key in getattr(record, "geo_keys", ())
        if key.tiff_tag_location == 0
    }
    try:
        system = header.parse_crs()
    except (ImportError, ValueError, RuntimeError):
        system = None
    unit = keys.get(_LINEAR_UNITS_KEY, _METRE)
    is_foreign = system is None or not math.isclose(
        system.axis_info[0].unit_conversion_factor, _UNIT_METRES.get(unit, 0.0), rel_tol=1e-9
    )
    if unit != _METRE and is_foreign:
        raise UserError(
            f"{path}: its keys name a unit of EPSG {unit}, and no system with it; convert the scan "
            "to metres"
        )
    if system is None:
        return None
    definition = system.to_wkt()
    heights = keys.get(_VERTICAL_SYSTEM_KEY, 0)
    unit = keys.get(_VERTICAL_UNITS_KEY, _METRE)
    if len(system.axis_info) > 2 or not (_is_code(heights) or _VERTICAL_UNITS_KEY in keys):
        return definition
    if unit not in _UNIT_METRES:
        raise UserError(f"{path}: heights have the unit EPSG {unit}; convert the scan to metres")
    vertical = f"EPSG:{heights}"
    if not _is_code(heights):
        vertical = _HEIGHTS.format(_UNIT_METRES[unit])
    compound = importlib.import_module("pyproj.crs").CompoundCRS
    with explained(f"{path}: heights of {vertical:.20}:", _ADVICE, ValueError, RuntimeError):
        return compound(f"{system.name} with heights", [definition, vertical]).to_wkt()


def _is_code(value: int) -> bool:
    """Whether a value of a GeoTIFF key is an EPSG code, not 0 or "user-defined"."""
    return 1024 <= value < 32767


def _pieces(path: Path) -> Iterator[_Piece]:
    """Yield the points of a file in pieces."""
    require_regular_file(path)
    suffix = path.suffix.lower()
    if suffix in LAS_SUFFIXES:
        yield from _las_pieces(path)
    elif suffix == E57_SUFFIX:
        yield from _e57_pieces(path)
    elif suffix == ".ply":
        positions, colors = read_point_table(path)
        yield _Piece(positions, colors)
    else:
        suffixes = ", ".join((*SCAN_SUFFIXES, ".ply"))
        raise UserError(f"{path}: is no scan that can be read; export it as one of {suffixes}")


def require_reader(path: Path) -> None:
    """Refuse a scan whose library is missing.

    Raises:
        UserError: It is missing.
    """
    suffix = path.suffix.lower()
    if suffix in LAS_SUFFIXES:
        _load_laspy(path)
    elif suffix == E57_SUFFIX:
        _load_pye57(path)


def _load_pye57(path: Path) -> Any:
    return load_package(f"{path}: reading a scan", "pye57", "pye57")[0]


def _load_laspy(path: Path) -> Any:
    modules = ["laspy"]
    if path.suffix.lower() == ".laz":
        modules.append("lazrs")
    laspy = load_package(f"{path}: reading a scan", "laspy[lazrs]", *modules)[0]
    # It logs what it raises as well.
    logging.getLogger("laspy").setLevel(logging.CRITICAL)
    return laspy


@contextlib.contextmanager
def _scan_errors(path: Path) -> Iterator[None]:
    """Convert errors of readers, of many classes, into a ``UserError``.

    Files are read in pieces, so a ``MemoryError`` comes from a damaged header, too.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        with explained(f"{path}: damaged or no scan", _ADVICE, Exception):
            raise error


def _open_las(path: Path) -> Any:
    """Open a LAS file, unless its header announces more records than the file has room for.

    laspy reads as many as are announced, up to billions, also behind the end of the file.
    """
    laspy = _load_laspy(path)
    with path.open("rb") as file:
        header = file.read(_LAS_HEADER_BYTES)
    starts = _LAS_RECORD_COUNTS if header[24:26] == _LAS_1_4 else _LAS_RECORD_COUNTS[:1]
    n_records = max(int.from_bytes(header[start : start + 4], "little") for start in starts)
    if n_records * _LAS_RECORD_BYTES > path.stat().st_size:
        raise UserError(f"{path}: damaged or no scan; {_ADVICE}")
    return laspy.open(path)


def _las_pieces(path: Path) -> Iterator[_Piece]:
    with _scan_errors(path), _open_las(path) as reader:
        names = set(reader.header.point_format.dimension_names)
        has_colors = names.issuperset(_COLOR_NAMES)
        n_left = reader.header.point_count
        for points in reader.chunk_iterator(_PIECE):
            if len(points) < min(n_left, _PIECE):
                raise UserError(f"{path}: is truncated; copy or export the scan again")
            n_left -= len(points)
            colors = None
            if has_colors:
                colors = np.stack([np.asarray(points[name]) for name in _COLOR_NAMES], axis=1)
            yield _Piece(columns_of(points, "xyz"), colors)


def _e57_pieces(path: Path) -> Iterator[_Piece]:
    pye57 = _load_pye57(path)
    with _scan_errors(path):
        file = pye57.E57(str(path))
    try:
        for index in range(file.scan_count):
            with _scan_errors(path):
                header = file.get_header(index)
                if header.point_count == 0:
                    continue
                has_colors = set(_E57_COLORS) <= set(header.point_fields)
                data = file.read_scan(index, colors=has_colors, ignore_missing_fields=True)
            positions = columns_of(data, [f"cartesian{axis}" for axis in "XYZ"])
            colors = None
            if has_colors:
                colors = np.stack([data[name] for name in _E57_COLORS], axis=1)
            yield _Piece(positions, colors)
    finally:
        file.close()
