# SPDX-License-Identifier: Apache-2.0
"""Gaussians of a refined model that follow an edited mesh, and the file that says how.

Each triangle carries its Gaussians at fixed barycentric coordinates, turned within its plane. So
places and frames follow from the corners, sizes from the stretch of each triangle, and
view-dependent colours turn with it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sugar_extractors.mesh_report import read_any_mesh
from sugar_extractors.texture.placed_export import sh_rotation
from sugar_scene.mesh_bound import BoundCloud, face_frames, triangle_layout
from sugar_utils.errors import UserError
from sugar_utils.files import atomic_path

_FLAT, _STILL = 1e-12, 1e-9
_PART = 4096


def reposed(cloud: BoundCloud, vertices: Tensor) -> BoundCloud:
    """Gaussians on the same triangles with their corners elsewhere. vertices: (V, 3) world units"""
    old, new = cloud.vertices.double()[cloud.faces], vertices.double()[cloud.faces]
    log_scales, rotations = _stretched(cloud, old, new)
    turns = face_frames(new) @ face_frames(old).transpose(1, 2)
    return replace(
        cloud,
        vertices=vertices.to(cloud.vertices),
        log_scales=log_scales,
        rotations=rotations,
        sh_rest=_turned_colors(cloud.sh_rest, turns, cloud.per_triangle),
    )


def _stretched(cloud: BoundCloud, old: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """Sizes and rotations within the plane of triangles that were stretched."""
    before, after = _plane_edges(old), _plane_edges(new)
    one = torch.eye(2, dtype=before.dtype, device=before.device)
    flat = torch.linalg.det(before).abs() < _FLAT * before.square().sum(dim=(1, 2))
    flat = flat[:, None, None]
    stretch = after @ torch.linalg.inv(torch.where(flat, one, before))
    # A triangle without area says nothing about how it was stretched.
    stretch = torch.where(flat, one, stretch).repeat_interleave(cloud.per_triangle, dim=0)
    own = torch.nn.functional.normalize(cloud.rotations.double(), dim=1)
    real, imaginary = own.unbind(1)
    turn = torch.stack([real, -imaginary, imaginary, real], dim=1).reshape(-1, 2, 2)
    axes = stretch @ turn @ torch.diag_embed(cloud.log_scales.double().exp())
    same = ((stretch - one).abs().amax(dim=(1, 2)) < _STILL)[:, None]
    left, sizes, _ = torch.linalg.svd(axes)
    # Of the two axes the one that was the first stays the first.
    along = (left * axes[:, :, :1]).sum(dim=1).abs()
    swap = (along[:, 0] < along[:, 1])[:, None]
    sizes = torch.where(swap, sizes.flip(1), sizes)
    first = torch.where(same, own, torch.where(swap, left[:, :, 1], left[:, :, 0]))
    log_scales = torch.where(same, cloud.log_scales.double(), sizes.clamp_min(1e-12).log())
    return log_scales.to(cloud.log_scales), first.to(cloud.rotations)


def _plane_edges(triangles: Tensor) -> Tensor:
    """Two edges of each triangle in the axes of its plane, as columns. (F, 3, 3) -> (F, 2, 2)"""
    _, tangent, bitangent = face_frames(triangles).unbind(-1)
    edges = triangles[:, 1:] - triangles[:, :1]
    return torch.stack([edges @ tangent[..., None], edges @ bitangent[..., None]], dim=1)[..., 0]


def _turned_colors(sh_rest: Tensor, turns: Tensor, per_triangle: int) -> Tensor:
    """Coefficients after the rotation of each triangle. (G, 15, 3), (F, 3, 3) -> (G, 15, 3)"""
    n_bands = sh_rest.shape[1]
    rest = sh_rest.double().reshape(len(turns), per_triangle, n_bands, 3)
    one = torch.eye(3, dtype=turns.dtype, device=turns.device)
    moved = (turns - one).abs().amax(dim=(1, 2)) > _STILL
    # A triangle without area has no frame that colours could turn with.
    moved &= torch.linalg.det(turns) > 0.5
    for rows in moved.nonzero()[:, 0].split(_PART):
        bands = sh_rotation(turns[rows].cpu().numpy())[:, None, :n_bands, :n_bands].to(rest)
        rest[rows] = bands @ rest[rows]
    return rest.reshape(sh_rest.shape).to(sh_rest)


def read_edited(path: Path, cloud: BoundCloud) -> Tensor:
    """Vertices of an edited mesh, in the order of the model's. (V, 3)"""
    mesh = read_any_mesh(path)
    if mesh.n_vertices != cloud.vertices.shape[0] or mesh.n_faces != cloud.faces.shape[0]:
        raise UserError(
            f"{path}: {mesh.n_vertices} vertices and {mesh.n_faces} triangles, the refined model "
            f"has {cloud.vertices.shape[0]} and {cloud.faces.shape[0]}; only move vertices, and "
            "export with their order kept"
        )
    if not np.array_equal(mesh.faces, cloud.faces.cpu().numpy()):
        raise UserError(
            f"{path}: its triangles join other vertices than those of the refined model; export "
            "with the order of vertices kept"
        )
    return torch.from_numpy(mesh.vertices)


def write_binding(path: Path, cloud: BoundCloud) -> None:
    """Write which triangle carries each Gaussian and where, for other programs.

    A NumPy archive (``.npz``) with an entry per Gaussian, in the order of the PLY of the refined
    Gaussians: ``triangle`` (G,) int32, row of the face in the OBJ; ``barycentric`` (G, 3) float32,
    weights of its corners; ``rotation`` (G, 2) float32, unit complex number that turns the first
    axis from the direction of corner 2 to corner 1 towards normal x that direction; ``scale``
    (G, 3) float32, deviations along normal and both axes, world units. ``faces`` (F, 3) int32 and
    ``vertices`` (V, 3) float32 are the mesh itself.
    """
    per_triangle, n_faces = cloud.per_triangle, cloud.faces.shape[0]
    weights = np.array(triangle_layout(per_triangle).barycentric, np.float32)
    rotations = torch.nn.functional.normalize(cloud.rotations, dim=1).cpu().numpy()
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        np.savez_compressed(
            file,
            triangle=np.repeat(np.arange(n_faces, dtype=np.int32), per_triangle),
            barycentric=np.tile(weights, (n_faces, 1)),
            rotation=rotations.astype(np.float32),
            scale=cloud.freed().log_scales.exp().cpu().numpy().astype(np.float32),
            faces=cloud.faces.cpu().numpy().astype(np.int32),
            vertices=cloud.vertices.cpu().numpy().astype(np.float32),
        )
