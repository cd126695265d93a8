# SPDX-License-Identifier: Apache-2.0
"""Pinhole cameras: one pose, one size and one set of intrinsics each; pixels and rays.

Axes are COLMAP's: x right, y down, z forward. Image coordinates have their origin at the corner
of the image: the middle of its first pixel is at (0.5, 0.5).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple, overload

import numpy as np
import torch
from torch import Tensor

from gaussian_splatting.core.subsets import about, at_most, finite_points

MaskMode = Literal["object", "ignore"]

REFERENCE_NEAR = 0.2
"""Near plane of 3DGS in world units; see :func:`near_plane` for captures of what is nearer."""

_NEAR_SHARE = 0.5  # of the depth of the nearest points
_NEAR_QUANTILE = 0.01  # of a camera's points may lie nearer: single points are often wrong
_LEAST_NEAR = 1e-3  # of the median depth of what a camera sees
_NEAR_OF_EXTENT = 0.02  # where there are no points
_MAX_NEAR_CAMERAS = 500
_MAX_NEAR_POINTS = 20_000
_SMALLEST = torch.finfo(torch.float32).tiny
MIN_GROUND_SHARE = 0.15  # of the points must lie in a plane before it is taken for the ground
_MAX_TILT = 25.0
_PLANE_TRIALS = 500
_PLANE_WIDTH = 0.01
_MAX_PLANE_POINTS = 20_000
_MIN_PLANE_POINTS = 100
_LEVEL_SPREAD = 0.3
_MAX_UP_ANGLE = 60  # degrees between the vertical and the mean upper side of the images
_LEAST_LEVEL = 0.1  # length of the level part of a direction of view, below which it has no front


@dataclass(frozen=True)
class ViewMask:
    """The mask of an image: which pixels count; black ones do not."""

    path: Path
    mode: MaskMode  # ``object``: outside there is nothing; ``ignore``: outside, nothing is known
    alpha: bool = False  # the file is the image, and its transparency is the mask
    lens: str = ""  # distortion of the file, see ``Camera.lens``; empty for none
    # Mean error of its outline as a share of the longest side of the image; 0 for masks that are as
    # precise as can be measured.
    outline_error: float = 0.0
    weight: float = 1.0  # of its vote about the visual hull
    white: int = 255  # the brightness that counts fully; 1 for masks that hold labels


class Projection(NamedTuple):
    """Points in the image of a camera."""

    pixels: np.ndarray  # (N, 2), measured from the corner of the image
    depths: np.ndarray  # along the axis of the camera, world units, (N,)
    is_inside: np.ndarray  # points before the camera and in the image, (N,) bool


@dataclass(frozen=True, eq=False)
class Camera:
    """A posed pinhole camera and the image it took."""

    name: str
    width: int  # image width in pixels at which this camera renders
    height: int  # image height in pixels
    fx: float  # horizontal focal length in pixels
    fy: float  # vertical focal length in pixels
    cx: float  # principal point x in pixels from the left edge
    cy: float  # principal point y in pixels from the top edge
    rotation: np.ndarray  # world-to-camera rotation, (3, 3) float64
    translation: np.ndarray  # world-to-camera translation in world units, (3,) float64
    image_path: Path | None = None  # the image on disk; None for a camera without one
    # The image as it was taken, where ``image_path`` is an undistorted copy.
    source_path: Path | None = None
    lens: str = ""  # camera model and parameters that the copy was undistorted with; else empty
    mask_path: Path | None = None  # its mask, where the scene's files name one
    depth_path: Path | None = None  # its depth map, where the scene's files name one
    mask: ViewMask | None = None  # which pixels of the image count; None for all
    # Gaussians whose centre is not farther than this along the view axis are culled, world units.
    near: float = REFERENCE_NEAR

    @property
    def center(self) -> np.ndarray:
        """Camera centre in world units. (3,) float64"""
        return -self.rotation.T @ self.translation

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of the image in pixels."""
        return self.width, self.height

    @property
    def shape(self) -> tuple[int, int]:
        """Height and width of the image in pixels, as arrays have them."""
        return self.height, self.width

    @property
    def n_pixels(self) -> int:
        """Number of pixels of the image."""
        return self.width * self.height

    @property
    def longest_side(self) -> int:
        """Pixels along the longer side of the image."""
        return max(self.width, self.height)

    @property
    def tan_half_fov(self) -> tuple[float, float]:
        """Tangents of half the horizontal and vertical field of view."""
        return self.width / (2 * self.fx), self.height / (2 * self.fy)

    @property
    def image_file(self) -> Path:
        """The image on disk; a ``ValueError`` for a camera without one."""
        if self.image_path is None:
            raise ValueError(f"the camera {self.name} has no image")
        return self.image_path

    @property
    def image_mask(self) -> ViewMask:
        """The mask of the image; a ``ValueError`` for a camera without one."""
        if self.mask is None:
            raise ValueError(f"the camera {self.name} has no mask")
        return self.mask

    @property
    def shows_object(self) -> bool:
        """Whether the image has a mask of an object."""
        return self.mask is not None and self.mask.mode == "object"

    def resized(self, width: int, height: int) -> Camera:
        """Return the same view at another size: intrinsics scale with the image."""
        sx = width / self.width
        sy = height / self.height
        return replace(
            self,
            width=width,
            height=height,
            fx=self.fx * sx,
            fy=self.fy * sy,
            cx=self.cx * sx,
            cy=self.cy * sy,
        )

    def reduced(self, longest_side: int) -> Camera:
        """Return the same view with at most this many pixels along its longest side."""
        return self.resized(*reduced_size(*self.size, longest_side))

    def scaled(self, scale: float) -> Camera:
        """Return the same view at a share of its size, in whole pixels."""
        width = max(1, round(self.width * scale))
        height = max(1, round(self.height * scale))
        return self.resized(width, height)

    @overload
    def to_view(self, points: np.ndarray) -> np.ndarray: ...

    @overload
    def to_view(self, points: Tensor) -> Tensor: ...

    def to_view(self, points: np.ndarray | Tensor) -> np.ndarray | Tensor:
        """Return points in the axes of the camera. (N, 3) world units -> (N, 3)

        Tensors keep their precision and device, and gradients reach them.
        """
        if isinstance(points, np.ndarray):
            return points @ self.rotation.T + self.translation
        rotation = torch.from_numpy(self.rotation).to(points)
        return points @ rotation.T + torch.from_numpy(self.translation).to(points)

    def project(self, points: np.ndarray) -> Projection:
        """Return where points are in the image. (N, 3) world units"""
        view = self.to_view(points)
        depths = view[:, 2]
        is_inside = depths > 0
        pixels = view[:, :2] / np.where(is_inside, depths, 1.0)[:, None]
        pixels = pixels * (self.fx, self.fy) + (self.cx, self.cy)
        is_inside &= ((pixels >= 0) & (pixels < self.size)).all(axis=1)
        return Projection(pixels, depths, is_inside)

    def coordinates(self, points: Tensor) -> Tensor:
        """Return :meth:`to_view` of points with the same bits on every machine. (N, 3) -> (N, 3)"""
        return torch.stack([self.coordinate(points, axis) for axis in range(3)], dim=-1)

    def coordinate(self, points: Tensor, axis: int) -> Tensor:
        """Return the coordinate of points along an axis of the camera: 0 x, 1 y, 2 depth.

        It is a sum of three products, and not a matrix product, whose order depends on the machine.

        (N, 3) world units -> (N,)
        """
        x, y, z = points.unbind(-1)
        row = self.rotation[axis]
        rotated = x * float(row[0]) + y * float(row[1]) + z * float(row[2])
        return rotated + float(self.translation[axis])


