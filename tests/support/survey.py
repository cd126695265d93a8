# SPDX-License-Identifier: Apache-2.0
"""A surveyed capture: cameras and control points whose places on a map are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image
from scipy.spatial.transform import Rotation

from gaussian_splatting.data.cameras import Camera
from sugar_maps.similarity import Similarity

EPSG = 32633
ORIGIN = np.array([500_123.4, 5_400_456.7, 321.5])
SCALE = 25.0
TO_MAP = Similarity(
    SCALE, Rotation.from_euler("zyx", [30, 4, -3], degrees=True).as_matrix(), ORIGIN
)
"""From the world of the tiny scene, whose z is up, to metres east, north and up."""


@dataclass(frozen=True)
class Capture:
    """The part of a scene that is put on a map."""

    root: Path
    calibrated_cameras: list[Camera]


def places(n: int, seed: int = 0) -> np.ndarray:
    """Points in front of the cameras of the tiny scene. (n, 3)"""
    rng = np.random.default_rng(seed)
    return rng.uniform(-0.7, 0.7, (n, 3))


def pixel_of(camera: Camera, point: np.ndarray) -> tuple[float, float] | None:
    """The pixel that shows a point; None where it is not in the picture."""
    x, y, z = camera.rotation @ point + camera.translation
    u = camera.fx * x / z + camera.cx
    v = camera.fy * y / z + camera.cy
    inside = z > 0 and 0 <= u <= camera.width and 0 <= v <= camera.height
    return (u, v) if inside else None


def list_lines(
    cameras: Sequence[Camera],
    points: np.ndarray,
    positions: np.ndarray,
    noise: float = 0.0,
    names: Sequence[str] | None = None,
) -> list[str]:
    """Lines of a ``gcp_list.txt``, without the first one. ``noise`` is in pixels."""
    rng = np.random.default_rng(1)
    lines = []
    for row, (point, position) in enumerate(zip(points, positions, strict=True)):
        name = f"P{row}" if names is None else names[row]
        x, y, z = position
        for camera in cameras:
            pixel = pixel_of(camera, point)
            if pixel is not None:
                u, v = pixel + noise * rng.normal(size=2)
                lines.append(f"{x:.4f} {y:.4f} {z:.4f} {u:.3f} {v:.3f} {camera.name} {name}")
    return lines


def write_list(path: Path, lines: Sequence[str], system: str = f"EPSG:{EPSG}") -> Path:
    """Write a ``gcp_list.txt``."""
    path.write_text("\n".join([system, *lines]) + "\n")
    return path


def tag_with_gps(path: Path, longitude: float, latitude: float, altitude: float | None) -> None:
    """Write a position into the EXIF data of a photograph."""
    with Image.open(path) as image:
        pixels = image.copy()
    tags: dict[int, object] = {
        ExifTags.GPS.GPSLatitudeRef: "S" if latitude < 0 else "N",
        ExifTags.GPS.GPSLatitude: _sexagesimal(latitude),
        ExifTags.GPS.GPSLongitudeRef: "W" if longitude < 0 else "E",
        ExifTags.GPS.GPSLongitude: _sexagesimal(longitude),
    }
    if altitude is not None:
        tags[ExifTags.GPS.GPSAltitudeRef] = b"\x01" if altitude < 0 else b"\x00"
        tags[ExifTags.GPS.GPSAltitude] = abs(altitude)
    exif = Image.Exif()
    exif[ExifTags.IFD.GPSInfo] = tags
    pixels.save(path, exif=exif)


def _sexagesimal(degrees: float) -> tuple[float, float, float]:
    whole, rest = divmod(abs(degrees), 1)
    minutes, seconds = divmod(rest * 60, 1)
    return whole, minutes, round(seconds * 60, 6)


def turn_between(a: np.ndarray, b: np.ndarray) -> float:
    """Degrees between two rotations."""
    return float(np.degrees(Rotation.from_matrix(a.T @ b).magnitude()))
