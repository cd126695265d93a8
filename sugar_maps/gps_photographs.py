# SPDX-License-Identifier: Apache-2.0
"""Images with usable GPS: positions that can be read and lie near each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.scenes.scene import Scene
from sugar_capture.features.photographs import OriginalNames
from sugar_capture.gps.geocentric import geocentric
from sugar_capture.gps.gps_tags import GpsPosition, read_gps
from sugar_capture.scene_folder import IMAGES, original_photographs
from sugar_maps.similarity import MIN_POINTS
from sugar_utils.errors import Notify, UserError, shortened

_TOGETHER = 50_000.0  # metres within which photographs of one capture lie
_NEAR_ZERO = 5.0  # metres from 0 within which another altitude makes an altitude of 0 plausible


class GpsPhotograph(NamedTuple):
    """A camera and the position in its photograph."""

    camera: Camera
    position: np.ndarray  # longitude, latitude, altitude, (3,)


@dataclass
class _Readings:
    """GPS positions of a capture, and counts of missing ones."""

    positions: list[tuple[Camera, GpsPosition]] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)  # by name: why one cannot be read

    def complete(self) -> list[GpsPhotograph]:
        """Return the photographs with an altitude.

        An altitude of exactly 0 is none where no other one is near 0: so programs write one that
        they do not know.
        """
        altitudes = [position.altitude for _, position in self.positions if position.altitude]
        is_zero_plausible = any(abs(altitude) <= _NEAR_ZERO for altitude in altitudes)
        photographs = []
        for camera, position in self.positions:
            altitude = position.altitude
            if altitude is None or (altitude == 0 and not is_zero_plausible):
                continue
            place = np.array([position.longitude, position.latitude, altitude])
            photographs.append(GpsPhotograph(camera, place))
        return photographs

    def describe_problems(self) -> str:
        """Describe how many positions cannot be read and why, empty where all can be."""
        if not self.problems:
            return ""
        reasons = [
            f"{count} x {reason}" for reason, count in Counter(self.problems.values()).most_common()
        ]
        return (
            f"{len(self.problems)} have a position that cannot be read, as "
            f"{next(iter(self.problems))} ({shortened(reasons)})"
        )


def gps_photographs(scene: Scene, notify: Notify) -> list[GpsPhotograph]:
    """Return three or more photographs with a complete position, near each other.

    Args:
        notify: Called with lines about photographs that are left out.

    Raises:
        UserError: There are fewer; the message says how many lack what.
    """
    readings = _readings_of(scene)
    photographs = readings.complete()
    problems = readings.describe_problems()
    if len(photographs) < MIN_POINTS:
        lacking = [problems] if problems else []
        n_without_altitude = len(readings.positions) - len(photographs)
        if n_without_altitude:
            lacking.append(f"{n_without_altitude} more have no altitude, or exactly 0")
        missing = f" ({'; '.join(lacking)})" if lacking else ""
        advice = "use the photographs as the camera wrote them"
        if lacking:
            advice = "write the tags that are missing, as by exiftool"
        raise UserError(
            f"{scene.root}: {len(photographs)} photographs have GPS in their EXIF data or XMP"
            f"{missing}, and it takes {MIN_POINTS}; {advice}, or use --gcp"
        )
    if problems:
        notify(f"note: of the photographs {problems}")
    return _without_strays(photographs, notify)


def _readings_of(scene: Scene) -> _Readings:
    originals = original_photographs(scene.root)
    index = OriginalNames(originals)
    readings = _Readings()
    for camera in scene.calibrated_cameras:
        problem = ""
        for path in _files_of(camera, scene.root, originals, index):
            reading = read_gps(path)
            problem = problem or reading.problem
            if reading.position is not None:
                readings.positions.append((camera, reading.position))
                break
        else:
            if problem:
                readings.problems[camera.name] = problem
    return readings


def _files_of(
    camera: Camera, root: Path, originals: dict[str, Path], index: OriginalNames
) -> Iterator[Path]:
    """Yield the files of a photograph; flat copies, which come last, may have no EXIF data."""
    name = index.find(camera.name)
    if name is not None:
        yield originals[name]
    # Smaller copies of images lie in folders beside them.
    for path in (camera.source_path, camera.image_path, root / IMAGES / camera.name):
        if path is not None and path.is_file():
            yield path


def _without_strays(photographs: Sequence[GpsPhotograph], notify: Notify) -> list[GpsPhotograph]:
    """Return photographs without those whose GPS is far from that of most others."""
    positions = np.stack([photograph.position for photograph in photographs])
    places = geocentric(positions)
    distances = np.linalg.norm(places - np.median(places, axis=0), axis=1)
    together = []
    for photograph, distance in zip(photographs, distances, strict=True):
        if distance <= _TOGETHER:
            together.append(photograph)
            continue
        notify(
            f"note: the GPS of {photograph.camera.name} is left out: it is "
            f"{distance / 1000:,.0f} km from the others"
        )
    return together