LoadImage = Callable[[Camera], Tensor]
"""Returns the image of a camera at its size, with a mask as a fourth channel. (H, W, C) uint8"""


def reduced_size(width: int, height: int, longest_side: int) -> tuple[int, int]:
    """Return the size of an image with at most so many pixels along its longest side."""
    scale = min(1.0, longest_side / max(width, height))
    return max(1, round(width * scale)), max(1, round(height * scale))


def centers_of(cameras: Iterable[Camera]) -> np.ndarray:
    """Return the camera centres. (N, 3) world units"""
    return np.stack([camera.center for camera in cameras])


def view_directions(cameras: Iterable[Camera]) -> np.ndarray:
    """Return the directions in which cameras look, in the world. (N, 3) of length 1"""
    return np.stack([camera.rotation[2] for camera in cameras])


def middle_of(cameras: Sequence[Camera]) -> np.ndarray:
    """Return the mean of the camera centres. (3,) world units"""
    return centers_of(cameras).mean(axis=0)


def nearest_pixel_sizes(points: np.ndarray, cameras: Sequence[Camera]) -> np.ndarray:
    """Return the size of a pixel at points, (P, 3), in the nearest camera. (P,) world units"""
    sizes = np.full(len(points), np.inf)
    for camera in cameras:
        distances = np.linalg.norm(points - camera.center, axis=1)
        np.minimum(sizes, distances / camera.fx, out=sizes)
    return sizes


