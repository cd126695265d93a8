# SPDX-License-Identifier: Apache-2.0
"""GPS positions in videos, and in subtitle files of videos.

Two kinds are read. GoPro cameras write a telemetry track in GPMF, whose streams ``GPS5`` (up to
HERO11) or ``GPS9`` (from HERO11 on) hold positions; the format is described in GoPro's
``gpmf-parser`` (Apache-2.0 or MIT). DJI cameras write a line of text for each frame, as subtitles
of the video or as ``VIDEO.SRT`` beside it; older ones write ``GPS(longitude, latitude, altitude)``.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import av
import av.error
import numpy as np
from PIL import ExifTags, Image
from PIL.TiffImagePlugin import IFDRational

from sugar_capture.camera_readers.parsing import decoded_text, with_decimal_point
from sugar_capture.gps.gps_tags import GpsPosition, possible_position

_REACH = 1.0  # seconds before and after a track within which its end still counts
_HEADER = struct.Struct(">4scBH")  # key, type, bytes of a value, number of values
_NESTED = b"\0"
_INTEGERS = {b"l": ">i4", b"s": ">i2"}  # types of scales
_GPS5_BYTES = 20  # five integers of 32 bits: latitude, longitude, altitude, two speeds
_GPS9_BYTES = 32  # the same five, then day, seconds, precision and fix
_FIX_OF_GPS9 = ">u2"  # the last value of an entry
_N_SCALES = 3  # that are used: of latitude, longitude and altitude
_NUMBER = r"([-+]?\d+(?:\.\d+)?)"
_VALUE = r"\s*[:=]\s*([-+]?\d+(?:[.,]\d+)?)"  # after a name; some write a decimal comma
# "longtitude" is how some drones write it.
_LATITUDE = re.compile(rf"(?<![a-z])lat(?:itude)?{_VALUE}", re.IGNORECASE)
_LONGITUDE = re.compile(rf"(?<![a-z])lon(?:gt?itude|g)?{_VALUE}", re.IGNORECASE)
_ALTITUDE = re.compile(rf"(?<![a-z_])(?:abs_alt(?:itude)?|altitude){_VALUE}", re.IGNORECASE)
_TRIPLE = re.compile(
    rf"\b(?:GPS|RTK)\s*\(\s*{_NUMBER}\s*,\s*{_NUMBER}\s*(?:,\s*{_NUMBER}\s*(M?))?\s*\)"
)
_MAX_SATELLITES = 60
_SRT_TIME = re.compile(r"(\d+):(\d\d):(\d\d)[,.](\d+)\s*-->")
_TEXT_CODECS = ("mov_text", "subrip", "text")
_ARC_PARTS = 1_000_000  # of a second of arc, in EXIF
_METRE_PARTS = 1000


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
    path = srt_beside(video)
    if path is not None:
        points = _srt_points(decoded_text(path))
        if points:
            return VideoTrack(points, path.name)
    try:
        with av.open(str(video)) as container:
            return _embedded_track(container)
    except (av.error.FFmpegError, ValueError):
        return None


def srt_beside(video: Path) -> Path | None:
    """Return the file of subtitles beside a video; None where there is none."""
    for path in (video.with_suffix(".SRT"), video.with_suffix(".srt")):
        if path.is_file():
            return path
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
    lines = []
    container.seek(0)
    for packet in container.demux(stream):
        if packet.pts is not None:
            text = bytes(packet).decode("utf-8", "replace")
            lines.append(_TimedText(float(packet.pts * packet.time_base), text))
    return _track_points(lines)


def _srt_points(text: str) -> list[TrackPoint]:
    """Read the positions in the text of an SRT file."""
    lines = []
    times = list(_SRT_TIME.finditer(text))
    ends = [time.start() for time in times[1:]]
    for time, end in zip(times, [*ends, len(text)], strict=True):
        hours, minutes, seconds, fraction = time.groups()
        moment = int(hours) * 3600 + int(minutes) * 60 + int(seconds) + float(f"0.{fraction}")
        lines.append(_TimedText(moment, text[time.end() : end]))
    return sorted(_track_points(lines), key=lambda point: point.seconds)


class _TimedText(NamedTuple):
    """The text that a drone wrote for a moment of a video."""

    seconds: float  # since the video began
    text: str


def _track_points(lines: Sequence[_TimedText]) -> list[TrackPoint]:
    has_altitudes = any(_third_is_altitude(line.text) for line in lines)
    points = []
    for line in lines:
        position = position_of_text(line.text, has_altitudes)
        if position is not None:
            points.append(TrackPoint(line.seconds, position))
    return points


def _third_is_altitude(text: str) -> bool:
    """Whether the third number of a triple cannot be the number of satellites."""
    match = _TRIPLE.search(text)
    if match is None or match[3] is None:
        return False
    return match[4] == "M" or "." in match[3] or not 0 <= int(match[3]) <= _MAX_SATELLITES


def position_of_text(text: str, has_altitudes: bool = False) -> GpsPosition | None:
    """Return the position in a line of DJI's; None where there is none.

    Heights above the place of start (``rel_alt``, ``BAROMETER``) do not count: they are not
    altitudes.

    Args:
        has_altitudes: Whether the third number of ``GPS(longitude, latitude, ...)`` is an altitude;
            drones of other models write the number of satellites there.
    """
    latitude = _LATITUDE.search(text)
    longitude = _LONGITUDE.search(text)
    if latitude is not None and longitude is not None:
        altitude = _ALTITUDE.search(text)
        metres = None if altitude is None else _number_of(altitude)
        return possible_position(_number_of(longitude), _number_of(latitude), metres).position
    triple = _TRIPLE.search(text)
    if triple is None:
        return None
    metres = float(triple[3]) if has_altitudes and triple[3] is not None else None
    # Drones that write the unit, as Matrice 300, write the latitude first.
    order = (2, 1) if triple[4] == "M" else (1, 2)
    east, north = (float(triple[number]) for number in order)
    return possible_position(east, north, metres).position


def _number_of(match: re.Match[str]) -> float:
    return float(with_decimal_point(match[1]))


def _telemetry_points(container: Any, stream: Any) -> list[TrackPoint]:
    """Read the positions of a GPMF track; positions of a packet are evenly spaced in time."""
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
                position = possible_position(longitude, latitude, altitude).position
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
