# SPDX-License-Identifier: Apache-2.0
"""Positions by latitude and longitude in metres, by pycolmap."""

from __future__ import annotations

import numpy as np

from sugar_utils.libraries import load_pycolmap

_ELLIPSOID = "WGS84"
_LATITUDE_FIRST = [1, 0, 2]


def geocentric(geographic: np.ndarray) -> np.ndarray:
    """Return positions from the middle of the earth, for WGS84.

    (N, 3) longitude and latitude in degrees, altitude in metres -> (N, 3) metres
    """
    transform = load_pycolmap().GPSTransform(_ELLIPSOID)
    return transform.ellipsoid_to_ecef(geographic[:, _LATITUDE_FIRST])


def tangential(geographic: np.ndarray, origin: tuple[float, float, float]) -> np.ndarray:
    """Return positions in the plane that touches WGS84: x to the east, y to the north, z up.

    Args:
        geographic: Longitude and latitude in degrees, altitude in metres. (N, 3)
        origin: Of the plane, likewise.

    Returns:
        (N, 3) metres
    """
    longitude, latitude, altitude = origin
    transform = load_pycolmap().GPSTransform(_ELLIPSOID)
    places = geographic[:, _LATITUDE_FIRST]
    return transform.ellipsoid_to_enu(places, latitude, longitude, altitude)
