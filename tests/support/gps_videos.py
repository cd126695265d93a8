# SPDX-License-Identifier: Apache-2.0
"""Videos of some seconds with a GPS track, as cameras write them."""

from __future__ import annotations

import struct
from fractions import Fraction
from pathlib import Path
from typing import Literal

import av
import numpy as np

LATITUDE = -33.85  # degrees, at the beginning
LONGITUDE = 151.2
ALTITUDE = 58.25  # metres
SPEED = 1e-4  # degrees of latitude a second, to the north
GPS_RATE = 10  # positions a second
FRAME_RATE = 10
SECONDS = 3
_MILLISECONDS = Fraction(1, 1000)


def latitude_at(seconds: float) -> float:
    """Where the camera is, degrees."""
    return LATITUDE + SPEED * seconds


def write_gps_video(path: Path, kind: Literal["GPS5", "GPS9", "none"], fix: int = 3) -> Path:
    """Write a video whose frames differ, with a telemetry track like that of a GoPro."""
    rng = np.random.default_rng(0)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=FRAME_RATE)
        stream.width, stream.height = 64, 48
        stream.pix_fmt = "yuv420p"
        telemetry = container.add_data_stream("bin_data")
        telemetry.codec_tag = "gpmd"
        telemetry.time_base = _MILLISECONDS
        for number in range(SECONDS * FRAME_RATE):
            pixels = rng.integers(0, 255, (48, 64, 3), dtype=np.uint8)
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts = number
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
        for second in range(0 if kind == "none" else SECONDS):
            packet = av.Packet(telemetry_packet(second, kind, fix))
            packet.stream = telemetry
            packet.time_base = _MILLISECONDS
            packet.pts = packet.dts = second * 1000
            packet.duration = 1000
            container.mux(packet)
    return path


def telemetry_packet(second: int, kind: str, fix: int = 3) -> bytes:
    """The GPMF of one second."""
    rows = []
    for number in range(GPS_RATE):
        latitude = latitude_at(second + number / GPS_RATE)
        place = (round(latitude * 1e7), round(LONGITUDE * 1e7), round(ALTITUDE * 1000), 0, 0)
        row = struct.pack(">5i", *place)
        rows.append(row + struct.pack(">2i2H", 9000, 0, 150, fix) if kind == "GPS9" else row)
    scales = [10**7, 10**7, 1000, 1000, 100]
    parts = [_entry("GPSF", "L", 4, struct.pack(">I", fix))]
    if kind == "GPS9":
        scales += [1, 1000, 100, 1]
        parts = [_entry("TYPE", "c", 1, b"lllllllSS")]
    parts.append(_entry("SCAL", "l", 4, struct.pack(f">{len(scales)}i", *scales)))
    values = b"".join(rows)
    size = len(values) // GPS_RATE
    parts.append(_entry(kind, "l" if kind == "GPS5" else "?", size, values))
    acceleration = _entry("STRM", "\0", 1, _entry("ACCL", "s", 6, b"\1\2" * 9))
    positions = _entry("STRM", "\0", 1, b"".join(parts))
    name = _entry("DVNM", "c", 1, b"HERO8 Black")
    return _entry("DEVC", "\0", 1, name + acceleration + positions)


def _entry(key: str, kind: str, size: int, values: bytes) -> bytes:
    header = struct.pack(">4scBH", key.encode(), kind.encode(), size, len(values) // size)
    return header + values + b"\0" * (-len(values) % 4)


def srt_text(n_frames: int) -> str:
    """The lines that a drone writes beside a video, one for each frame."""
    blocks = []
    for number in range(n_frames):
        moment = number / FRAME_RATE
        blocks.append(
            f"{number + 1}\n00:00:{moment:06.3f} --> 00:00:{moment + 0.1:06.3f}\n".replace(".", ",")
            + f'<font size="28">FrameCnt: {number + 1}, DiffTime: 100ms\n'
            "2026-05-10 14:33:22.123\n"
            f"[iso: 100] [latitude: {latitude_at(moment):.6f}] [longitude: {LONGITUDE:.6f}] "
            f"[rel_alt: 20.100 abs_alt: {ALTITUDE:.3f}] [ct: 5500] </font>\n"
        )
    return "\n".join(blocks)
