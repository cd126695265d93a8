# SPDX-License-Identifier: Apache-2.0
"""Bound Gaussians that follow an edited mesh, and where each one sits on the mesh.

Each triangle carries its Gaussians at fixed barycentric coordinates, turned within its plane. So
places and frames follow from the corners, sizes from the stretch of each triangle, and
view-dependent colours turn with it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from gaussian_splatting.core.sh_rotation import sh_rotation
from sugar_extractors.any_mesh import read_any_mesh
from sugar_scene import mesh_bound
from sugar_scene.mesh_bound import BoundCloud
from sugar_utils.errors import Notify, UserError
from sugar_utils.files import atomic_path

_FLAT = 1e-12  # area of a degenerate triangle, relative to the squares of its edges
_STILL = 1e-9  # largest change of a matrix entry that counts as none
_SMALLEST_SIZE = 1e-12  # world units
_CHUNK_TRIANGLES = 4096


def reposed(cloud: BoundCloud, vertices: Tensor) -> BoundCloud:
    """Return Gaussians on the same triangles with their corners elsewhere.

    Args:
        vertices: In world units. (V, 3)
    """
    old_triangles = cloud.vertices.double()[cloud.faces]
    new_triangles = vertices.double()[cloud.faces]
    log_scales, rotations = _stretched(cloud, old_triangles, new_triangles)
    old_frames = mesh_bound.face_frames(old_triangles)
    new_frames = mesh_bound.face_frames(new_triangles)
    turns = new_frames @ old_frames.transpose(1, 2)
    return replace(
        cloud,
        vertices=vertices.to(cloud.vertices),
        log_scales=log_scales,
        rotations=rotations,
        sh_rest=_turned_colors(cloud.sh_rest, turns, cloud.per_triangle),
    )


def _stretched(
    cloud: BoundCloud, old_triangles: Tensor, new_triangles: Tensor
) -> tuple[Tensor, Tensor]:
    """Return log scales and rotations within the plane of triangles that were stretched."""
    before = _plane_edges(old_triangles)
    after = _plane_edges(new_triangles)
    identity = torch.eye(2, dtype=before.dtype, device=before.device)
    squares = before.square().sum(dim=(1, 2))
    is_flat = torch.linalg.det(before).abs() < _FLAT * squares
    is_flat = is_flat[:, None, None]
    stretch = after @ torch.linalg.inv(torch.where(is_flat, identity, before))
    # A triangle without area says nothing about how it was stretched.
    stretch = torch.where(is_flat, identity, stretch)
    stretch = stretch.repeat_interleave(cloud.per_triangle, dim=0)
    old_rotations = normalize(cloud.rotations.double(), dim=1)
    real, imaginary = old_rotations.unbind(1)
    turn = torch.stack([real, -imaginary, imaginary, real], dim=1).reshape(-1, 2, 2)
    old_scales = cloud.log_scales.double()
    axes = stretch @ turn @ torch.diag_embed(old_scales.exp())
    directions, sizes, _ = torch.linalg.svd(axes)
    # Of the two axes the one that was the first stays the first.
    along = (directions * axes[:, :, :1]).sum(dim=1).abs()
    is_swapped = (along[:, 0] < along[:, 1])[:, None]
    sizes = torch.where(is_swapped, sizes.flip(1), sizes)
    first_axis = torch.where(is_swapped, directions[:, :, 1], directions[:, :, 0])
    is_unchanged = (stretch - identity).abs().amax(dim=(1, 2)) < _STILL
    is_unchanged = is_unchanged[:, None]
    rotations = torch.where(is_unchanged, old_rotations, first_axis)
    log_scales = torch.where(is_unchanged, old_scales, sizes.clamp_min(_SMALLEST_SIZE).log())
    return log_scales.to(cloud.log_scales), rotations.to(cloud.rotations)


def _plane_edges(triangles: Tensor) -> Tensor:
    """Return two edges of each triangle in the axes of its plane, as columns.

    (F, 3, 3) -> (F, 2, 2)
    """
    axes = mesh_bound.face_frames(triangles)[..., 1:]
    edges = triangles[:, 1:] - triangles[:, :1]
    return (edges @ axes).transpose(1, 2)


def _turned_colors(sh_rest: Tensor, turns: Tensor, per_triangle: int) -> Tensor:
    """Rotate the coefficients of each triangle. (G, 15, 3), (F, 3, 3) -> (G, 15, 3)"""
    n_bands = sh_rest.shape[1]
    rest = sh_rest.double().reshape(len(turns), per_triangle, n_bands, 3)
    identity = torch.eye(3, dtype=turns.dtype, device=turns.device)
    is_turned = (turns - identity).abs().amax(dim=(1, 2)) > _STILL
    # A triangle without area has no frame that colours could turn with.
    is_turned &= torch.linalg.det(turns) > 0.5
    turned_rows = is_turned.nonzero()[:, 0]
    for rows in turned_rows.split(_CHUNK_TRIANGLES):
        matrices = sh_rotation(turns[rows].cpu().numpy())
        bands = matrices[:, None, :n_bands, :n_bands].to(rest)
        rest[rows] = bands @ rest[rows]
    return rest.reshape(sh_rest.shape).to(sh_rest)


class EditedMesh(NamedTuple):
    """An edited mesh of a refined model."""

    vertices: Tensor  # in the order of the model's, in the world of the file, (V, 3) float64
    triangles: Tensor | None  # rows of the model's triangles that are left; None for all, (K,)


def read_edited(
    path: Path, cloud: BoundCloud, notify: Notify, offset: np.ndarray | None = None
) -> EditedMesh:
    """Read an edited mesh; vertices may have moved, and triangles may be missing.

    Args:
        path: The mesh.
        cloud: The refined model.
        notify: Called with lines about what is left out.
        offset: That is subtracted from coordinates far from the origin. (3,)

    Raises:
        UserError: The mesh has other vertices or triangles than the model.
    """
    mesh = read_any_mesh(path, notify, offset)
    n_vertices = cloud.vertices.shape[0]
    model_faces = cloud.faces.cpu().numpy()
    n_faces = len(model_faces)
    if mesh.n_vertices != n_vertices or not 0 < mesh.n_faces <= n_faces:
        raise UserError(
            f"{path}: {mesh.n_vertices} vertices and {mesh.n_faces} triangles, the refined model "
            f"has {n_vertices} and {n_faces}; only move vertices or leave triangles out, and "
            "export with all vertices in their order"
        )
    vertices = torch.from_numpy(mesh.vertices)
    if np.array_equal(mesh.faces, model_faces):
        return EditedMesh(vertices, None)
    rows = _rows_of_triangles(mesh.faces, model_faces)
    if rows is None:
        raise UserError(
            f"{path}: its triangles join other vertices than those of the refined model; export "
            "with the order of vertices and triangles kept"
        )
    return EditedMesh(vertices, torch.from_numpy(rows))


def _rows_of_triangles(faces: np.ndarray, model_faces: np.ndarray) -> np.ndarray | None:
    """Return the rows of a model's triangles that a mesh has, in their order; None for others."""
    both = np.concatenate([model_faces, faces])
    _, numbers = np.unique(both, axis=0, return_inverse=True)
    numbers = numbers.reshape(-1)
    n_faces = len(model_faces)
    row_of_number = np.full(numbers.max() + 1, -1)
    # Of equal triangles the first one counts.
    row_of_number[numbers[:n_faces][::-1]] = np.arange(n_faces)[::-1]
    rows = row_of_number[numbers[n_faces:]]
    is_in_order = rows[0] >= 0 and (np.diff(rows) > 0).all()
    return rows if is_in_order else None


