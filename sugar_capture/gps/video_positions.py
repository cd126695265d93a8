# SPDX-License-Identifier: Apache-2.0
"""GPS positions that cameras write into their videos, or beside them.

Two kinds are read. GoPro cameras write a telemetry track in GPMF, whose streams ``GPS5`` (up to
HERO11) or ``GPS9`` (from HERO11 on) hold positions; the format is described in GoPro's
``gpmf-parser`` (Apache-2.0 or MIT). DJI cameras write a line of text for each frame, as subtitles
of the video or as ``VIDEO.SRT`` beside it.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import av
import av.error
import numpy as np
from PIL import ExifTags, Image
from PIL.TiffImagePlugin import IFDRational

from sugar_capture.gps.gps_tags import GpsPosition

_REACH = 1.0  # seconds before and after a track within which its end still counts
_HEADER = struct.Struct(">4scBH")  # key, type, bytes of a value, number of values
_NESTED = b"\0"
_INTEGERS = {b"l": ">i4", b"s": ">i2"}  # types of scales
_GPS5_BYTES = 20  # five integers of 32 bits: latitude, longitude, altitude, two speeds
_GPS9_BYTES = 32  # the same five, then day, seconds, precision and fix
_FIX_OF_GPS9 = ">u2"  # the last value of an entry
_N_SCALES = 3  # that are used: of latitude, longitude and altitude
_NUMBER = r"(-?\d+(?:\.\d+)?)"
# "longtitude" is how some drones write it.
_LATITUDE = re.compile(rf"latitude\s*:\s*{_NUMBER}")
_LONGITUDE = re.compile(rf"longt?itude\s*:\s*{_NUMBER}")
_ALTITUDE = re.compile(rf"(?:abs_alt|altitude)\s*:\s*{_NUMBER}")
_SRT_TIME = re.compile(r"(\d+):(\d\d):(\d\d)[,.](\d+)\s*-->")
_TEXT_CODECS = ("mov_text", "subrip", "text")
_ARC_PARTS = 1_000_000  # of a second of arc, in EXIF
_METRE_PARTS = 1000
_MAX_ALTITUDE = 100_000.0  # above it an altitude is an error


class TrackPoint(NamedTuple):
    """Where the camera was at one moment of a video."""

    seconds: float  # since the video began
    position: GpsPosition


@dataclass(frozen=True)
class VideoTrack:
    """Where the camera was while a video was recorded, in order of time."""

    points: list[TrackPoint]  # at least one
    origin: str  # what they were read from, for messages

    def at(self, seconds: float) -> GpsPosition | None:
        """Return the position at a moment, between two points of the track.

        None more than a second before the first or after the last point.
        """
        times = np.array([point.seconds for point in self.points])
        if not times[0] - _REACH <= seconds <= times[-1] + _REACH:
            return None
        longitudes = np.unwrap([p.position.longitude for p in self.points], period=360.0)
        longitude = float(np.interp(seconds, times, longitudes))
        latitudes = [p.position.latitude for p in self.points]
        altitudes = [p.position.altitude for p in self.points]
        altitude = None
        if None not in altitudes:
            altitude = float(np.interp(seconds, times, np.array(altitudes, dtype=float)))
        latitude = float(np.interp(seconds, times, latitudes))
        return GpsPosition(math.remainder(longitude, 360.0), latitude, altitude)


def video_track(video: Path) -> VideoTrack | None:
    """Return the GPS track of a video; None where there is none, or none that can be read."""
    for path in (video.with_suffix(".SRT"), video.with_suffix(".srt")):
        if path.is_file():
            points = _srt_points(path.read_text(encoding="utf-8", errors="replace"))
            if points:
                return VideoTrack(points, path.name)
    try:
        with av.open(str(video)) as container:
            return _embedded_track(container)
    except (av.error.FFmpegError, ValueError):
        return None


def exif_with_position(position: GpsPosition) -> Image.Exif:
    """Return EXIF data that hold a position alone."""
    tags: dict[int, Any] = {
        ExifTags.GPS.GPSLatitudeRef: "S" if position.latitude < 0 else "N",
        ExifTags.GPS.GPSLatitude: tuple(_arc_of(position.latitude)),
        ExifTags.GPS.GPSLongitudeRef: "W" if position.longitude < 0 else "E",
        ExifTags.GPS.GPSLongitude: tuple(_arc_of(position.longitude)),
    }
    if position.altitude is not None:
        metres = round(abs(position.altitude) * _METRE_PARTS)
        tags[ExifTags.GPS.GPSAltitudeRef] = b"\1" if position.altitude < 0 else b"\0"
        tags[ExifTags.GPS.GPSAltitude] = IFDRational(metres, _METRE_PARTS)
    exif = Image.Exif()
    exif[ExifTags.IFD.GPSInfo] = tags
    return exif


class _Arc(NamedTuple):
    """The parts of an angle as EXIF has them."""

    degrees: IFDRational
    minutes: IFDRational
    seconds: IFDRational


def _arc_of(angle: float) -> _Arc:
    """Return the size of an angle in degrees, without its sign."""
    parts = round(abs(angle) * 3600 * _ARC_PARTS)
    minutes, seconds = divmod(parts, 60 * _ARC_PARTS)
    degrees, minutes = divmod(minutes, 60)
    return _Arc(
        IFDRational(degrees, 1),
        IFDRational(minutes, 1),
        IFDRational(seconds, _ARC_PARTS),
    )


def _embedded_track(container: Any) -> VideoTrack | None:
    for stream in container.streams:
        codec = stream.codec_context
        if stream.type == "data":
            points = _telemetry_points(container, stream)
            origin = "its telemetry track"
        elif stream.type == "subtitle" and codec is not None and codec.name in _TEXT_CODECS:
            points = _subtitle_points(container, stream)
            origin = "its subtitles"
        else:
            continue
        if points:
            return VideoTrack(points, origin)
    return None


def _subtitle_points(container: Any, stream: Any) -> list[TrackPoint]:
    """Read the positions in the subtitles of a video."""
    points = []
    container.seek(0)
    for packet in container.demux(stream):
        if packet.pts is None:
            continue
        position = position_of_text(bytes(packet).decode("utf-8", "replace"))
        if position is not None:
            points.append(TrackPoint(float(packet.pts * packet.time_base), position))
    return points


def _srt_points(text: str) -> list[TrackPoint]:
    """Read the positions in the text of an SRT file."""
    points = []
    times = list(_SRT_TIME.finditer(text))
    ends = [time.start() for time in times[1:]]
    for time, end in zip(times, [*ends, len(text)], strict=True):
        hours, minutes, seconds, fraction = time.groups()
        moment = int(hours) * 3600 + int(minutes) * 60 + int(seconds) + float(f"0.{fraction}")
        position = position_of_text(text[time.end() : end])
        if position is not None:
            points.append(TrackPoint(moment, position))
    return sorted(points)


def position_of_text(text: str) -> GpsPosition | None:
    """Return the position in a line of DJI's; None where there is none.

    Heights above the place of start (``rel_alt``) do not count: they are not altitudes.
    """
    latitude = _LATITUDE.search(text)
    longitude = _LONGITUDE.search(text)
    if latitude is None or longitude is None:
        return None
    altitude = _ALTITUDE.search(text)
    metres = None if altitude is None else float(altitude[1])
    return _possible_position(float(longitude[1]), float(latitude[1]), metres)


def _telemetry_points(container: Any, stream: Any) -> list[TrackPoint]:
    """Read the positions in a track of GPMF; those of a packet are evenly spread over its time."""
    points = []
    container.seek(0)
    for packet in container.demux(stream):
        if packet.pts is None or packet.size == 0:
            continue
        positions = positions_of_telemetry(bytes(packet))
        start = float(packet.pts * packet.time_base)
        duration = float((packet.duration or 0) * packet.time_base)
        for number, position in enumerate(positions):
            points.append(TrackPoint(start + number / len(positions) * duration, position))
    return points


def positions_of_telemetry(data: bytes) -> list[GpsPosition]:
    """Return the positions in one packet of GPMF; none where it is damaged or has no fix."""
    positions = []
    scales = np.ones(_N_SCALES)
    has_fix = True
    for key, kind, size, values in _entries(data):
        if key == b"SCAL" and kind in _INTEGERS:
            read = np.frombuffer(values, _INTEGERS[kind])
            scales = read.astype(float) if len(read) >= _N_SCALES else scales
        elif key == b"GPSF":
            has_fix = any(values)
        elif (key == b"GPS5" and size == _GPS5_BYTES) or (key == b"GPS9" and size == _GPS9_BYTES):
            rows = np.frombuffer(values, np.uint8).reshape(-1, size)
            if key == b"GPS9":
                fixes = np.ascontiguousarray(rows[:, -2:]).view(_FIX_OF_GPS9)
                rows = rows[fixes[:, 0] > 0]
            if not has_fix or (scales[:_N_SCALES] == 0).any():
                continue
            integers = np.ascontiguousarray(rows[:, : 4 * _N_SCALES]).view(">i4")
            for latitude, longitude, altitude in integers / scales[:_N_SCALES]:
                position = _possible_position(longitude, latitude, altitude)
                if position is not None:
                    positions.append(position)
    return positions


def _entries(data: bytes) -> Iterator[tuple[bytes, bytes, int, bytes]]:
    """Yield key, type, bytes of a value, and the values of each entry, of nested ones in turn."""
    place = 0
    while place + _HEADER.size <= len(data):
        key, kind, size, count = _HEADER.unpack_from(data, place)
        place += _HEADER.size
        values = data[place : place + size * count]
        if len(values) < size * count:
            return
        if kind == _NESTED:
            yield from _entries(values)
        else:
            yield key, kind, size, values
        # Entries begin at multiples of four bytes.
        place += size * count + -(size * count) % 4


def _possible_position(
    longitude: float, latitude: float, altitude: float | None
) -> GpsPosition | None:
    """Return a position; None for one that is not on Earth, and for the zeros of no reception."""
    is_unset = latitude == 0 and longitude == 0
    if is_unset or abs(latitude) > 90 or abs(longitude) > 180:
        return None
    if altitude is not None and not abs(altitude) <= _MAX_ALTITUDE:
        altitude = None
    return GpsPosition(float(longitude), float(latitude), altitude)
