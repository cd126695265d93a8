# SPDX-License-Identifier: Apache-2.0
"""All points of a capture with their tracks, for the COLMAP models of its blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.colmap import find_model, read_reconstruction
from gaussian_splatting.data.colmap_writing import TrackedPoints, ViewTracks
from gaussian_splatting.data.observations import positions_and_colors
from gaussian_splatting.scenes.scene import Scene

_NO_ROWS = np.zeros(0, np.int64)


@dataclass(frozen=True)
class CapturePoints:
    """The points of a capture, and which views observe them."""

    positions: np.ndarray  # (P, 3) float64 world units of the scene
    colors: np.ndarray  # (P, 3) uint8
    rows: Mapping[str, np.ndarray]  # of the points that a view observes, by its name, (n,)

    def within(self, is_inside: np.ndarray, cameras: Mapping[str, Camera]) -> TrackedPoints:
        """Return some of the points, with their tracks in some views.

        Keypoints are where the cameras project the points: what a view observes is on its image.

        Args:
            is_inside: The points. (P,) bool
            cameras: By the name of their photograph, of which their image may be a part.
        """
        numbers = np.cumsum(is_inside) - 1
        views = []
        for name, camera in cameras.items():
            rows = self.rows.get(name, _NO_ROWS)
            rows = rows[is_inside[rows]]
            pixels, _, is_shown = camera.project(self.positions[rows])
            views.append(ViewTracks(numbers[rows[is_shown]], pixels[is_shown]))
        return TrackedPoints(self.positions[is_inside], self.colors[is_inside], views)


def read_capture_points(root: Path, scene: Scene) -> CapturePoints:
    """Read the points of a scene folder; without a COLMAP model they have no tracks."""
    model = find_model(root)
    if model is None:
        return CapturePoints(scene.points.astype(np.float64), scene.points_rgb, {})
    reconstruction = read_reconstruction(model)
    numbers = np.array(sorted(reconstruction.points3D), dtype=np.uint64)
    points = [reconstruction.points3D[number] for number in numbers.tolist()]
    rows = {}
    for image_id in reconstruction.reg_image_ids():
        image = reconstruction.images[image_id]
        observed = [point.point3D_id for point in image.get_observation_points2D()]
        observed_numbers = np.unique(np.array(observed, dtype=np.uint64))
        # Points of a damaged model may be missing.
        present = observed_numbers[np.isin(observed_numbers, numbers)]
        rows[image.name] = np.searchsorted(numbers, present)
    positions, colors = positions_and_colors(points)
    return CapturePoints(positions - scene.model_offset, colors, rows)
