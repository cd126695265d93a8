# SPDX-License-Identifier: Apache-2.0
"""Positions by latitude and longitude as positions from the middle of the earth."""

from __future__ import annotations

import numpy as np

_SEMI_MAJOR_AXIS = 6_378_137.0  # of WGS84, metres
_FLATTENING = 1 / 298.257223563
_SQUARED_ECCENTRICITY = _FLATTENING * (2 - _FLATTENING)


def geocentric(geographic: np.ndarray) -> np.ndarray:
    """Return positions from the middle of the earth, for WGS84.

    (N, 3) longitude and latitude in degrees, altitude in metres -> (N, 3) metres
    """
    longitude = np.radians(geographic[:, 0])
    latitude = np.radians(geographic[:, 1])
    altitude = geographic[:, 2]
    curvature = _SEMI_MAJOR_AXIS / np.sqrt(1 - _SQUARED_ECCENTRICITY * np.sin(latitude) ** 2)
    from_axis = (curvature + altitude) * np.cos(latitude)
    height = (curvature * (1 - _SQUARED_ECCENTRICITY) + altitude) * np.sin(latitude)
    x = from_axis * np.cos(longitude)
    y = from_axis * np.sin(longitude)
    return np.stack([x, y, height], axis=1)
