# SPDX-License-Identifier: Apache-2.0
"""Writing a capture as a COLMAP model: pinhole cameras, poses, points and their tracks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.colmap import write_model
from sugar_utils.libraries import load_pycolmap


class ViewTracks(NamedTuple):
    """The points that one image observes, and where."""

    rows: np.ndarray  # of the points, (n,) int
    keypoints: np.ndarray  # in the image, (n, 2) pixels


@dataclass(frozen=True)
class TrackedPoints:
    """Points with the images that observe them."""

    positions: np.ndarray  # (P, 3) float64 world units
    colors: np.ndarray  # (P, 3) uint8
    views: Sequence[ViewTracks]  # one for each camera, in their order


def write_capture(folder: Path, cameras: Sequence[Camera], points: TrackedPoints) -> None:
    """Write cameras and points as a COLMAP model; cameras of equal intrinsics share a lens.

    Raises:
        UserError: The folder cannot be written.
    """
    pycolmap = load_pycolmap()
    model = pycolmap.Reconstruction()
    lens_numbers: dict[tuple[float, ...], int] = {}
    for number, (camera, tracks) in enumerate(zip(cameras, points.views, strict=True), start=1):
        size = camera.size
        intrinsics = (camera.fx, camera.fy, camera.cx, camera.cy)
        lens_number = lens_numbers.get((*size, *intrinsics))
        if lens_number is None:
            lens_number = len(lens_numbers) + 1
            lens_numbers[(*size, *intrinsics)] = lens_number
            lens = pycolmap.Camera(
                model="PINHOLE", width=size[0], height=size[1], params=list(intrinsics)
            )
            lens.camera_id = lens_number
            model.add_camera_with_trivial_rig(lens)
        image = pycolmap.Image(
            name=camera.name, keypoints=tracks.keypoints, camera_id=lens_number, image_id=number
        )
        pose = pycolmap.Rigid3d(pycolmap.Rotation3d(camera.rotation), camera.translation)
        model.add_image_with_trivial_frame(image, pose)
    for position, color, elements in zip(
        points.positions, points.colors, _elements(points), strict=True
    ):
        track = pycolmap.Track()
        for image_number, keypoint_number in elements:
            track.add_element(image_number, keypoint_number)
        model.add_point3D(position, track, color)
    model.update_point_3d_errors()
    write_model(model, folder)


def _elements(points: TrackedPoints) -> list[list[list[int]]]:
    """Numbers of image and keypoint of all observations of each point, images ascending."""
    n_observed = [len(tracks.rows) for tracks in points.views]
    rows = np.concatenate([tracks.rows for tracks in points.views])
    images = np.repeat(np.arange(1, len(n_observed) + 1), n_observed)
    keypoints = np.concatenate([np.arange(n) for n in n_observed])
    order = np.argsort(rows, kind="stable")
    pairs = np.stack([images[order], keypoints[order]], axis=1)
    ends = np.cumsum(np.bincount(rows, minlength=len(points.positions)))
    return [part.tolist() for part in np.split(pairs, ends[:-1])]
