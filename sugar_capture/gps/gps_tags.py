# SPDX-License-Identifier: Apache-2.0
"""GPS positions that cameras write into their photographs (EXIF)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from PIL import ExifTags

from gaussian_splatting.data.images import open_image

_TAGS = ExifTags.GPS
_BELOW_SEA_LEVEL = 1
_MAX_ALTITUDE = 100_000.0  # metres
_MINUTES = 60.0
_SECONDS = 3600.0


class GpsPosition(NamedTuple):
    """Where a photograph was taken."""

    longitude: float  # degrees, east is positive
    latitude: float  # degrees, north is positive
    altitude: float | None  # metres; None where the photograph does not tell


def gps_of(path: Path) -> GpsPosition | None:
    """Return the position in the EXIF data of an image file; None where there is none."""
    with open_image(path) as image:
        tags = image.getexif().get_ifd(ExifTags.IFD.GPSInfo)
    return gps_of_tags(tags)


def gps_of_tags(tags: Mapping[int, Any]) -> GpsPosition | None:
    """Return the position in a GPS directory of EXIF; None where it is missing or impossible."""
    latitude = _degrees(tags.get(_TAGS.GPSLatitude), tags.get(_TAGS.GPSLatitudeRef), "S")
    longitude = _degrees(tags.get(_TAGS.GPSLongitude), tags.get(_TAGS.GPSLongitudeRef), "W")
    if latitude is None or longitude is None:
        return None
    # Receivers that have no position yet write zeros.
    is_unset = latitude == 0 and longitude == 0
    if is_unset or abs(latitude) > 90 or abs(longitude) > 180:
        return None
    return GpsPosition(longitude, latitude, _altitude(tags))


def _degrees(parts: object, reference: object, negative: str) -> float | None:
    """Return degrees of a list of degrees, minutes and seconds; None where it is damaged."""
    if not isinstance(parts, tuple | list) or len(parts) != 3:
        return None
    numbers = [_finite(part) for part in parts]
    degrees, minutes, seconds = numbers
    if degrees is None or minutes is None or seconds is None:
        return None
    value = degrees + minutes / _MINUTES + seconds / _SECONDS
    letter = _text(reference).strip(" \0").upper()
    return -value if letter == negative else value


def _altitude(tags: Mapping[int, Any]) -> float | None:
    altitude = _finite(tags.get(_TAGS.GPSAltitude))
    if altitude is None or abs(altitude) > _MAX_ALTITUDE:
        return None
    reference = tags.get(_TAGS.GPSAltitudeRef, 0)
    if isinstance(reference, bytes):
        reference = reference[0] if reference else 0
    return -altitude if reference == _BELOW_SEA_LEVEL else altitude


def _text(value: object) -> str:
    return value.decode("ascii", "replace") if isinstance(value, bytes) else str(value)


def _finite(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError, ZeroDivisionError):
        return None
    return number if math.isfinite(number) else None
