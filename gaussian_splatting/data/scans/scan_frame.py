# SPDX-License-Identifier: Apache-2.0
"""Where a capture expects the points of a scan, and whether they lie there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.spatial import KDTree

from gaussian_splatting.core.subsets import about
from gaussian_splatting.data.cameras import Camera, centers_of
from gaussian_splatting.data.scans.scan_files import Scan, ToWorld, read_scan
from gaussian_splatting.data.world_offset import offset_for
from sugar_utils.command_text import command_text
from sugar_utils.errors import Notify, UserError

_REACH = 3.0  # times the distance of most points from their middle
_CAMERA_REACH = 10.0  # times that of the cameras, where there are no points
_QUANTILE = 0.95  # of the points; the others are outliers
_MAX_GAP = 0.05  # of the reach of the points, from most of them to the scan
_LEAST_SHARE = 0.1  # of the points that must have the scan near them
_SAMPLES = 5_000
_ADVICE = (
    "it is in another frame or unit: bring it to the world of the scene, by "
    f"{command_text('scan')} with --gcp or --gps where it is on a map"
)


@dataclass(frozen=True)
class ScanFrame:
    """The part of the world that a capture shows."""

    points: np.ndarray  # of the reconstruction, may be none, world units, (P, 3)
    middle: np.ndarray  # (3,)
    reach: float  # distance of most points from the middle
    radius: float  # beyond which points are of no use

    @classmethod
    def of(cls, cameras: Sequence[Camera], points: np.ndarray) -> ScanFrame:
        """Return the frame of cameras and the points of their reconstruction, (P, 3)."""
        centers = centers_of(cameras)
        points = points.astype(np.float64)
        places = points if len(points) else centers
        middle = np.median(places, axis=0)
        reach = float(np.quantile(np.linalg.norm(places - middle, axis=1), _QUANTILE))
        from_cameras = float(np.linalg.norm(centers - middle, axis=1).max())
        radius = max(_REACH * reach, from_cameras)
        if not len(points):
            radius = _CAMERA_REACH * from_cameras
        return cls(points, middle, reach, radius)

    def contains(self, positions: np.ndarray) -> np.ndarray:
        """Return which positions, (N, 3), are of use. (N,) bool"""
        return np.linalg.norm(positions - self.middle, axis=1) <= self.radius

    def require_overlap(self, path: Path, scan: Scan, notify: Notify) -> None:
        """Raise a ``UserError`` if a scan does not match the scene."""
        if not len(scan.positions):
            places = " and ".join(
                f"({', '.join(f'{value:.6g}' for value in place)})"
                for place in (scan.middle, self.middle)
            )
            raise UserError(
                f"{path}: none of its {scan.n_points:,} points lies where the photographs look "
                f"(middles {places}, {self.radius:.3g} units around the second); {_ADVICE}"
            )
        if not len(self.points):
            return
        gaps, _ = KDTree(scan.positions).query(about(self.points, _SAMPLES))
        allowed = _MAX_GAP * self.reach
        is_near = gaps <= allowed
        if is_near.mean() < _LEAST_SHARE:
            raise UserError(
                f"{path}: only {is_near.mean():.0%} of the scene's points have the scan within "
                f"{allowed:.3g} units; {_ADVICE}"
            )
        notify(
            f"{path.name}: {is_near.mean():.0%} of the scene's points have the scan within "
            f"{allowed:.3g} units"
        )


def scan_in_scene(
    path: Path,
    frame: ScanFrame,
    limit: int,
    notify: Notify,
    to_world: ToWorld,
) -> Scan:
    """Read a scan, thinned, where it lies in the part of the world that a capture shows.

    Args:
        limit: Points that are kept at most.
        to_world: From the coordinates of the file to those of the scene.

    Raises:
        UserError: The scan cannot be read, or lies elsewhere.
    """
    scan = read_scan(path, limit, notify, to_world, frame.contains)
    frame.require_overlap(path, scan, notify)
    return scan


def without_offset(offset: np.ndarray) -> ToWorld:
    """Return the way from original or moved coordinates to the world of a scene.

    Args:
        offset: That is subtracted from captures far from the origin. (3,)
    """
    subtracted: list[np.ndarray] = []

    def to_world(positions: np.ndarray) -> np.ndarray:
        if not subtracted:
            # All pieces of a file are in the coordinates of the first.
            subtracted.append(offset_for(positions, offset))
        return positions - subtracted[0]

    return to_world
