# SPDX-License-Identifier: Apache-2.0
"""Files of laser scans: LAS and LAZ by laspy, E57 by pye57, both optional, and PLY."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gaussian_splatting.data.scans.voxel_grid import VoxelGrid
from gaussian_splatting.formats.ply import read_point_table
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
_E57_COLORS = ("colorRed", "colorGreen", "colorBlue")
_GREY = 128.0
_ADVICE = "export the scan again"

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
    has_colors = False
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
        colors = np.full((int(rows.sum()), 3), _GREY, np.float32)
        if piece.colors is not None:
            has_colors = True
            colors = piece.colors[is_finite][rows].astype(np.float32)
            largest = max(largest, float(colors.max(initial=0)))
        grid.add(positions[rows], colors)
    if middle is None:
        raise UserError(f"{path}: has no points; {_ADVICE}")
    positions, values = grid.points()
    if has_colors and largest > 255:
        # 16 bits, as LAS has them; some programs leave 8 bits in them.
        values = values / 257
    if not has_colors:
        notify(f"{path}: has no colours; the points start grey")
    thinned = ""
    if grid.side > 0:
        thinned = f", thinned to {len(positions):,}, one in each {grid.side:.3g} units"
    notify(f"{path.name}: {n_in_range:,} of {n_points:,} points near the cameras{thinned}")
    colors = np.rint(values).clip(0, 255).astype(np.uint8)
    return Scan(positions, colors, n_points, has_colors, middle)


def scan_epsg(path: Path) -> int | None:
    """Return the EPSG code of the map that a LAS file is in; None where it does not tell.

    Without pyproj it is None, too.
    """
    if path.suffix.lower() not in LAS_SUFFIXES:
        return None
    require_regular_file(path)
    laspy = _load_laspy(path)
    with _scan_errors(path), laspy.open(path) as reader:
        try:
            system = reader.header.parse_crs()
        except (ImportError, ValueError, RuntimeError):
            return None
    if system is None:
        return None
    if system.is_compound:
        # Of a map and a height, each with a code.
        system = system.sub_crs_list[0]
    return system.to_epsg()


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
    """Turn what readers raise for damaged files into a ``UserError``: errors of many classes.

    Files are read in pieces, so a ``MemoryError`` comes from a damaged header, too.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        with explained(f"{path}: damaged or no scan", _ADVICE, Exception):
            raise error


def _las_pieces(path: Path) -> Iterator[_Piece]:
    laspy = _load_laspy(path)
    with _scan_errors(path), laspy.open(path) as reader:
        names = set(reader.header.point_format.dimension_names)
        has_colors = names.issuperset(_COLOR_NAMES)
        n_left = reader.header.point_count
        for points in reader.chunk_iterator(_PIECE):
            if len(points) < min(n_left, _PIECE):
                raise UserError(f"{path}: is truncated; copy or export the scan again")
            n_left -= len(points)
            positions = np.stack([np.asarray(points[axis]) for axis in "xyz"], axis=1)
            colors = None
            if has_colors:
                colors = np.stack([np.asarray(points[name]) for name in _COLOR_NAMES], axis=1)
            yield _Piece(positions.astype(np.float64), colors)


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
            axes = [data[f"cartesian{axis}"] for axis in "XYZ"]
            positions = np.stack(axes, axis=1).astype(np.float64)
            colors = None
            if has_colors:
                colors = np.stack([data[name] for name in _E57_COLORS], axis=1)
            yield _Piece(positions, colors)
    finally:
        file.close()