def nearest_rotation(matrix: np.ndarray) -> np.ndarray | None:
    """Return the rotation nearest to a matrix, (3, 3); None if it is not one up to rounding."""
    # Numbers so large that their squares overflow are no rotation either.
    if not np.abs(matrix).max() < 2:
        return None
    is_orthonormal = np.allclose(matrix.T @ matrix, np.eye(3), atol=1e-3)
    if not is_orthonormal or np.linalg.det(matrix) <= 0:
        return None
    left_vectors, _, right_vectors = np.linalg.svd(matrix)
    return left_vectors @ right_vectors


def camera_extent(cameras: Sequence[Camera]) -> float:
    """Return 1.1 times the largest distance of a camera from their mean, in world units."""
    centers = centers_of(cameras)
    distances = np.linalg.norm(centers - centers.mean(axis=0), axis=1)
    return float(1.1 * distances.max())


def near_plane(cameras: Sequence[Camera], points: np.ndarray) -> float:
    """Return the near plane in world units: half the depth of the nearest points.

    At most the 0.2 units of 3DGS, so that captures in usual units are rendered as there.

    Args:
        cameras: All cameras of the capture.
        points: Points of the reconstruction, (P, 3); where there are none the camera extent counts.
    """
    points = at_most(points, _MAX_NEAR_POINTS)
    depths = [_nearest_depth(camera, points) for camera in at_most(cameras, _MAX_NEAR_CAMERAS)]
    depths = [depth for depth in depths if depth is not None]
    if depths:
        return min(REFERENCE_NEAR, _NEAR_SHARE * min(depths))
    extent = camera_extent(cameras)
    return min(REFERENCE_NEAR, _NEAR_OF_EXTENT * extent) if extent > 0 else REFERENCE_NEAR


def _nearest_depth(camera: Camera, points: np.ndarray) -> float | None:
    """Return the depth of the nearest points in the image; None where there are no points."""
    projection = camera.project(points)
    depths = projection.depths[projection.is_inside]
    if not len(depths):
        return None
    least = _LEAST_NEAR * float(np.median(depths))
    return max(float(np.quantile(depths, _NEAR_QUANTILE)), least)


class Pixels(NamedTuple):
    """The pixels of points in an image; outside of it, the nearest pixel of its border."""

    rows: Tensor  # (...,) int64
    columns: Tensor  # (...,) int64
    inside: Tensor  # points before the camera and in the image, (...,) bool


