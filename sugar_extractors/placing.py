# SPDX-License-Identifier: Apache-2.0
"""Placement flags of results: upright, scaled, in metres; the matrix from the capture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from gaussian_splatting.core.moved import moved_points
from gaussian_splatting.core.subsets import box_of_most
from gaussian_splatting.data.cameras import Camera, upright_axes
from gaussian_splatting.data.names import NameIndex
from gaussian_splatting.data.world_offset import offset_for
from sugar_utils.errors import UserError
from sugar_utils.flags import positive_float
from sugar_utils.schemas import FAR
from sugar_utils.settings import flag

ORIENTATIONS = ("none", "up")
_LOWEST = 0.01
_SCALES = 1e-6, 1e6
_flag = partial(flag, group="texture")


@dataclass(frozen=True)
class PlacementOptions:
    """Flags of copies that stand upright, or are in metres."""

    orient: str | None = _flag(
        None,
        "up: also write the textured mesh and the refined Gaussians upright, y up and "
        "standing on 0, as NAME_placed, with the matrix in NAME_placed.json; unset: up in the "
        "folder of results of a pipeline, none elsewhere",
        choices=ORIENTATIONS,
    )
    scale_factor: float | None = _flag(
        None, "factor of a scaled copy, NAME_placed", parse=positive_float
    )
    known_distance: tuple[str, ...] | None = _flag(
        None,
        "also write it in metres, as NAME_placed: two photographs or two points x,y,z of the "
        "capture, and how many metres lie between the cameras or points",
        parse=str,
        nargs=3,
        metavar=("A", "B", "METRES"),
        no_effect_when="with --scale_factor it is an error",
    )

    def __post_init__(self) -> None:
        if self.scale_factor is not None and self.known_distance is not None:
            raise UserError("--scale_factor and --known_distance both give a scale; leave one out")
        if self.scale_factor is not None:
            _checked_scale(self.scale_factor, f"--scale_factor {self.scale_factor:g}")
        if self.known_distance is not None:
            _metres(self.known_distance[2])

    @property
    def wanted(self) -> bool:
        """Whether anything is to be moved or scaled."""
        return self.is_scaled or self.orient == "up"

    @property
    def is_scaled(self) -> bool:
        """Whether a scale is given."""
        return self.scale_factor is not None or self.known_distance is not None

    @property
    def needs_cameras(self) -> bool:
        """Whether it takes the cameras of a capture to place anything."""
        places = (self.known_distance or ())[:2]
        return self.orient == "up" or any(point_of(text) is None for text in places)


def placing_matrix(
    cameras: Sequence[Camera],
    points: np.ndarray,
    vertices: np.ndarray,
    options: PlacementOptions,
    world_offset: np.ndarray | None = None,
) -> np.ndarray:
    """Return the (4, 4) matrix from the world of the capture to that of the copy.

    Upright meshes stand on y = 0, the middle of their base at the origin, and show +z the side that
    the photographs show. Others stay where they are, but for the scale.

    Args:
        cameras: Of the capture.
        points: Of the reconstruction, which may show the ground. (P, 3)
        vertices: Of the mesh, or the centres of Gaussians. (V, 3)
        options: How the copy is to stand.
        world_offset: See :func:`scale_of`. (3,)
    """
    matrix = np.eye(4)
    if options.orient == "up":
        rotation = upright_axes(cameras, points)
        turned = vertices @ rotation.T
        low, high = box_of_most(turned, _LOWEST)
        base = np.array([(low[0] + high[0]) / 2, turned[:, 1].min(), (low[2] + high[2]) / 2])
        matrix[:3, :3] = rotation
        matrix[:3, 3] = -base
    matrix[:3] *= scale_of(cameras, options, world_offset)
    reach = np.abs(moved_points(vertices, matrix)).max(initial=0)
    if options.wanted and reach > FAR:
        raise UserError(f"the copy would reach {reach:.2g} units far; choose a smaller scale")
    return matrix


def scale_of(
    cameras: Sequence[Camera], options: PlacementOptions, world_offset: np.ndarray | None = None
) -> float:
    """Return the scale of the copy, by a factor or by a known distance.

    Args:
        cameras: Of the capture.
        options: With the factor or the distance.
        world_offset: That is subtracted from coordinates of the original capture; points may have
            these. (3,)
    """
    if options.scale_factor is not None:
        return options.scale_factor
    if options.known_distance is None:
        return 1.0
    a, b, metres = options.known_distance
    with np.errstate(over="ignore"):
        first = _position_of(a, cameras, world_offset)
        second = _position_of(b, cameras, world_offset)
        distance = float(np.linalg.norm(first - second))
    if not distance > 0:
        raise UserError(f"--known_distance {a} {b}: both are the same place; name two others")
    return _checked_scale(_metres(metres) / distance, f"--known_distance {a} {b} {metres}")


def _checked_scale(scale: float, given: str) -> float:
    low, high = _SCALES
    if not low <= scale <= high:
        raise UserError(
            f"{given}: makes it {scale:.3g} times as large; it must be {low:g} to {high:g} times"
        )
    return scale


def _metres(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not (np.isfinite(value) and value > 0):
        raise UserError(f"--known_distance ... {text}: the distance must be a number of metres")
    return value


def check_names(options: PlacementOptions, names: Sequence[str]) -> None:
    """Raise a UserError if a known distance names images that are not among ``names``."""
    for text in (options.known_distance or ())[:2]:
        if point_of(text) is None:
            _photograph_of(text, names)


def _position_of(
    text: str, cameras: Sequence[Camera], world_offset: np.ndarray | None
) -> np.ndarray:
    """Return a point of the capture, or the centre of a camera. (3,)"""
    by_name = {camera.name: camera for camera in cameras}
    point = point_of(text)
    if point is None:
        return by_name[_photograph_of(text, list(by_name))].center
    return point if world_offset is None else point - offset_for(point[None], world_offset)


def point_of(text: str) -> np.ndarray | None:
    """Return a point ``x,y,z`` of the capture, (3,); None for any other text."""
    try:
        point = np.array([float(part) for part in text.strip("()").split(",")])
    except ValueError:
        return None
    return point if len(point) == 3 and np.isfinite(point).all() else None


def _photograph_of(text: str, names: Sequence[str]) -> str:
    name = text if text in names else NameIndex(names).find(text)
    if name is None:
        example = f" (as {names[0]})" if names else ""
        raise UserError(
            f"--known_distance {text}: neither a registered photograph{example} nor a point x,y,z"
        )
    return name
