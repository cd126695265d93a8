# SPDX-License-Identifier: Apache-2.0
"""Results upright and in metres: a copy of mesh and Gaussians, and the matrix that moved them.

Everything else stays in the world of the capture, which has no up and no unit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from gaussian_splatting.cloud import GaussianCloud
from gaussian_splatting.data.cameras import Camera, upright_axes
from gaussian_splatting.data.names import NameIndex
from gaussian_splatting.data.ply import write_gaussian_ply
from gaussian_splatting.data.scene import Scene
from gaussian_splatting.data.world_offset import offset_for
from gaussian_splatting.formats.moved import GLB_AXES, moved_cloud
from sugar_extractors.texture import textured_mesh_io
from sugar_extractors.texture.textured_mesh_io import MeshStyle, TexturedMesh
from sugar_utils.errors import Notify, UserError
from sugar_utils.files import file_digest, read_json, write_json_atomic
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
        None, "also write it so many times as large, as NAME_placed", parse=positive_float
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


def placed_path(obj_path: Path) -> Path:
    """Return the OBJ of the copy beside a mesh."""
    return obj_path.with_name(f"{obj_path.stem}_placed.obj")


def placed_gaussians(obj_path: Path) -> Path:
    """Return the PLY of the Gaussians of the copy beside a mesh."""
    return obj_path.with_name(f"{placed_path(obj_path).stem}_gaussians.ply")


def write_placed(
    obj_path: Path,
    scene: Scene,
    gaussians: Callable[[], GaussianCloud],
    options: PlacementOptions,
    glb: bool,
    notify: Notify,
    lit: bool = False,
) -> None:
    """Write the copy of a textured mesh and its Gaussians, unless it is there as asked for."""
    mesh = textured_mesh_io.read_textured_mesh(obj_path)
    vertices = mesh.vertices.numpy().astype(np.float64)
    matrix = placement(scene.calibrated_cameras, scene.points, vertices, options, scene.offset)
    target = placed_path(obj_path)
    upright = options.orient == "up"
    metric = options.known_distance is not None
    note_file = target.with_suffix(".json")
    moved = moved_points(vertices, matrix)
    size = np.ptp(moved, axis=0)
    note = {
        "matrix": matrix.tolist(),
        "glb_matrix": glb_matrix(matrix, upright).tolist(),
        "meaning": "placed = matrix x (x, y, z, 1) of the capture; rows of 4; glb_matrix: of the "
        "GLB, whose format wants y up",
        "up": "+y" if upright else None,
        "unit": "metre" if metric else None,
        "size": size.tolist(),
        "source": obj_path.name,
        "source_digest": file_digest(obj_path),
        "lit": lit,
    }
    files = [*textured_mesh_io.mesh_files(target, glb), placed_gaussians(obj_path), note_file]
    if not (all(path.is_file() for path in files) and read_json(note_file) == note):
        note_file.unlink(missing_ok=True)
        write_gaussian_ply(placed_gaussians(obj_path), moved_cloud(gaussians(), matrix))
        write_moved_mesh(target, mesh, moved, glb=glb, upright=upright, lit=lit)
        write_json_atomic(note_file, note)
    sides = " x ".join(f"{side:.3g}" for side in size)
    unit = " m" if metric else ""
    notify(f"placed mesh and Gaussians, {sides}{unit}: {target}")


def write_moved_mesh(
    obj_path: Path, mesh: TexturedMesh, moved: np.ndarray, glb: bool, upright: bool, lit: bool
) -> None:
    """Write a textured mesh with its vertices elsewhere.

    Args:
        moved: The vertices, (V, 3); rounded to float32.
        upright: Whether y is up in them, as the GLB wants it.
    """
    placed = replace(mesh, vertices=torch.from_numpy(moved.astype(np.float32)))
    style = MeshStyle(y_up=upright, lit=lit, obj_normals=True)
    textured_mesh_io.write_textured_mesh(obj_path, placed, glb=glb, style=style)


def glb_matrix(matrix: np.ndarray, upright: bool) -> np.ndarray:
    """Return the (4, 4) matrix to a GLB, which turns a world that is not upright to y up."""
    return matrix if upright else GLB_AXES @ matrix


def placement(
    cameras: Sequence[Camera],
    points: np.ndarray,
    vertices: np.ndarray,
    options: PlacementOptions,
    offset: np.ndarray | None = None,
) -> np.ndarray:
    """Return the (4, 4) matrix from the world of the capture to that of the copy.

    Upright meshes stand on y = 0, the middle of their base at the origin, and show +z the side that
    the photographs show. Others stay where they are, but for the scale.

    Args:
        offset: That is subtracted from captures far from the origin, (3,); None: none is.
    """
    matrix = np.eye(4)
    if options.orient == "up":
        rotation = upright_axes(cameras, points)
        turned = vertices @ rotation.T
        low, high = np.quantile(turned, (_LOWEST, 1 - _LOWEST), axis=0)
        base = np.array([(low[0] + high[0]) / 2, turned[:, 1].min(), (low[2] + high[2]) / 2])
        matrix[:3, :3] = rotation
        matrix[:3, 3] = -base
    matrix[:3] *= scale_of(cameras, options, offset)
    reach = np.abs(moved_points(vertices, matrix)).max(initial=0)
    if options.wanted and reach > FAR:
        raise UserError(f"the copy would reach {reach:.2g} units far; choose a smaller scale")
    return matrix


def scale_of(
    cameras: Sequence[Camera], options: PlacementOptions, offset: np.ndarray | None = None
) -> float:
    """Return the scale of the copy, by a factor or by a known distance.

    Args:
        offset: That is subtracted from captures far from the origin, (3,); None: none is.
    """
    if options.scale_factor is not None:
        return options.scale_factor
    if options.known_distance is None:
        return 1.0
    a, b, metres = options.known_distance
    with np.errstate(over="ignore"):
        ends = [_place_of(text, cameras, offset) for text in (a, b)]
        distance = float(np.linalg.norm(ends[0] - ends[1]))
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


def _place_of(text: str, cameras: Sequence[Camera], offset: np.ndarray | None) -> np.ndarray:
    """Return where a camera or a point is in the world of the cameras. (3,)"""
    point = point_of(text)
    if point is None:
        by_name = {camera.name: camera for camera in cameras}
        return by_name[_photograph_of(text, list(by_name))].center
    # Of captures far from the origin the user may know the original coordinates alone.
    return point if offset is None else point - offset_for(point[None], offset)


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


def moved_points(vertices: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    """Return points after an affine map. (V, 3) and (4, 4) -> (V, 3)"""
    return vertices @ matrix[:3, :3].T + matrix[:3, 3]