def pixel_rays(camera: Camera, *, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Return the points at depth 1 of the middles of pixels, in camera axes. (H, W, 3)"""
    x = (torch.arange(camera.width, dtype=dtype, device=device) + 0.5 - camera.cx) / camera.fx
    y = (torch.arange(camera.height, dtype=dtype, device=device) + 0.5 - camera.cy) / camera.fy
    grid = torch.stack(torch.meshgrid(x, y, indexing="xy"), dim=-1)
    return torch.cat([grid, torch.ones_like(grid[..., :1])], dim=-1)


def pixels_of(points: Tensor, camera: Camera) -> Pixels:
    """Return the pixels of points. (..., 3) in camera axes"""
    x, y, z = points.unbind(dim=-1)
    depth = z.clamp_min(_SMALLEST)
    columns = (x / depth * camera.fx + camera.cx).floor()
    rows = (y / depth * camera.fy + camera.cy).floor()
    inside = (z > 0) & (columns >= 0) & (columns < camera.width)
    inside &= (rows >= 0) & (rows < camera.height)
    rows = rows.clamp(0, camera.height - 1)
    columns = columns.clamp(0, camera.width - 1)
    return Pixels(rows.long(), columns.long(), inside)


def up_direction(rotations: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Estimate the direction against gravity. (3,) float64 of length 1

    People tilt cameras up and down and hardly roll them, so the axis that is most square to all
    images' horizontal axes is the vertical. Where many points lie in a plane that is level within
    25 degrees by this, its normal is more exact still.

    Args:
        rotations: World to camera, x right, y down. (N, 3, 3)
        points: Of the reconstruction; may be none. (P, 3)
    """
    mean_up = -rotations[:, 1].mean(axis=0)
    mean_up = mean_up / max(np.linalg.norm(mean_up), 1e-12)
    horizontal = rotations[:, 0]
    values, axes = np.linalg.eigh(np.einsum("ni,nj->ij", horizontal, horizontal))
    up = axes[:, 0].copy()
    if up @ mean_up < 0:
        up = -up
    # Horizontal axes that all point one way, or rolled cameras, leave the vertical open.
    is_ambiguous = values[0] > _LEVEL_SPREAD * values[1]
    if is_ambiguous or up @ mean_up < np.cos(np.radians(_MAX_UP_ANGLE)):
        up = mean_up
    ground = _ground_normal(points, up)
    return up if ground is None else ground


def planes_of_triples(points: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield a point and the unit normal of planes through three of the points, (P, 3).

    They are the candidates of RANSAC (Fischler and Bolles 1981), always the same draws.
    """
    draws = np.random.default_rng(0).integers(len(points), size=(_PLANE_TRIALS, 3))
    a, b, c = points[draws].swapaxes(0, 1)
    for corner, normal in zip(a, np.cross(b - a, c - a), strict=True):
        length = np.linalg.norm(normal)
        if length >= 1e-12:
            yield corner, normal / length


def _ground_normal(points: np.ndarray, up: np.ndarray) -> np.ndarray | None:
    """Return the upward normal of a nearly level plane with many points; None without one."""
    points = finite_points(points)
    points = about(points, _MAX_PLANE_POINTS).astype(np.float64)
    if len(points) < _MIN_PLANE_POINTS:
        return None
    low, high = np.percentile(points, (5, 95), axis=0)
    width = _PLANE_WIDTH * np.linalg.norm(high - low)
    level = np.cos(np.radians(_MAX_TILT))
    best = None
    best_count = MIN_GROUND_SHARE * len(points)
    for corner, normal in planes_of_triples(points):
        if abs(normal @ up) < level:
            continue
        in_plane = np.abs((points - corner) @ normal) < width
        count = int(in_plane.sum())
        if count > best_count:
            best = in_plane
            best_count = count
    if best is None:
        return None
    plane_points = points[best]
    centered = plane_points - plane_points.mean(axis=0)
    _, _, axes = np.linalg.svd(centered, full_matrices=False)
    normal = axes[2]
    if normal @ up < 0:
        normal = -normal
    return normal if normal @ up >= level else None


def looked_at(cameras: Sequence[Camera]) -> np.ndarray:
    """Return the point that is nearest to all lines of sight, by least squares. (3,)

    Where all look the same way, it is ahead of their middle, as far as the outermost camera is from
    it.
    """
    centers = centers_of(cameras)
    ahead = view_directions(cameras)
    # Projections onto the plane across each line of sight.
    projections = np.eye(3) - ahead[:, :, None] * ahead[:, None, :]
    normal_matrix = projections.sum(axis=0)
    if np.linalg.eigvalsh(normal_matrix)[0] > 1e-3 * len(cameras):
        right_side = np.einsum("nij,nj->i", projections, centers)
        return np.linalg.solve(normal_matrix, right_side)
    middle = centers.mean(axis=0)
    mean_direction = ahead.mean(axis=0)
    distance = np.linalg.norm(centers - middle, axis=1).max()
    return middle + distance * mean_direction / np.linalg.norm(mean_direction)


def upright_rotation(up: np.ndarray, front: np.ndarray) -> np.ndarray:
    """Return the rotation that brings ``up`` to +y and the level part of ``front`` to +z.

    These are the axes of glTF. (3, 3)

    Args:
        up: (3,) of length 1.
        front: From the object to the viewer. (3,)
    """
    z = front - (front @ up) * up
    if np.linalg.norm(z) < 1e-9 * max(np.linalg.norm(front), 1.0):
        # Seen from straight above: any level direction will do.
        z = np.cross(up, np.eye(3)[np.abs(up).argmin()])
    z = z / np.linalg.norm(z)
    return np.stack([np.cross(up, z), up, z])


def front_direction(cameras: Sequence[Camera], up: np.ndarray) -> np.ndarray:
    """Return the level direction from which a capture shows its object. (3,) of length 1

    It is opposite the mean direction of view. Where views from all around cancel each other, and
    where all look straight down, the first camera that looks level enough decides.

    Args:
        cameras: All cameras of the capture.
        up: The vertical of the world. (3,) of length 1
    """
    ahead = view_directions(cameras)
    for direction in (ahead.mean(axis=0), *ahead):
        level = direction - (direction @ up) * up
        length = np.linalg.norm(level)
        if length > _LEAST_LEVEL:
            return -level / length
    # Any level direction will do: that of the upper side of the first picture.
    return upright_rotation(up, cameras[0].rotation[1])[2]


def upright_axes(cameras: Sequence[Camera], points: np.ndarray) -> np.ndarray:
    """Return the rotation that brings the vertical to +y and the front of the object to +z. (3, 3)

    Rows are the directions to the right, up, and towards a viewer of the front.

    Args:
        cameras: All cameras of the capture.
        points: Points of the reconstruction, which may show the ground; may be none. (P, 3)
    """
    up = up_direction(np.stack([camera.rotation for camera in cameras]), points)
    return upright_rotation(up, front_direction(cameras, up))
