# SPDX-License-Identifier: Apache-2.0
"""Coordinate systems of maps: names, codes and requirements.

They are checked by pyproj, which is optional. Without it positions by latitude and longitude are
put into a plane that touches the ellipsoid of WGS84, with x to the east, y to the north and z up.

A map is reached by a similarity, which keeps shapes. So the system of a result has metres on all
axes, and its scale on the ground is that of heights. Points may come in others, see
:mod:`sugar_maps.map_conversion`.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from sugar_capture.gps.geocentric import tangential
from sugar_utils.errors import UserError, printable
from sugar_utils.libraries import load_package

WGS84 = 4326
_NORTHERN_UTM = 32600
_SOUTHERN_UTM = 32700
_ZONE_WIDTH = 6  # degrees of longitude
_MAX_EPSG = 1_000_000
_PROJ_MORE = ("+towgs84", "+vunits", "+vto_meter", "+geoidgrids", "+axis", "+to_meter")
_METRES = ("metre", "meter")
_MAX_STRETCH = 0.005  # by which the scale of a map may differ from 1
_CODE = re.compile(r"(?:EPSG:+)?\s*(\d+)", re.IGNORECASE)
_UTM_NAME = re.compile(r"WGS\s*_?84[\s/]*UTM\s*(?:zone)?\s*(\d{1,2})\s*([NS])", re.IGNORECASE)
_AUTHORITY = re.compile(r"(?:AUTHORITY|ID)\[\"EPSG\",\s*\"?(\d+)\"?\]\s*\]\s*$")


@dataclass(frozen=True)
class MapSystem:
    """A coordinate system of a map."""

    definition: str  # as pyproj reads it: EPSG:N, a PROJ string or WKT
    epsg: int | None  # its code; None where it has none
    is_geographic: bool = False  # x is the longitude and y the latitude, in degrees
    unit: str = "metre"  # of x and y
    height_unit: str = "metre"  # empty where the system has none and x and y are not in metres

    @property
    def name(self) -> str:
        """Its code, or the beginning of its definition."""
        return self.definition[:40] if self.epsg is None else f"EPSG:{self.epsg}"


@dataclass(frozen=True)
class TangentPlane:
    """A plane that touches the ellipsoid: x to the east, y to the north, z up, in metres."""

    latitude: float  # of its origin, degrees
    longitude: float  # degrees
    altitude: float  # metres

    def positions(self, geographic: np.ndarray) -> np.ndarray:
        """Return positions in the plane. (N, 3) longitude, latitude, altitude -> (N, 3) metres"""
        return tangential(geographic, (self.longitude, self.latitude, self.altitude))


def utm_system(longitude: float, latitude: float) -> MapSystem:
    """Return the zone of UTM (WGS84) of a place in degrees."""
    zone = int((longitude + 180) % 360 // _ZONE_WIDTH) + 1
    return system_of_code((_NORTHERN_UTM if latitude >= 0 else _SOUTHERN_UTM) + zone, "UTM")


def system_of_code(code: int, place: str) -> MapSystem:
    """Return the system of an EPSG code.

    Args:
        place: Where the code is from, for errors.

    Raises:
        UserError: pyproj knows no such system, or it is not in metres or degrees.
    """
    if not 0 < code < _MAX_EPSG:
        raise UserError(f"{place}: EPSG {code} does not exist; look the code up at epsg.io")
    return _checked_system(f"EPSG:{code}", code, place)


def system_of_text(text: str, place: str) -> MapSystem:
    """Return the system that a file names: ``EPSG:N``, ``WGS84 UTM 33N``, a PROJ string or WKT.

    Raises:
        UserError: It is none of these, or pyproj is needed to understand it and is missing.
    """
    # Bytes that are no text are escaped; no system has them.
    text = printable(text.strip())
    code = _plain_code(text)
    if code is not None:
        return system_of_code(code, place)
    if not text or not (text.startswith("+") or "[" in text or pyproj_or_none() is not None):
        raise UserError(
            f"{place}: {text!r:.40} names no coordinate system; write EPSG:N or WGS84 UTM 33N"
        )
    load_package(f"{place}: {text!r:.40}", "pyproj", "pyproj", instead="write EPSG:N there")
    return _checked_system(text, None, place)


def _plain_code(text: str) -> int | None:
    """Return the EPSG code of a text that contains it; None for any other."""
    match = _CODE.fullmatch(text) or _AUTHORITY.search(text)
    if match is not None:
        return int(match[1])
    match = _UTM_NAME.fullmatch(text)
    if match is not None:
        return _utm_code(int(match[1]), match[2].upper() == "S")
    return _proj_code(text)


def _proj_code(text: str) -> int | None:
    """Return the EPSG code of a PROJ string of WGS84; None for any other text."""
    words: dict[str, str] = {}
    for word in text.split():
        key, _, value = word.partition("=")
        words[key] = value
    is_wgs84 = "WGS84" in (words.get("+datum"), words.get("+ellps"))
    has_more = not words.keys().isdisjoint(_PROJ_MORE)
    if has_more or not is_wgs84:
        return None
    if words.get("+proj") in ("longlat", "latlong"):
        return WGS84
    zone = words.get("+zone", "")
    in_metres = words.get("+units", "m") == "m"
    if words.get("+proj") == "utm" and zone.isdecimal() and in_metres:
        return _utm_code(int(zone), "+south" in words)
    return None


def _utm_code(zone: int, is_southern: bool) -> int | None:
    if not 1 <= zone <= 360 // _ZONE_WIDTH:
        return None
    return zone + (_SOUTHERN_UTM if is_southern else _NORTHERN_UTM)


def _checked_system(definition: str, code: int | None, place: str) -> MapSystem:
    """Return a system, checked by pyproj where that is installed."""
    pyproj = pyproj_or_none()
    if pyproj is None:
        return MapSystem(definition, code, is_geographic=code == WGS84)
    try:
        system = pyproj.CRS.from_user_input(definition)
    except pyproj.exceptions.CRSError as error:
        raise UserError(
            f"{place}: {definition!r:.40} is no coordinate system that pyproj knows; look its code "
            "up at epsg.io"
        ) from error
    if not (system.is_geographic or system.is_projected or system.is_engineering):
        raise UserError(
            f"{place}: {system.name} is neither a map nor latitude and longitude; choose a "
            "projected system, such as the zone of UTM"
        )
    units = [axis.unit_name for axis in system.axis_info]
    height_unit = "metre"
    if len(units) > 2:
        height_unit = units[2]
        if system.axis_info[2].direction == "down":
            height_unit += " of depth"
    elif not (system.is_geographic or units[0] in _METRES):
        height_unit = ""
    epsg = code or system.to_epsg()
    return MapSystem(definition, epsg, system.is_geographic, units[0], height_unit)


def require_metres(system: MapSystem, place: str) -> None:
    """Raise a ``UserError`` where a result in a system would not be in metres.

    Args:
        place: What names the system.
    """
    if system.is_geographic:
        raise UserError(
            f"{place}: {system.name} is in degrees; choose a system in metres, such as the zone "
            "of UTM"
        )
    for unit, what in ((system.unit, "is"), (system.height_unit, "has heights")):
        if unit not in _METRES:
            raise UserError(
                f"{place}: {system.name} {what} in {unit or 'an unknown unit'}; choose a system in "
                "metres, as by --epsg"
            )


def require_true_lengths(system: MapSystem, position: np.ndarray, place: str) -> None:
    """Raise a ``UserError`` where a map changes lengths on the ground, but not heights.

    Systems that are no projections have no scale, and without pyproj none is known.

    Args:
        position: Of the capture in that system. (3,)
        place: What names the system or the points.
    """
    pyproj = pyproj_or_none()
    if pyproj is None:
        return
    plane = horizontal(pyproj.CRS.from_user_input(system.definition))
    if not plane.is_projected:
        return
    stretch = _stretch(pyproj.Proj(plane), position)
    if stretch <= _MAX_STRETCH:
        return
    advice = "choose the zone of UTM, as by --epsg"
    if _stretch(pyproj.Proj(plane), position[[1, 0, 2]]) <= _MAX_STRETCH:
        advice += ", or are x and y of the points swapped?"
    at = f"x {position[0]:.9g}, y {position[1]:.9g}"
    raise UserError(
        f"{place}: {system.name} changes lengths by {100 * stretch:.3g} % at {at}, but not "
        f"heights; {advice}"
    )


def _stretch(projection: Any, position: np.ndarray) -> float:
    """Return by how much a projection, a ``pyproj.Proj``, changes lengths at a place; 0.1: 10 %."""
    longitude, latitude = projection(position[0], position[1], inverse=True)
    if not np.isfinite([longitude, latitude]).all():
        return np.inf
    # Also of projections that lengthen in one direction what they shorten in another.
    scales = projection.get_factors(longitude, latitude)
    return max(abs(scales.tissot_semimajor - 1), abs(scales.tissot_semiminor - 1))


def horizontal(system: Any) -> Any:
    """Return a ``pyproj.CRS`` without its heights."""
    if system.is_compound:
        return system.sub_crs_list[0]
    return system.to_2d() if len(system.axis_info) > 2 else system


def vertical(system: Any) -> Any:
    """Return the vertical reference of a ``pyproj.CRS``; None if it has none."""
    if system.is_compound:
        return system.sub_crs_list[1]
    return system if len(system.axis_info) > 2 else None


def pyproj_or_none() -> ModuleType | None:
    """Return pyproj where it is installed, else None."""
    try:
        return importlib.import_module("pyproj")
    except ImportError:
        return None
