# SPDX-License-Identifier: Apache-2.0
"""Conversion of points between coordinate systems, by pyproj.

Heights are converted where both systems say above what they are; where one does not, only their
unit changes, and a note says so. Where PROJ does not know how heights differ, or lacks the grid, it
would keep them, which is refused; what it leaves out of maps is said.
"""

from __future__ import annotations

import importlib
import warnings
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from sugar_maps.map_systems import MapSystem, horizontal, vertical
from sugar_utils.errors import UserError, shortened
from sugar_utils.libraries import load_package

_NEAR = 0.001  # degrees around a capture, for which conversions are chosen


@dataclass(frozen=True)
class Conversion:
    """A way from one system to another, see :func:`conversion`."""

    source: MapSystem
    target: MapSystem
    transformer: Any  # pyproj.Transformer; None where both systems are the same
    # Heights of the target in those of the source; None where the transformer converts them.
    height_scale: float | None
    place: str  # where points are from, for errors
    notes: tuple[str, ...] = ()  # what it does not convert, or not exactly

    def apply(self, points: np.ndarray) -> np.ndarray:
        """Return points, (N, 3), in the other system; x is east or the longitude. (N, 3)

        Raises:
            UserError: The other system does not reach a point.
        """
        if self.transformer is None:
            return points
        if self.height_scale is None:
            moved = np.stack(self.transformer.transform(*points.T), axis=1)
        else:
            east, north = self.transformer.transform(points[:, 0], points[:, 1])
            moved = np.stack([east, north, self.height_scale * points[:, 2]], axis=1)
        if not np.isfinite(moved).all():
            raise UserError(
                f"{self.place}: {self.source.name} has points that {self.target.name} does not "
                "reach; choose another --epsg"
            )
        return moved


def conversion(
    source: MapSystem, target: MapSystem, system: MapSystem, position: np.ndarray, place: str
) -> Conversion:
    """Return the way from one system to another near a place.

    Args:
        system: That of the position: one of both.
        position: Of the capture. (3,)
        place: Where the points are from, for errors.

    Raises:
        UserError: pyproj is missing, or it knows no way whose accuracy is known.
    """
    has_same_code = source.epsg is not None and source.epsg == target.epsg
    if source == target or (has_same_code and source.height_unit == target.height_unit):
        return Conversion(source, target, None, None, place)
    what = f"{place}: converting {source.name} to {target.name}"
    (pyproj,) = load_package(what, "pyproj", "pyproj")
    area = _area_of(pyproj.CRS.from_user_input(system.definition), position)
    from_system = pyproj.CRS.from_user_input(source.definition)
    to_system = pyproj.CRS.from_user_input(target.definition)
    if from_system == to_system:
        return Conversion(source, target, None, None, place)
    if from_system.is_engineering or to_system.is_engineering:
        raise UserError(f"{what}: a local system is known to no other; choose another --epsg")
    heights = (vertical(from_system), vertical(to_system))
    if None not in heights and heights[0] != heights[1]:
        way = _way(from_system, to_system, area, what)
        return Conversion(source, target, way.transformer, None, place, way.notes)
    if "" in (source.height_unit, target.height_unit):
        raise UserError(
            f"{what}: the unit of heights is unknown; name a system with heights, as "
            "EPSG:2263+6360 or EPSG:2263+5703"
        )
    way = _way(horizontal(from_system), horizontal(to_system), area, what)
    notes = way.notes
    if (heights[0] is None) != (heights[1] is None):
        silent = source if heights[0] is None else target
        notes += (f"heights are not converted: {silent.name} does not say what its own are above",)
    scale = _height_factor(from_system) / _height_factor(to_system)
    return Conversion(source, target, way.transformer, scale, place, notes)


def _height_factor(system: Any) -> float:
    """Return how many metres up a unit of the heights of a ``pyproj.CRS`` is; depths go down."""
    axes = system.axis_info
    if len(axes) < 3:
        return 1.0
    factor = axes[2].unit_conversion_factor
    return -factor if axes[2].direction == "down" else factor


def _area_of(system: Any, position: np.ndarray) -> Any:
    """Return the ``pyproj.aoi.AreaOfInterest`` around a position; None where it is not known."""
    aoi = importlib.import_module("pyproj.aoi")
    plane = horizontal(system)
    longitude, latitude = position[:2]
    if plane.is_projected:
        projection = importlib.import_module("pyproj").Proj(plane)
        longitude, latitude = projection(*position[:2], inverse=True)
    if not (abs(longitude) <= 180 and abs(latitude) < 90):
        return None
    return aoi.AreaOfInterest(
        west_lon_degree=max(longitude - _NEAR, -180),
        south_lat_degree=max(latitude - _NEAR, -90),
        east_lon_degree=min(longitude + _NEAR, 180),
        north_lat_degree=min(latitude + _NEAR, 90),
    )


class _Way(NamedTuple):
    """A transformation of PROJ."""

    transformer: Any  # pyproj.Transformer
    notes: tuple[str, ...]


def _way(source: Any, target: Any, area: Any, what: str) -> _Way:
    """Return the most exact transformation of PROJ; where it knows none of maps, a note says so.

    Raises:
        UserError: It knows none of heights, or one that takes a grid that is not there.
    """
    group = _transformations(source, target, area, is_exact=True)
    missing = group.unavailable_operations[:1]
    grids = [grid.short_name for one in missing for grid in one.grids if not grid.available]
    names = shortened(grids)
    notes: tuple[str, ...] = ()
    if group.transformers and grids and not group.best_available:
        accuracy = group.transformers[0].accuracy
        notes = (f"{target.name} is exact to {accuracy:g} m without the grid {names}",)
    if not group.transformers and grids:
        raise UserError(
            f"{what} takes a grid that PROJ does not have here ({names}); run 'pyproj sync --file "
            f"{grids[0]}', or choose another --epsg"
        )
    if not group.transformers:
        group = _transformations(source, target, None, is_exact=True)
        notes = (f"it lies outside of where {target.name} is in use",)
    if not group.transformers and vertical(source) is None:
        group = _transformations(source, target, None, is_exact=False)
        notes = (
            f"PROJ does not know how the datums of {source.name} and {target.name} differ, and "
            "takes them for the same",
        )
    if not group.transformers:
        raise UserError(f"{what}: PROJ knows no way between their heights; choose another --epsg")
    return _Way(group.transformers[0], notes)


def _transformations(source: Any, target: Any, area: Any, is_exact: bool) -> Any:
    """Return the ``pyproj.transformer.TransformerGroup`` from one ``pyproj.CRS`` to another.

    Args:
        area: The area where they must be exact; None: anywhere.
        is_exact: Leave out those that take different datums for the same.
    """
    groups = importlib.import_module("pyproj.transformer")
    with warnings.catch_warnings():
        # It warns of missing grids, which the notes name.
        warnings.simplefilter("ignore")
        return groups.TransformerGroup(
            source, target, always_xy=True, area_of_interest=area, allow_ballpark=not is_exact
        )
