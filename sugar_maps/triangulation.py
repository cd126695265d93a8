# SPDX-License-Identifier: Apache-2.0
"""Points in the world of a capture from pixels of several of its photographs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.colmap import read_reconstruction
from gaussian_splatting.data.colmap_files import format_of
from gaussian_splatting.data.images import image_size, lens_at, lens_of
from gaussian_splatting.data.names import NameIndex
from gaussian_splatting.scenes.scene import Scene
from sugar_capture.features.photographs import OriginalNames
from sugar_capture.scene_folder import WORK, original_photographs
from sugar_maps.control_points import PointObservation
from sugar_utils.errors import UserError

if TYPE_CHECKING:
    import pycolmap

MIN_IMAGES = 2
_MIN_ANGLE = 0.5  # degrees between rays, below which their depth is not known
_REWEIGHTINGS = 5


@dataclass(frozen=True)
class Ray:
    """A half line from a camera through a pixel."""

    origin: np.ndarray  # world units, (3,)
    direction: np.ndarray  # of length 1, (3,)
    pixel_angle: float  # of a pixel of the photograph, radians


@dataclass(frozen=True)
class TriangulatedPoint:
    """A point that several photographs show."""

    position: np.ndarray  # world units, (3,)
    error: float  # root of the mean square of the distances to its rays, pixels
    angle: float  # the largest between two of its rays, degrees

    @property
    def is_certain(self) -> bool:
        """Whether the rays differ enough to determine the depth."""
        return self.angle >= _MIN_ANGLE


@dataclass
class PixelRays:
    """Rays through pixels of the photographs as they were taken.

    Pixels of control points belong to the photographs of the camera. A scene may hold flat copies
    of them: made by this program, in which case the lens is known, or by another one, whose pixels
    then count.
    """

    scene: Scene
    _cameras: dict[str, Camera] = field(init=False)
    _names: NameIndex = field(init=False)
    _input_names: OriginalNames = field(init=False)
    _lenses: dict[str, pycolmap.Camera] = field(init=False)

    def __post_init__(self) -> None:
        scene = self.scene
        self._cameras = {camera.name: camera for camera in scene.calibrated_cameras}
        self._names = NameIndex(self._cameras)
        self._lenses = _lenses_of(scene.root)
        self._input_names = OriginalNames(self._lenses)

    def camera_of(self, observation: PointObservation) -> Camera:
        """Return the camera whose photograph an observation names.

        Raises:
            UserError: The capture has no such photograph.
        """
        image = observation.image
        name = image if image in self._cameras else self._names.find(image)
        if name is None:
            example = next(iter(self._cameras), "none")
            raise UserError(
                f"{observation.context}: {image} is no registered photograph of the capture (as "
                f"{example}); correct the name"
            )
        return self._cameras[name]

    def ray(self, observation: PointObservation) -> Ray:
        """Return the ray through the pixel of an observation.

        Raises:
            UserError: The photograph is not there, or has no such pixel.
        """
        camera = self.camera_of(observation)
        u = observation.u
        v = observation.v
        lens = self._lens(camera)
        if lens is None:
            view = at_size_of_file(camera)
            width = view.width
            height = view.height
            plane = np.array([(u - view.cx) / view.fx, (v - view.cy) / view.fy])
            focal = view.fx
        else:
            width = lens.width
            height = lens.height
            plane = np.asarray(lens.cam_from_img(np.array([u, v]))).reshape(-1)[:2]
            focal = lens.mean_focal_length()
        is_inside = 0 <= u <= width and 0 <= v <= height
        if not (is_inside and np.isfinite(plane).all()):
            raise UserError(
                f"{observation.context}: pixel {u:g}, {v:g} is outside of {observation.image}, "
                f"which is {width} x {height}; correct the line"
            )
        return _ray_through(camera, plane, focal)

    def _lens(self, camera: Camera) -> pycolmap.Camera | None:
        """Return the lens of a photograph whose flat copy the scene uses; else None."""
        if camera.lens and camera.source_path is not None:
            width, height = image_size(camera.source_path)
            return lens_of(camera.lens, width, height)
        name = self._input_names.find(camera.name)
        lens = None if name is None else self._lenses[name]
        if lens is None or lens.is_undistorted():
            return None
        # Where images were reduced, pixels are those of the large ones.
        return lens


def _lenses_of(root: Path) -> dict[str, pycolmap.Camera]:
    """Return the lenses with which photographs were taken, by name, where convert found them."""
    model = root / WORK / "sparse" / "0"
    if format_of(model) is None:
        return {}
    reconstruction = read_reconstruction(model)
    originals = original_photographs(root)
    lenses = {}
    for number in reconstruction.reg_image_ids():
        image = reconstruction.images[number]
        lens = reconstruction.cameras[image.camera_id]
        path = originals.get(image.name)
        if path is not None and not lens.is_undistorted():
            width, height = _upright_size(path, lens)
            lens = lens_at(lens, width, height) or lens
        lenses[image.name] = lens
    return lenses


def _upright_size(path: Path, lens: pycolmap.Camera) -> tuple[int, int]:
    """Return the size of a photograph, turned as its lens has it."""
    width, height = image_size(path)
    if (width > height) != (lens.width > lens.height):
        return height, width
    return width, height


def pinhole_ray(view: Camera, pixel: np.ndarray) -> Ray:
    """Return the ray through a pixel, (2,), of the image that the scene itself uses.

    Args:
        view: The camera at the size of that image, see :func:`at_size_of_file`.
    """
    plane = (pixel - [view.cx, view.cy]) / [view.fx, view.fy]
    return _ray_through(view, plane, view.fx)


def _ray_through(camera: Camera, plane: np.ndarray, focal: float) -> Ray:
    """Return the ray of a camera through a place, (2,), on its plane of depth 1."""
    direction = camera.rotation.T @ np.array([*plane, 1.0])
    length = float(np.linalg.norm(direction))
    return Ray(camera.center, direction / length, 1 / (focal * length))


def at_size_of_file(camera: Camera) -> Camera:
    """Return a camera at the size of its image, which may have been scaled after calibration."""
    if camera.image_path is None or not camera.image_path.is_file():
        return camera
    width, height = image_size(camera.image_path)
    return camera.resized(width, height)


def triangulated(name: str, rays: Sequence[Ray]) -> TriangulatedPoint:
    """Return the point with the least squared angles to rays, two or more of them.

    Args:
        name: Of the point, for errors.
    """
    if len(rays) < MIN_IMAGES:
        raise ValueError(f"{name} has {len(rays)} rays")
    origins = np.stack([ray.origin for ray in rays])
    directions = np.stack([ray.direction for ray in rays])
    across = _across(directions)
    weights = np.ones(len(rays))
    position = origins.mean(axis=0)
    for _ in range(_REWEIGHTINGS):
        weighted = weights[:, None, None] * across
        right_side = (weighted @ origins[:, :, None]).sum(axis=0)[:, 0]
        position = np.linalg.lstsq(weighted.sum(axis=0), right_side, rcond=None)[0]
        distances = np.linalg.norm(position - origins, axis=1)
        # Angles count, not distances: far rays are less sure of a place.
        weights = (distances.min() / np.maximum(distances, 1e-12)) ** 2
    errors = pixel_errors(position, rays)
    cosines = np.clip(directions @ directions.T, -1, 1)
    angle = float(np.degrees(np.arccos(cosines.min())))
    return TriangulatedPoint(position, float(np.sqrt(np.mean(errors**2))), angle)


def pixel_errors(position: np.ndarray, rays: Sequence[Ray]) -> np.ndarray:
    """Return how far rays miss a position, (3,), in pixels of their photographs. (N,)"""
    origins = np.stack([ray.origin for ray in rays])
    across = _across(np.stack([ray.direction for ray in rays]))
    offsets = np.linalg.norm((across @ (position - origins)[:, :, None])[..., 0], axis=1)
    distances = np.maximum(np.linalg.norm(position - origins, axis=1), 1e-12)
    pixel_angles = np.array([ray.pixel_angle for ray in rays])
    return offsets / distances / pixel_angles


def _across(directions: np.ndarray) -> np.ndarray:
    """Return projection matrices onto the planes normal to directions, (N, 3). (N, 3, 3)"""
    return np.eye(3) - directions[:, :, None] * directions[:, None, :]