def write_binding(path: Path, cloud: BoundCloud) -> None:
    """Write which triangle carries each Gaussian and where, for other programs.

    A NumPy archive (``.npz``) with an entry per bound Gaussian, in the order of the PLY of the
    refined Gaussians, where the background follows: ``triangle`` (G,) int32, row of the face in the
    OBJ; ``barycentric`` (G, 3) float32, weights of its corners; ``rotation`` (G, 2) float32, unit
    complex number that turns the first axis from the direction of corner 2 to corner 1 towards
    normal x that direction; ``scale`` (G, 3) float32, deviations along normal and both axes, world
    units. ``faces`` (F, 3) int32 and ``vertices`` (V, 3) float32 are the mesh itself.
    """
    per_triangle = cloud.per_triangle
    n_faces = cloud.faces.shape[0]
    weights = np.array(mesh_bound.triangle_layout(per_triangle).barycentric, np.float32)
    rotations = normalize(cloud.rotations, dim=1).cpu().numpy()
    scales = cloud.activate().scales.detach().cpu().numpy()
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        np.savez_compressed(
            file,
            triangle=np.repeat(np.arange(n_faces, dtype=np.int32), per_triangle),
            barycentric=np.tile(weights, (n_faces, 1)),
            rotation=rotations.astype(np.float32),
            scale=scales.astype(np.float32),
            faces=cloud.faces.cpu().numpy().astype(np.int32),
            vertices=cloud.vertices.cpu().numpy().astype(np.float32),
        )
