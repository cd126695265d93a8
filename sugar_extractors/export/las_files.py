# SPDX-License-Identifier: Apache-2.0
"""Point clouds as LAS 1.4 and LAZ, by laspy."""

from __future__ import annotations

import math
from types import ModuleType

import numpy as np

from sugar_extractors.export_contents import PointExport
from sugar_utils.libraries import load_package, package_or_none

NORMAL_NAMES = ("NormalX", "NormalY", "NormalZ")
"""Extra dimensions with the normals, as CloudCompare names them."""

_POINT_FORMAT = 7  # of LAS 1.4, with colours
_MILLIMETRE = 0.001
_LARGEST = 2**31 - 1  # of the whole numbers that hold coordinates
_STEPS = 1e6  # of the coordinates over the extent, where the unit is not known
_COLOR_LEVELS = 257  # from 8 to 16 bits
_MAX_INTENSITY = 65_535


def load_laspy(what: str, compressed: bool = False) -> ModuleType:
    """Import laspy, and for compressed files its backend.

    Raises:
        UserError: It is missing.
    """
    modules = ("laspy", "lazrs") if compressed else ("laspy",)
    return load_package(what, "laspy[lazrs]", *modules)[0]


def write_las(export: PointExport, compressed: bool = False) -> None:
    """Write points as LAS, or as LAZ if compressed.

    Colours have 16 bits. Normals are extra dimensions, opacities are intensities.
    """
    laspy = load_laspy("--to laz" if compressed else "--to las", compressed)
    points = export.points
    header = laspy.LasHeader(point_format=_POINT_FORMAT, version="1.4")
    header.generating_software = "sugar-trainer"
    header.offsets = export.offset
    step = _step_of(points.positions, export.is_metric)
    header.scales = np.full(3, step)
    if export.is_metric and step > _MILLIMETRE:
        export.notify(
            f"note: coordinates are rounded to {step:g} m, because points reach "
            f"{np.abs(points.positions).max():.3g} m far; remove those that are no part of the map"
        )
    if points.normals is not None:
        header.add_extra_dims(
            [laspy.ExtraBytesParams(name=name, type=np.float32) for name in NORMAL_NAMES]
        )
    _add_system(header, export)
    content = laspy.LasData(header)
    positions = points.positions + export.offset
    for axis, values in zip("xyz", positions.T, strict=True):
        content[axis] = values
    for name, values in zip(("red", "green", "blue"), points.colors.T, strict=True):
        content[name] = values.astype(np.uint16) * _COLOR_LEVELS
    if points.normals is not None:
        for name, values in zip(NORMAL_NAMES, points.normals.T, strict=True):
            content[name] = values.astype(np.float32)
    if points.opacities is not None:
        content.intensity = np.round(points.opacities * _MAX_INTENSITY).astype(np.uint16)
    with export.path.open("wb") as file:
        content.write(file, do_compress=compressed)


def _step_of(positions: np.ndarray, is_metric: bool) -> float:
    """Return the step of the whole numbers that hold coordinates, (N, 3): a power of ten."""
    reach = float(np.abs(positions).max(initial=0))
    least = 10.0 ** math.ceil(math.log10(max(reach, _MILLIMETRE) / _LARGEST))
    if is_metric:
        return max(_MILLIMETRE, least)
    extent = max(float(np.ptp(positions, axis=0).max(initial=0)), 1e-30)
    return max(10.0 ** math.floor(math.log10(extent / _STEPS)), least)


def _add_system(header: object, export: PointExport) -> None:
    """Note the coordinate system of the map in the header."""
    if export.system is None:
        return
    pyproj = package_or_none("pyproj")
    if pyproj is None:
        export.notify(
            f"note: without pyproj the file does not name its system, {export.system.name}"
        )
        return
    header.add_crs(pyproj.CRS.from_user_input(export.system.definition))  # type: ignore[attr-defined]
