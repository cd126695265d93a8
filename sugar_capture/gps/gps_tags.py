# SPDX-License-Identifier: Apache-2.0
"""GPS positions that cameras write into their photographs: EXIF, and XMP where EXIF lacks them.

EXIF has degrees, minutes and seconds without a sign, and a letter for the hemisphere. Programs that
copy the tags write them as decimal degrees, as text, or with seconds of 0/0. XMP has signed degrees
(``drone-dji:GpsLatitude``) or text (``exif:GPSLatitude`` is ``48,45.5N``). A position whose
hemisphere or parts are missing is never guessed: the reading has a reason instead.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from PIL import ExifTags

from gaussian_splatting.data.images import open_image

_TAGS = ExifTags.GPS
_LATITUDE_SIGNS = {"N": 1, "NORTH": 1, "S": -1, "SOUTH": -1}
_LONGITUDE_SIGNS = {"E": 1, "EAST": 1, "W": -1, "WEST": -1}
# GPSAltitudeRef of EXIF 3.0: above and below sea level, above and below the ellipsoid.
_ALTITUDE_SIGNS = {0.0: 1, 1.0: -1, 2.0: 1, 3.0: -1}
_ALTITUDE_WORDS = {"ABOVE": 1, "BELOW": -1}  # "Above Sea Level"
_MAX_ALTITUDE = 100_000.0  # metres
_SIXTY = 60.0  # minutes of a degree, seconds of a minute
_VALUE = r"[-+]?\d+(?:\.\d+)?(?:/\d+)?"
_VALUES = re.compile(_VALUE)
_DECIMAL_COMMA = re.compile(r"[-+]?\d{1,3},\d{3,}")  # parts of an angle have two digits at most
_METRES = re.compile(rf"({_VALUE})\s*(?:m|metres|meters)?(?:\s+(above|below)\b.*)?", re.IGNORECASE)
_XMP_NAMESPACES = re.compile(r"([\w-]{1,40}):GpsLatitude\b", re.IGNORECASE)
_UNSIGNED_NAMESPACE = "exif"  # of XMP, with letters for hemispheres
_XMP_SYNONYMS = {"GPSLongitude": ("GpsLongtitude",), "GPSAltitude": ("AbsoluteAltitude",)}
_Lookup = Callable[[str], object]  # from the name of a tag of EXIF to its value, None without one


class GpsPosition(NamedTuple):
    """Where a photograph was taken."""

    longitude: float  # degrees, east is positive
    latitude: float  # degrees, north is positive
    altitude: float | None  # metres; None where it is missing


class GpsReading(NamedTuple):
    """GPS data of an image: position, altitude, and why one is missing."""

    position: GpsPosition | None  # None where there is none, or none that can be read
    problem: str = ""  # why a position that is there cannot be read; else empty


class _UnreadableError(ValueError):
    """A value of GPS is there, and its meaning is not known; the message says why."""


def read_gps(path: Path) -> GpsReading:
    """Read the position in the metadata of an image file."""
    with open_image(path) as image:
        tags = image.getexif().get_ifd(ExifTags.IFD.GPSInfo)
        return gps_of_metadata(tags, image.info.get("xmp"))


def gps_of_metadata(tags: Mapping[int, Any], xmp: bytes | str | None) -> GpsReading:
    """Return the position in EXIF, or in XMP where EXIF has none or lacks the altitude.

    Args:
        tags: GPS directory of EXIF.
        xmp: The XMP packet of an image file; None where it has none.
    """
    of_exif = _reading(partial(_exif_lookup, tags), is_signed=False)
    if of_exif.position is not None and of_exif.position.altitude:
        return of_exif
    of_xmp = _xmp_reading(_text(xmp))
    if of_exif.position is None:
        return of_xmp if of_xmp.position is not None or not of_exif.problem else of_exif
    if of_xmp.position is None or of_xmp.position.altitude is None:
        return of_exif
    # Zero is what programs write for an altitude that they do not know.
    return GpsReading(of_exif.position._replace(altitude=of_xmp.position.altitude))


def possible_position(longitude: float, latitude: float, altitude: float | None) -> GpsReading:
    """Return a position, or why it is none on Earth; altitudes that cannot be are left out."""
    if latitude == 0 and longitude == 0:
        return GpsReading(None, "latitude and longitude are 0, which receivers write without a fix")
    # Comparisons with NaN are false.
    if not (abs(latitude) <= 90 and abs(longitude) <= 180):
        return GpsReading(None, f"latitude {latitude:g}, longitude {longitude:g} are out of range")
    if altitude is not None and not abs(altitude) <= _MAX_ALTITUDE:
        altitude = None
    return GpsReading(GpsPosition(float(longitude), float(latitude), altitude))


def _exif_lookup(tags: Mapping[int, Any], name: str) -> object:
    """Return the value of a tag of EXIF by its name."""
    return tags.get(_TAGS[name])


def _xmp_reading(text: str) -> GpsReading:
    """Return the position in an XMP packet, of the first namespace that has one."""
    reading = GpsReading(None)
    namespaces = dict.fromkeys(_XMP_NAMESPACES.findall(text))
    # Namespaces of drones come first: their degrees and altitudes have signs.
    for namespace in sorted(namespaces, key=lambda name: name == _UNSIGNED_NAMESPACE):
        lookup = partial(_xmp_lookup, text, namespace)
        reading = _reading(lookup, is_signed=namespace != _UNSIGNED_NAMESPACE)
        if reading.position is not None:
            break
    return reading


def _xmp_lookup(text: str, namespace: str, name: str) -> str | None:
    """Return the attribute or element of XMP that means a tag of EXIF, where it has content."""
    for synonym in (*_XMP_SYNONYMS.get(name, ()), name):
        pattern = rf"\b{namespace}:{synonym}\s*(?:=\s*[\"']|>)([^\"'<]*)"
        match = re.search(pattern, text, re.IGNORECASE)
        if match is not None and match[1].strip():
            return match[1].strip()
    return None


def _reading(lookup: _Lookup, is_signed: bool) -> GpsReading:
    """Return the position of EXIF values, or of XMP values with the same names.

    Args:
        is_signed: Whether a decimal without a sign and without a hemisphere is positive.
    """
    if lookup("GPSLatitude") is None and lookup("GPSLongitude") is None:
        return GpsReading(None)
    try:
        latitude = _degrees("latitude", lookup, _LATITUDE_SIGNS, is_signed)
        longitude = _degrees("longitude", lookup, _LONGITUDE_SIGNS, is_signed)
    except _UnreadableError as error:
        return GpsReading(None, str(error))
    altitude = _altitude(lookup("GPSAltitude"), lookup("GPSAltitudeRef"))
    return possible_position(longitude, latitude, altitude)


def _degrees(what: str, lookup: _Lookup, signs: Mapping[str, int], is_signed: bool) -> float:
    """Return signed degrees of an angle, which is one to three numbers, or text.

    Args:
        what: Name of the angle.
        signs: By the words for hemispheres.
        is_signed: See :func:`_reading`.
    """
    value = lookup(f"GPS{what.title()}")
    words = _text(lookup(f"GPS{what.title()}Ref")).split()
    parts = value if isinstance(value, tuple | list) else [value]
    if isinstance(value, str | bytes):
        text = _text(value)
        parts = _parts_of(text)
        words += re.findall("[^\\W\\d_]+", text)
        is_signed = text.startswith("+") or (is_signed and len(parts) == 1)
    sign = _sign_of(what, words, signs)
    angle = _angle(what, [_number(part) for part in parts])
    is_negative = math.copysign(1, _number(parts[0])) < 0
    if sign is None:
        if not (is_negative or is_signed):
            letters = " or ".join(word for word in signs if len(word) == 1)
            raise _UnreadableError(f"{what} has no {letters}")
        sign = -1 if is_negative else 1
    if is_negative and sign > 0:
        raise _UnreadableError(f"{what} is negative, and its hemisphere is not")
    return sign * angle


def _parts_of(text: str) -> list[str]:
    """Return the numbers in the text of an angle: ``48.75``, ``48,45.2N``, ``48/1,45/1,12/1``."""
    match = _DECIMAL_COMMA.fullmatch(text.rstrip("NSEWnsew "))
    return [match[0].replace(",", ".")] if match is not None else _VALUES.findall(text)


def _sign_of(what: str, words: Sequence[str], signs: Mapping[str, int]) -> int | None:
    """Return the sign of the hemispheres that words name; None where none is named."""
    named = {signs[word.upper()] for word in words if word.upper() in signs}
    if len(named) > 1:
        raise _UnreadableError(f"{what} has two hemispheres")
    if named:
        return named.pop()
    unknown = [word for word in words if word]
    if unknown:
        raise _UnreadableError(f"{what} has the hemisphere {unknown[0]!r:.20}")
    return None


def _angle(what: str, numbers: Sequence[float]) -> float:
    """Return an unsigned angle from degrees, minutes and seconds; some may be missing."""
    if not 1 <= len(numbers) <= 3 or not math.isfinite(numbers[0]):
        raise _UnreadableError(f"{what} has no degrees")
    angle = abs(numbers[0])
    unit = 1.0
    finest = angle
    for name, number in zip(("minutes", "seconds"), numbers[1:], strict=False):
        unit /= _SIXTY
        if not math.isfinite(number):
            # Of 0/0 after a decimal fraction nothing is missing.
            if finest == round(finest):
                raise _UnreadableError(f"{what} has {name} of 0/0")
            break
        if not 0 <= number <= _SIXTY:
            raise _UnreadableError(f"{what} has {number:g} {name}")
        angle += number * unit
        finest = number
    return angle


def _altitude(value: object, reference: object) -> float | None:
    """Return an altitude in metres; None if it is missing or its reference is unknown."""
    words = ""
    if isinstance(value, str | bytes):
        match = _METRES.fullmatch(_text(value).replace(",", "."))
        if match is None:
            return None
        value = match[1]
        words = match[2] or ""
    altitude = _number(value)
    sign = _altitude_sign(words if reference is None else reference)
    if sign is None or not abs(altitude) <= _MAX_ALTITUDE:
        return None
    # Some write the sign as well.
    return -abs(altitude) if sign < 0 else altitude


def _altitude_sign(reference: object) -> int | None:
    """Return 1 or -1 for a GPSAltitudeRef; None where it is none."""
    if isinstance(reference, tuple | list) and len(reference) == 1:
        reference = reference[0]
    raw = reference.encode() if isinstance(reference, str) else reference
    if isinstance(raw, bytes) and raw and raw[0] in _ALTITUDE_SIGNS:
        return _ALTITUDE_SIGNS[raw[0]]
    text = _text(reference)
    if not text:
        # Above sea level is the default of EXIF.
        return 1
    word = text.split()[0].upper()
    number = _number(text)
    return _ALTITUDE_WORDS.get(word) or _ALTITUDE_SIGNS.get(number)


def _text(value: object) -> str:
    """Return text without padding; bytes are decoded, None is empty."""
    if value is None:
        return ""
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
    return text.strip(" \t\r\n\0")


def _number(value: Any) -> float:
    """Return a number, or a fraction in text; NaN for any other value."""
    try:
        if isinstance(value, str) and "/" in value:
            numerator, denominator = value.split("/")
            return float(numerator) / float(denominator)
        return float(value)
    except (TypeError, ValueError, ArithmeticError):
        return math.nan
